from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from core.errors import PairError
from core.records import Triple
from tests.checkpoints import (
    LONG,
    MAX_LENGTH,
    TEXTS,
    WIDTH,
    edit_json,
    write_gte,
    write_gte_mlm,
    write_qwen3,
)
from tests.errors import raises
from tests.training.encoders import check_parity, checkpoint_of
from training.batches import PairCollator
from training.corpus import Corpus
from training.encoder import Encoder, EncoderCheckpoint, encode, tokenize
from training.errors import TrainingError
from training.objectives import Objective, contrast
from training.schema import Lora

pytestmark = pytest.mark.train

EXAMPLES = [
    Triple(TEXTS[0], (TEXTS[1], TEXTS[2]), (TEXTS[3],)),
    Triple(TEXTS[3], (TEXTS[4],), (TEXTS[5],)),
    Triple(TEXTS[5], (TEXTS[2],), ()),
]


def gradients(
    checkpoint: EncoderCheckpoint, mini_batch: int | None, *, sharded: bool = False
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    encoder = Encoder(checkpoint, trainable=True, dropout=0.0)
    if sharded:
        encoder.shard()
    both = {"query": "query", "document": "query"}
    loss = partial(contrast, temperature=0.1)
    objective = Objective({"query": encoder}, both, loss, mini_batch)
    corpus = Corpus.of(EXAMPLES)
    texts = {
        "query": tokenize(checkpoint, "", corpus.queries),
        "document": tokenize(checkpoint, "", corpus.documents),
    }
    collate = PairCollator(corpus, texts, 1, 0)
    objective.train()
    objective(**collate([(0, i) for i in range(len(corpus.positives.values))]))["loss"].backward()
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mini_batch", [1, 2, 3])
def test_gradients_with_mini_batches_equal_those_of_the_whole_batch(
    bert: Path, tmp_path: Path, mini_batch: int
) -> None:
    checkpoint = checkpoint_of(bert, tmp_path)
    plain, cached = gradients(checkpoint, None), gradients(checkpoint, mini_batch)
    assert plain.keys() == cached.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, rtol=1e-4, atol=1e-5)


def test_sharded_encoders_compute_as_many_mini_batches_as_other_processes_with_equal_gradients(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes gather weights together, so one with fewer mini-batches would stop all."""
    checkpoint = checkpoint_of(bert, tmp_path)
    plain = gradients(checkpoint, None)
    counts: list[int] = []
    forward = Encoder.forward

    def counted(encoder: Encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        counts.append(len(ids))
        return forward(encoder, ids, mask)

    monkeypatch.setattr(Encoder, "shard", lambda encoder: setattr(encoder, "_sharded", True))
    monkeypatch.setattr("training.encoder.gather", lambda count: [count, 7])
    monkeypatch.setattr(Encoder, "forward", counted)
    padded = gradients(checkpoint, 2, sharded=True)
    # Queries and documents, each computed twice.
    assert len(counts) == 2 * 2 * 7
    for name, gradient in plain.items():
        torch.testing.assert_close(padded[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [None, Lora(r=4)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_trained_weights_are_float32_and_can_be_trained_in_fp16(
    qwen3: Path, tmp_path: Path, lora: Lora | None, dtype: str
) -> None:
    """A gradient scaler refuses gradients in float16."""
    changes = {"pooling": "last_token", "dtype": dtype, "lora": lora}
    encoder = Encoder(checkpoint_of(qwen3, tmp_path, **changes), trainable=True)
    weights = [value for value in encoder.parameters() if value.requires_grad]
    assert {value.dtype for value in weights} == {torch.float32}
    frozen = [value for value in encoder.parameters() if not value.requires_grad]
    assert {value.dtype for value in frozen} <= {getattr(torch, dtype)}
    optimizer = torch.optim.AdamW(weights)
    scaler = torch.amp.GradScaler("cpu")
    tokens = tokenize(encoder.checkpoint, "", TEXTS).padded(range(len(TEXTS)))
    with torch.autocast("cpu", getattr(torch, dtype)):
        loss = encoder(*tokens).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert sum(float(v.grad.abs().sum()) for v in weights if v.grad is not None) > 0


def test_mini_batches_recompute_with_the_same_dropout(bert: Path, tmp_path: Path) -> None:
    """Different masks in the recomputation would give wrong gradients."""
    encoder = Encoder(checkpoint_of(bert, tmp_path), trainable=True, dropout=0.3)
    tokens = tokenize(encoder.checkpoint, "", list(TEXTS[:4]))
    ids, mask = tokens.padded(range(4))
    seen: list[torch.Tensor] = []
    hook = encoder.pooling.register_forward_pre_hook(
        lambda _, features: seen.append(features[0]["token_embeddings"].detach())
    )
    encoder.embed(ids, mask, 2).sum().backward()
    hook.remove()
    # The backward pass runs from the last mini-batch to the first.
    assert [any(torch.equal(late, early) for early in seen[:2]) for late in seen[2:]] == [True] * 2
    assert len(seen) == 4


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_training_and_serving_compute_the_same_vectors(
    bert: Path, tmp_path: Path, pooling: str
) -> None:
    checkpoint = checkpoint_of(bert, tmp_path, pooling=pooling, dimension=WIDTH // 2)
    check_parity(checkpoint, (*TEXTS, LONG))


def test_the_tokenizer_of_a_saved_decoder_appends_the_end_token(
    qwen3: Path, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(qwen3, tmp_path, pooling="last_token")
    saved = check_parity(checkpoint, TEXTS).save(tmp_path / "saved")
    ids = [
        Tokenizer.from_file(str(f / "tokenizer.json")).encode("头痛").ids
        for f in (qwen3, saved.folder)
    ]
    end = AutoTokenizer.from_pretrained(qwen3).eos_token_id
    assert ids[1] == [*ids[0], end]
    check_parity(saved, (*TEXTS, LONG))


@pytest.mark.parametrize("ends_texts", [False, True])
def test_texts_of_qwen3_and_qwen3_embedding_end_with_one_end_token(
    tmp_path: Path, ends_texts: bool
) -> None:
    folder = write_qwen3(tmp_path, ends_texts=ends_texts)
    tokens = tokenize(checkpoint_of(folder, tmp_path, pooling="last_token"), "", ["头痛", LONG])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.pad_token_id if ends_texts else tokenizer.eos_token_id
    assert np.flatnonzero(tokens.values == end).tolist() == (tokens.offsets[1:] - 1).tolist()
    assert tokens.lengths[1] == MAX_LENGTH


def test_a_projection_is_applied_as_at_serving(bert: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(bert, tmp_path, projection=24)
    assert (checkpoint.native_dimension, checkpoint.dimension) == (24, 24)
    encoder = check_parity(checkpoint, TEXTS)
    check_parity(encoder.save(tmp_path / "saved"), TEXTS)


def test_an_adapter_is_applied_as_at_serving(qwen3: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(
        qwen3, tmp_path, pooling="last_token", lora=Lora(r=4, alpha=8).model_dump()
    )
    torch.manual_seed(1)
    encoder = Encoder(checkpoint, trainable=True)
    trained = [p for n, p in encoder.named_parameters() if p.requires_grad]
    assert 0 < sum(p.numel() for p in trained) < sum(p.numel() for p in encoder.parameters()) / 2
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.2)
    saved = encoder.save(tmp_path / "adapter")
    again = check_parity(saved, TEXTS)
    tokens = tokenize(checkpoint, "", TEXTS)
    expected = encode(encoder, tokens, batch=4)
    np.testing.assert_allclose(encode(again, tokens, batch=4), expected, atol=1e-6)
    plain = encode(Encoder(checkpoint, trainable=False), tokens, batch=4)
    assert np.abs(plain - expected).max() > 0.05
    # With `trainable`, the adapter's weights are trainable.
    names = {n for n, p in Encoder(saved, trainable=True).named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)


def test_a_frozen_encoder_has_no_dropout(bert: Path, tmp_path: Path) -> None:
    encoder = Encoder(checkpoint_of(bert, tmp_path), trainable=False, dropout=0.5).train()
    ids, mask = tokenize(encoder.checkpoint, "", TEXTS).padded([0, 1])
    assert torch.equal(encoder(ids, mask), encoder(ids, mask))
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    checkpoint = checkpoint_of(write_gte(tmp_path / "gte"), tmp_path)
    edit_json(tmp_path / "gte" / "config.json", model_type="newer")
    with raises(PairError, "unknown_architecture", path=tmp_path / "gte") as caught:
        Encoder(checkpoint, trainable=True)
    # Output of the code.
    assert "remote code was run" not in str(caught.value)


@pytest.mark.parametrize("write", [write_gte, write_gte_mlm])
def test_a_checkpoint_of_type_new_is_trained_and_saved_as_published(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    checkpoint = checkpoint_of(write(tmp_path / "gte"), tmp_path)
    encoder = check_parity(checkpoint, (*TEXTS, LONG))
    assert encoder.model.config.model_type == "gte"
    saved = encoder.save(tmp_path / "saved")
    tokens = tokenize(checkpoint, "", TEXTS)
    again = encode(check_parity(saved, TEXTS), tokens, batch=6)
    np.testing.assert_allclose(again, encode(encoder, tokens, batch=6), atol=1e-6)


def test_frozen_layers_and_embeddings_get_no_gradient(bert: Path, tmp_path: Path) -> None:
    encoder = Encoder(checkpoint_of(bert, tmp_path, frozen_layers=1), trainable=True)
    encoder(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)).sum().backward()
    moved = {name for name, value in encoder.model.named_parameters() if value.grad is not None}
    frozen = {name for name, value in encoder.model.named_parameters() if not value.requires_grad}
    assert not moved & frozen
    assert any(name.startswith("embeddings.") for name in frozen)
    assert {name.split(".")[2] for name in moved} == {"1"}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"lora": {"targets": ["nope"]}}, "bad_targets"),
        ({"frozen_layers": 3}, "no_such_layer"),
        ({"max_length": 65}, "max_length_too_large"),
    ],
)
def test_what_a_checkpoint_does_not_have_is_an_error(
    bert: Path, tmp_path: Path, wrong: dict[str, Any], code: str
) -> None:
    checkpoint = checkpoint_of(bert, tmp_path, **wrong)
    with raises(TrainingError, code):
        Encoder(checkpoint, trainable=True)
