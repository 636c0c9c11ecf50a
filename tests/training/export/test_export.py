"""Precisions, acceptance thresholds and document forms of an export, on tiny checkpoints."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from care.cli.main import main
from core.encoders import Pair
from core.types import FloatArray
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ON_CPU
from models.encoders.transformers import TransformersEncoder
from models.pairs import load_pair, write_pair
from tests.checkpoints import (
    TEXTS,
    WIDTH,
    checkpoint_spec,
    write_adapter,
    write_bert,
    write_qwen3,
)
from tests.conftest import write_jsonl
from tests.errors import error_code
from training.export import query_side
from training.export.measurement import Row
from training.export.onnx import SentenceEncoder
from training.export.pair import recommended

pytestmark = pytest.mark.train

Command = Callable[..., int]
ALL = "fp32,fp16,int8,tensorrt"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT for queries; for documents a decoder with LoRA, whose tokenizer appends no end token."""
    folder = tmp_path_factory.mktemp("checkpoints")
    # Small weights, as in trained models, which integers can represent.
    bert = AutoModel.from_pretrained(write_bert(folder / "query"))
    torch.manual_seed(1)
    for name, weights in bert.named_parameters():
        if name.endswith("dense.weight"):
            torch.nn.init.normal_(weights, std=0.1)
    bert.save_pretrained(folder / "query")
    write_adapter(
        write_qwen3(folder / "document", ends_texts=False),
        folder / "lora",
        AutoModel,
        "FEATURE_EXTRACTION",
    )
    query = checkpoint_spec(folder / "query", "mean", weights="query", role="query")
    document = checkpoint_spec(folder / "document", weights="document", adapter="lora", prompt="文")
    pair = Pair(name="tiny", description="d", folder=folder, query=query, document=document)
    write_pair(pair, folder / "pair.toml")
    return folder


@pytest.fixture(scope="module")
def command(checkpoints: Path) -> Command:
    texts = [a + b for a in TEXTS for b in TEXTS]
    records = [{"_id": f"d{i}", "text": text} for i, text in enumerate(texts)]
    corpus = write_jsonl(checkpoints / "corpus.jsonl", records)
    records = [{"_id": f"q{i}", "text": text} for i, text in enumerate(TEXTS)]
    queries = write_jsonl(checkpoints / "queries.jsonl", records)
    qrels = checkpoints / "qrels.tsv"
    qrels.write_text("".join(f"q{i}\td{7 * i}\t1\n" for i in range(len(TEXTS))), "utf-8")
    data = ["--corpus", str(corpus), "--queries", str(queries), "--qrels", str(qrels)]

    def run(out: Path, *arguments: str) -> int:
        pair = str(checkpoints / "pair.toml")
        return main(
            ["export", "--pair", pair, "--out", str(out), "--threads", "1", *data, *arguments]
        )

    return run


@pytest.fixture(scope="module")
def whole(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of all precisions with a merged document side, moved to another folder."""
    folder = tmp_path_factory.mktemp("whole")
    assert command(folder / "out", "--precision", ALL, "--document", "merged") == 0
    (folder / "elsewhere").mkdir()
    return (folder / "out").rename(folder / "elsewhere" / "pair")


def figures(out: Path) -> dict[str, Any]:
    """Returns the rows of the report by precision."""
    rows = json.loads((out / "report.json").read_text("utf-8"))["precisions"]
    return {row["precision"]: row for row in rows}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_all_precisions_pass_and_the_smallest_is_recommended(whole: Path) -> None:
    names = ALL.split(",")
    graphs = {f"query-{name}.onnx" for name in names} | {f"pair-{name}.toml" for name in names}
    common = {"pair.toml", "report.md", "report.json", "tokenizer.json", "document"}
    assert files(whole) == graphs | common
    rows = figures(whole)
    assert list(rows) == names
    assert rows["int8"]["megabytes"] < rows["fp16"]["megabytes"] < rows["fp32"]["megabytes"]
    recommended = load_pair(str(whole / "pair.toml"))
    assert recommended.query == load_pair(str(whole / "pair-int8.toml")).query
    OnnxEncoder(recommended.query, whole, threads=1)
    report = (whole / "report.md").read_text("utf-8")
    assert report.count("| passed |") == 4
    assert rows["tensorrt"]["provider"] == "cpu"
    assert rows["tensorrt"]["reason"]


def test_int8_uses_integer_operators_and_tensorrt_standard_ones(whole: Path) -> None:
    def operators(name: str) -> set[str]:
        return {node.op_type for node in onnx.load(whole / name).graph.node}

    assert "MultiHeadAttention" in operators("query-fp32.onnx")
    assert "MatMulIntegerToFloat" in operators("query-int8.onnx")
    standard = onnx.load(whole / "query-tensorrt.onnx")
    assert {node.domain for node in standard.graph.node} <= {"", "ai.onnx"}
    half = onnx.load(whole / "query-fp16.onnx")
    types = {tensor.data_type for tensor in half.graph.initializer if len(tensor.dims) == 2}
    assert types == {onnx.TensorProto.FLOAT16}


def perturbed(graph: onnx.ModelProto) -> onnx.ModelProto:
    (table,) = (t for t in graph.graph.initializer if "word_embeddings" in t.name)
    noise = np.random.default_rng(0).normal(0, 1, table.dims).astype(np.float32)
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) + noise, table.name))
    return graph


def test_a_damaged_graph_fails_and_the_others_are_kept(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_side, "half_precision", perturbed)
    out = tmp_path / "out"
    assert command(out, "--precision", "fp32,fp16,int8") == 0
    assert not {"query-fp16.onnx", "pair-fp16.toml"} & files(out)
    assert {"query-int8.onnx", "pair-int8.toml"} <= files(out)
    rows = figures(out)
    assert any(reason.startswith("cosine 0.") for reason in rows["fp16"]["failures"])
    assert rows["int8"]["failures"] == []
    assert "**failed**: cosine 0." in (out / "report.md").read_text("utf-8")


def test_a_graph_that_does_not_load_fails(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(graph: onnx.ModelProto) -> onnx.ModelProto:
        graph.graph.node[0].op_type = "Unknown"
        return graph

    monkeypatch.setattr(query_side, "half_precision", unknown)
    assert command(tmp_path / "out", "--precision", "fp16", "--corpus", "none") == 0
    (reason,) = figures(tmp_path / "out")["fp16"]["failures"]
    assert reason.startswith("does not run: ")
    assert "query-fp16.onnx" not in files(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda forward, ids, mask: forward(ids, mask * 0 + 1), "batch"),
        (lambda forward, ids, mask: forward(ids, mask) * 1.5, "norm"),
        (lambda forward, ids, mask: forward(ids * 0 + 2, mask), "overlap@10"),
    ],
    ids=["padding", "norm", "ranking"],
)
def test_a_failed_float32_graph_is_an_error_and_keeps_the_earlier_export(
    command: Command,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[..., torch.Tensor],
    name: str,
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    forward = SentenceEncoder.forward
    monkeypatch.setattr(
        SentenceEncoder, "forward", lambda self, *x: change(partial_of(forward, self), *x)
    )
    assert command(tmp_path / "out", "--precision", "fp32") == 1
    errors = capsys.readouterr().err
    assert error_code(errors) == "threshold_missed"
    assert f"{name} " in errors
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def partial_of(forward: Any, module: Any) -> Callable[..., torch.Tensor]:
    return lambda ids, mask: forward(module, ids, mask)


GOOD = {
    **{"cosine": 1.0, "mean cosine": 1.0, "batch": 0.0, "norm": 0.0},
    **{"overlap@10": 1.0, "nDCG@10": 0.5, "nDCG@10 loss": 0.0, "p50 ms": 1.0, "queries/s": 1.0},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cosine", 0.9999),
        ("cosine", float("nan")),
        ("batch", 0.001),
        ("norm", 0.01),
        ("overlap@10", 0.98),
        ("nDCG@10 loss", 0.01),
    ],
)
def test_each_threshold_can_be_missed(name: str, value: float) -> None:
    assert Row("fp32", "cpu", "", values=GOOD).failures == []
    (failure,) = Row("fp32", "cpu", "", values=GOOD | {name: value}).failures
    assert failure.startswith(f"{name} {value:g} ")


def test_tensorrt_engines_have_the_thresholds_of_half_precision() -> None:
    values = GOOD | {"cosine": 0.9991}
    assert Row("tensorrt", "tensorrt", "", values=values).failures == []
    assert Row("tensorrt", "cpu", "", values=values).failures != []


def test_precisions_that_a_provider_only_stores_are_not_recommended() -> None:
    def row(precision: Any, megabytes: float, reason: str = "") -> Row:
        return Row(precision, "cpu", "", "", megabytes, {} if reason else GOOD, reason)

    rows = [row("fp32", 100), row("fp16", 50)]
    assert recommended(rows, ON_CPU) == "fp32"
    assert recommended(rows, replace(ON_CPU, name="cuda")) == "fp16"
    assert recommended([*rows, row("int8", 60)], ON_CPU) == "int8"
    assert recommended([*rows, row("int8", 60, "failed")], ON_CPU) == "fp32"


@pytest.fixture(scope="module")
def expected(checkpoints: Path) -> FloatArray:
    """Vectors of the document side before the export."""
    pair = load_pair(str(checkpoints / "pair.toml"))
    vectors: FloatArray
    vectors = TransformersEncoder(pair.document, pair.folder, device="cpu").encode(TEXTS).vectors
    plain = pair.document.model_copy(update={"adapter": ""})
    others = TransformersEncoder(plain, pair.folder, device="cpu").encode(TEXTS).vectors
    assert (vectors * others).sum(axis=1).max() < 0.995
    return vectors


def test_a_merged_document_side_has_the_vectors_of_its_adapter(
    whole: Path, expected: FloatArray
) -> None:
    pair = load_pair(str(whole / "pair.toml"))
    assert (pair.document.adapter, pair.document.weights) == ("", "document")
    vectors = TransformersEncoder(pair.document, whole, device="cpu").encode(TEXTS).vectors
    assert (vectors * expected).sum(axis=1).min() >= 0.9999
    model = SentenceTransformer(str(whole / "document"), device="cpu")
    vectors = model.encode(list(TEXTS))
    assert vectors.shape == (len(TEXTS), WIDTH)
    np.testing.assert_allclose((vectors * expected).sum(axis=1), 1, atol=1e-4)


def test_an_exported_adapter_has_the_same_vectors(
    command: Command, tmp_path: Path, expected: FloatArray
) -> None:
    out = tmp_path / "out"
    form = ("--document", "adapter", "--corpus", "none")
    assert command(out, "--precision", "fp32", *form) == 0
    pair = load_pair(str(out / "pair.toml"))
    assert pair.document.adapter == "document"
    assert "adapter_model.safetensors" in files(out / "document")
    vectors = TransformersEncoder(pair.document, out, device="cpu").encode(TEXTS).vectors
    assert (vectors * expected).sum(axis=1).min() >= 0.9999


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--qrels", "{none}"], "unreadable"),
        (["--queries", "{corpus}.numbers"], "bad_field"),
        (["--calibration", "{corpus}.empty"], "empty_file"),
        (["--calibration", "{corpus}.bad"], "bad_field"),
        (["--out", "{data}"], "not_an_export"),
    ],
)
def test_invalid_input_is_an_error_of_one_line(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: str,
) -> None:
    (tmp_path / "corpus.jsonl.empty").write_text("")
    numbers = [{"_id": f"q{i}", "text": i} for i in range(len(TEXTS))]
    write_jsonl(tmp_path / "corpus.jsonl.numbers", numbers)
    write_jsonl(tmp_path / "corpus.jsonl.bad", [{"text": "头痛"}, {"text": " "}])
    places = {"none": tmp_path / "no", "corpus": tmp_path / "corpus.jsonl", "data": tmp_path}
    assert command(tmp_path / "out", *(each.format(**places) for each in arguments)) == 1
    assert error_code(capsys.readouterr().err) == code
    assert not (tmp_path / "out").exists()


def test_exporting_an_adapter_needs_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bert(tmp_path / "bert")
    query, document = (
        checkpoint_spec(folder, "cls", weights="bert", role=role) for role in ("query", "document")
    )
    pair = Pair(name="tiny", description="d", folder=tmp_path, query=query, document=document)
    write_pair(pair, tmp_path / "pair.toml")
    arguments = ["--pair", str(tmp_path / "pair.toml"), "--out", str(tmp_path / "out")]
    arguments += ["--precision", "fp32", "--corpus", "none", "--document", "adapter"]
    assert main(["export", *arguments]) == 1
    assert error_code(capsys.readouterr().err) == "no_adapter"
    assert files(tmp_path) == {"bert", "pair.toml"}
