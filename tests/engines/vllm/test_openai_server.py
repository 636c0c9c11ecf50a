"""The encoder of `models/encoders/openai.py` with the server of vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from core.encoders import EncoderSpec
from core.errors import EmbeddingServerError, TextRejectedError, VectorError
from core.types import FloatArray
from core.vectors import truncate_normalize
from models.encoders.openai import OpenAIEncoder
from tests.encoders import make_spec
from tests.engines.vllm.server import KEY, vllm_server
from tests.errors import raises

MODEL = "tiny-qwen3"
MAX_LENGTH = 128
TEXTS = [f"第{i}号病历：" + "血压升高，建议复查。" * (i % 3) for i in range(40)]


@pytest.fixture(scope="module")
def url(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server with the tiny checkpoint."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with vllm_server(qwen3, MODEL, MAX_LENGTH, log) as server:
        yield server.url


@pytest.fixture(scope="module")
def spec(qwen3: Path) -> EncoderSpec:
    """A spec of the checkpoint with half of its dimensions."""
    native = json.loads((qwen3 / "config.json").read_text("utf-8"))["hidden_size"]
    changes = {
        "model": MODEL,
        "native_dimension": native,
        "dimension": native // 2,
        "max_length": MAX_LENGTH,
        "pooling": "last_token",
        "prompt": "文档：",
    }
    return make_spec("document").model_copy(update=changes)


def connect(spec: EncoderSpec, url: str, **options: Any) -> OpenAIEncoder:
    return OpenAIEncoder(spec, url, **({"api_key": KEY, "concurrency": 3} | options))


def reference(folder: Path, spec: EncoderSpec, texts: list[str]) -> tuple[FloatArray, int]:
    """Vectors by transformers, one text per batch, and the total number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [tokenizer(spec.prompt + text)["input_ids"] for text in texts]
    with torch.no_grad():
        states = [model(torch.tensor([row])).last_hidden_state[0, -1].numpy() for row in ids]
    return truncate_normalize(np.stack(states), spec.dimension), sum(map(len, ids))


def test_vectors_equal_those_of_transformers(qwen3: Path, spec: EncoderSpec, url: str) -> None:
    encoding = connect(spec, url, request_texts=4).encode(TEXTS)
    vectors, tokens = reference(qwen3, spec, TEXTS)
    cosines = (encoding.vectors * vectors).sum(axis=1)
    assert cosines.min() > 0.9999
    assert encoding.token_counts.sum() == tokens


def test_a_text_that_is_too_long_is_isolated(spec: EncoderSpec, url: str) -> None:
    texts = [*TEXTS[:13], "血压升高" * MAX_LENGTH, *TEXTS[13:]]
    with raises(TextRejectedError, "text_refused", position=13):
        connect(spec, url).encode(texts)


def test_the_server_truncates_long_texts_on_request(spec: EncoderSpec, url: str) -> None:
    encoder = connect(spec, url, truncate=True)
    encoding = encoder.encode([TEXTS[0], "血压升高" * MAX_LENGTH])
    assert encoding.token_counts[1] == MAX_LENGTH
    np.testing.assert_allclose(encoding.vectors[0], encoder.encode(TEXTS[:1]).vectors[0], atol=1e-4)


def test_a_wrong_key_and_an_unknown_model_have_different_errors(
    spec: EncoderSpec, url: str
) -> None:
    with raises(EmbeddingServerError, "embedding_server_status", status=401):
        connect(spec, url, api_key="sk-other")
    with raises(EmbeddingServerError, "embedding_server_status", status=404):
        connect(spec, url, model="other")


def test_a_model_of_another_size_is_an_error(spec: EncoderSpec, url: str) -> None:
    wider = spec.model_copy(update={"native_dimension": 2 * spec.native_dimension})
    with raises(VectorError, "other_dimension", expected=wider.native_dimension):
        connect(wider, url)
