"""LoRA adapters with peft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from core.encoders import Pair
from core.errors import PairError
from models.encoders.factory import EncoderOptions, document_encoder, resolve_backend
from models.encoders.transformers import TransformersEncoder
from models.encoders.vllm import VllmEncoder
from models.pairs import load_pair
from tests.checkpoints import TEXTS, checkpoint_spec, token_states, unit, write_adapter
from tests.errors import raises


@pytest.mark.parametrize(
    ("kind", "task"),
    [(AutoModel, "FEATURE_EXTRACTION"), (AutoModel, None), (AutoModelForCausalLM, "CAUSAL_LM")],
)
def test_an_adapter_changes_vectors_like_peft(
    qwen3: Path, tmp_path: Path, kind: Any, task: str | None
) -> None:
    adapted = write_adapter(qwen3, tmp_path / "lora", kind, task).get_base_model()
    adapted = adapted.model if task == "CAUSAL_LM" else adapted
    spec = checkpoint_spec(qwen3, adapter="lora")
    plain = TransformersEncoder(checkpoint_spec(qwen3), Path(), device="cpu")
    ids = [tokens.ids for tokens in plain.tokenize(TEXTS)]
    expected = torch.stack([unit(token_states(adapted, row)[-1]) for row in ids]).numpy()
    vectors = TransformersEncoder(spec, tmp_path, device="cpu").encode(TEXTS).vectors
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    assert (vectors * plain.encode(TEXTS).vectors).sum(axis=1).max() < 0.99


def test_an_adapter_of_another_model_is_an_error(qwen3: Path, tmp_path: Path) -> None:
    write_adapter(qwen3, tmp_path, AutoModelForCausalLM, "FEATURE_EXTRACTION")
    with raises(PairError, "other_adapter"):
        TransformersEncoder(checkpoint_spec(qwen3, adapter=str(tmp_path)), Path(), device="cpu")
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with raises(PairError, "bad_checkpoint"):
        TransformersEncoder(checkpoint_spec(qwen3, adapter=str(tmp_path)), Path(), device="cpu")


def test_vllm_does_not_support_adapters_and_is_not_chosen_for_one(
    qwen3: Path, tmp_path: Path
) -> None:
    write_adapter(qwen3, tmp_path, AutoModel, None)
    spec = checkpoint_spec(qwen3, adapter=str(tmp_path))
    with raises(PairError, "unsupported_adapter"):
        VllmEncoder(spec, Path())
    query = load_pair("care-mini").query
    pair = Pair(name="tiny", description="d", folder=Path(), query=query, document=spec)
    assert isinstance(document_encoder(pair, EncoderOptions()), TransformersEncoder)
    assert resolve_backend(checkpoint_spec(qwen3), "auto") == "vllm"
