"""Export, indexing and search with a tiny checkpoint of each architecture of the registry."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import GteModel, Qwen2Model

from care.cli.main import main as care
from core.errors import PairError
from core.files import sha256_file
from core.versions import IndexFolder, read_manifest
from models.encoders.configuration import read_configuration
from models.encoders.onnx import OnnxEncoder
from models.encoders.transformers import TransformersEncoder
from models.pairs import load_pair, write_pair
from service.app import create_app, load_query_encoder
from service.settings import Settings
from tests.checkpoints import (
    ARCHITECTURES,
    GTE_CONFIG,
    LONG,
    NTK,
    TEXTS,
    WIDTH,
    make_pair,
    token_states,
    unit,
    write_gte_mlm,
)
from tests.conftest import write_jsonl
from tests.errors import error_code, raises
from training.export.onnx import save

pytestmark = pytest.mark.train


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_checkpoint_is_indexed_exported_and_served(
    tmp_path: Path, name: str, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(make_pair(tmp_path, name), tmp_path / "pair.toml")
    assert load_pair(str(tmp_path / "pair.toml")).query.role == "query"
    records = [{"_id": f"{i}", "text": a + b} for i, (a, b) in enumerate(product(TEXTS, TEXTS))]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    arguments = [str(corpus), "--index", "test", "--indexes", str(settings.indexes)]
    arguments += ["--builds", str(tmp_path / "builds"), "--pair", str(tmp_path / "pair.toml")]
    assert care(["index", *arguments, "--backend", "transformers"]) == 0
    version = IndexFolder(settings.indexes, "test").active()
    manifest = read_manifest(IndexFolder(settings.indexes, "test").path / version)
    assert manifest.recall.recall == 1

    checkpoint = settings.model_copy(update={"pair": str(tmp_path / "pair.toml")})
    with pytest.raises(PairError):
        load_query_encoder(checkpoint)

    out = tmp_path / "exported"
    arguments = ["--pair", str(tmp_path / "pair.toml"), "--precision", "fp32", "--corpus", "none"]
    assert care(["export", *arguments, "--out", str(out)]) == 0
    assert f"{out}/pair.toml" in capsys.readouterr().out
    exported = load_pair(str(out / "pair.toml"))
    assert exported.document.model_dump(exclude={"weights", "adapter"}) == (
        manifest.encoder.model_dump(exclude={"weights", "adapter"})
    )
    assert (exported.folder / exported.document.weights).resolve() == tmp_path / "checkpoint"

    served = settings.model_copy(update={"pair": str(out / "pair.toml")})
    with TestClient(create_app(served, load_query_encoder(served))) as client:
        for record in records[::5]:
            hits = client.post("/search", json={"query": record["text"]}).json()["hits"]
            assert hits[0]["id"] == record["_id"]
            assert hits[0]["score"] > max(0.9999, hits[1]["score"] + 1e-4)
    texts = [*TEXTS, LONG]
    expected = TransformersEncoder(exported.document, exported.folder, device="cpu").encode(texts)
    encoding = OnnxEncoder(exported.query, exported.folder, threads=1).encode(texts)
    np.testing.assert_allclose(encoding.vectors, expected.vectors, atol=1e-4)
    np.testing.assert_array_equal(encoding.token_counts, expected.token_counts)
    np.testing.assert_array_equal(encoding.truncated, expected.truncated)
    assert expected.truncated[-1]


def states(encoder: TransformersEncoder, text: str) -> tuple[torch.Tensor, list[int]]:
    model, _, tokenizer = encoder.parts()
    ids = tokenizer.encode(text).ids
    return token_states(model, ids), ids


def test_attention_of_gte_qwen2_is_bidirectional(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen2")
    encoder = TransformersEncoder(pair.query, tmp_path, device="cpu")
    one, two = (states(encoder, text)[0] for text in ("头痛", "头晕"))
    assert (one[0] - two[0]).abs().max() > 0.1

    vectors = encoder.encode(TEXTS).vectors
    plain = pair.query.model_copy(update={"config": {}})
    causal = TransformersEncoder(plain, tmp_path, device="cpu")
    assert (vectors * causal.encode(TEXTS).vectors).sum(axis=1).max() < 0.99

    model = Qwen2Model.from_pretrained(tmp_path / "checkpoint", attn_implementation="eager").eval()
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = states(encoder, text)[1]
        # transformers uses a four-dimensional mask unchanged.
        everything = torch.zeros(1, 1, len(ids), len(ids))
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), attention_mask=everything).last_hidden_state
        np.testing.assert_allclose(vector, unit(expected[0, -1]), atol=1e-5)


@pytest.mark.parametrize("config", [GTE_CONFIG, {}])
def test_an_older_gte_is_loaded_with_ntk_scaling(tmp_path: Path, config: dict[str, Any]) -> None:
    """Frequencies as in Alibaba-NLP/new-impl: https://kexue.fm/archives/9706."""
    spec = make_pair(tmp_path, "gte").query.model_copy(update={"config": config})
    encoder = TransformersEncoder(spec, tmp_path, device="cpu")
    head, factor = WIDTH // 2, NTK["factor"]
    exponents = torch.arange(0, head, 2) / head
    frequencies = 1 / (NTK["theta"] * factor) ** exponents / factor ** (2 / head)
    model = encoder.parts()[0]
    torch.testing.assert_close(model.rotary_emb.inv_freq, frequencies)

    # The weights before conversion to the older layout.
    torch.manual_seed(0)
    native = GteModel(type(model.config)(**model.config.to_diff_dict())).eval()
    native.rotary_emb.inv_freq.copy_(frequencies)
    for text, vector in zip(TEXTS, encoder.encode(TEXTS).vectors, strict=True):
        expected = unit(token_states(native, states(encoder, text)[1])[0])
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_an_unknown_architecture_is_an_error_and_its_code_does_not_run(tmp_path: Path) -> None:
    spec = make_pair(tmp_path, "gte-mlm").query
    spec = spec.model_copy(update={"config": {"model_type": "newer"}})
    with raises(PairError, "unknown_architecture", model_type="newer"):
        TransformersEncoder(spec, tmp_path, device="cpu")


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}},
        {"rope_scaling": {"type": "dynamic", "factor": 8.0}},
        {"position_embedding_type": "absolute"},
        {"layer_norm_type": "rms_norm"},
        {"logn_attention_scale": True},
        {"pack_qkv": False},
    ],
)
def test_an_older_gte_that_computes_something_else_is_an_error(
    tmp_path: Path, entries: dict[str, Any]
) -> None:
    with raises(PairError, "unknown_architecture", model_type="new"):
        read_configuration(write_gte_mlm(tmp_path), entries)


def test_large_weights_are_written_to_a_second_file(tmp_path: Path) -> None:
    write_pair(make_pair(tmp_path, "bert"), tmp_path / "pair.toml")
    path = tmp_path / "out" / "pair.toml"
    arguments = ["--pair", str(tmp_path / "pair.toml"), "--precision", "fp32", "--corpus", "none"]
    assert care(["export", *arguments, "--out", str(path.parent)]) == 0
    pair = load_pair(str(path))
    expected = OnnxEncoder(pair.query, pair.folder, threads=1).encode(TEXTS).vectors
    graph = onnx.load(path.with_name("query-fp32.onnx"))
    file, data = (path.with_name(name) for name in ("large.onnx", "large.onnx.data"))

    save(onnx.load(path.with_name("query-fp32.onnx")), file, largest=1000)
    first = sha256_file(file)
    large = pair.query.model_copy(update={"weights": str(file), "weights_sha256": first})
    assert data.stat().st_size > file.stat().st_size
    vectors = OnnxEncoder(large, pair.folder, threads=1).encode(TEXTS).vectors
    np.testing.assert_array_equal(vectors, expected)

    # Other tensors change the checksum of the graph, which covers both files.
    (table,) = (t for t in graph.graph.initializer if "word_embeddings" in t.name)
    table.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(table), table.name))
    save(graph, file, largest=1000)
    assert sha256_file(file) != first

    large = large.model_copy(update={"weights_sha256": sha256_file(file)})
    with data.open("r+b") as stream:
        stream.write(b"\x01\x02")
    with raises(PairError, "checksum_mismatch", path=data):
        OnnxEncoder(large, pair.folder, threads=1)


def test_an_unsupported_export_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = make_pair(tmp_path, "bert")
    shutil.rmtree(tmp_path / "checkpoint")
    write_pair(pair, tmp_path / "pair.toml")
    arguments = ["--pair", str(tmp_path / "pair.toml"), "--out", str(tmp_path / "out")]
    assert care(["export", *arguments]) == 1
    assert error_code(capsys.readouterr().err) == "no_checkpoint"
