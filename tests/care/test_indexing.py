import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pyarrow as pa
import pytest

import care
import models.encoders.factory
from care.indexing import encode_corpus, estimate_build
from core.encoders import EncoderSpec
from core.errors import (
    CareError,
    CorpusError,
    EmbeddingSpaceError,
    IndexVersionError,
    ProviderError,
)
from indexer.build import BuildOptions
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.readers.written_pdf import write_pdf

pytestmark = pytest.mark.usefixtures("test_encoders")


@pytest.fixture
def options(tmp_path: Path, indexes: Path, pair_file: Path) -> care.IndexOptions:
    return care.IndexOptions(pair=str(pair_file), indexes=indexes, builds=tmp_path / "builds")


def test_documents_and_a_file_of_them_make_the_same_index(
    options: care.IndexOptions, tmp_path: Path
) -> None:
    records = make_records(30)
    from_file = care.build_index("a", str(write_jsonl(tmp_path / "c.jsonl", records)), options)
    made = care.build_index("b", (dict(record) for record in records), options)
    assert made.documents == from_file.documents == 30
    assert made.manifest.files == from_file.manifest.files
    assert made.folder == options.indexes / "b" / made.id
    assert made.name == "b"
    # What was written for the build is gone; its shards stay.
    assert sorted(path.name for path in options.builds.iterdir()) == ["a", "b"]


def test_texts_alone_are_documents(options: care.IndexOptions) -> None:
    version = care.build_index("test", ["高血压", "失眠", "发热"], options)
    assert version.documents == 3
    with care.open_index("test", indexes=options.indexes, pair=options.pair) as index:
        assert {hit.id for hit in index.search("高血压")} == {"1", "2", "3"}


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_a_data_frame_is_a_table(options: care.IndexOptions, kind: str) -> None:
    table = pa.table({"编号": [7, 8], "内容": ["高血压", "失眠"], "年份": [2020, None]})
    frame = table
    if kind == "pandas":
        frame = pandas.DataFrame(table.to_pydict())
    version = care.build_index("test", frame, options)
    assert version.documents == 2
    with care.open_index("test", indexes=options.indexes, pair=options.pair) as index:
        assert index.passages(7) == index.passages("7")
    added = care.update_index("test", add=table.slice(1), delete=[7], options=options)
    assert added.documents == 1


def test_fields_of_a_table_can_be_named(options: care.IndexOptions, tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("a,b,c\n1,高血压,x\n2,失眠,y\n", encoding="gbk")
    named = {"id_field": "a", "text_field": "b", "metadata_fields": "c"}
    version = care.build_index("test", path, options, **named)
    assert version.documents == 2
    assert version.manifest.filter_fields == {"c": 2}
    # Other fields are another corpus, of the same files.
    same = care.build_index("test", path, options, reuse=True, **named)
    other = care.build_index("test", path, options, reuse=True, **named | {"metadata_fields": ""})
    assert (same.id, same.built, other.built) == (version.id, False, True)
    assert other.manifest.filter_fields == {}


def test_a_corpus_read_with_ocr_is_another_one(options: care.IndexOptions, tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", [[(60, 700, 11, "每天饮水")]])
    version = care.build_index("test", path, options)
    same = care.build_index("test", path, options, reuse=True)
    other = care.build_index("test", path, options, reuse=True, ocr=True)
    assert (version.documents, same.built, other.built) == (1, False, True)


def test_an_estimate_shows_how_files_are_read(options: care.IndexOptions, tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    rows = "".join(f"{number},高血压的护理要点第{number}条\n" for number in range(20_000))
    path.write_text(f"编号,内容\n{rows}", encoding="utf-16")
    estimate, _ = estimate_build("test", str(path), options, tokens_per_second=1000.0)
    assert estimate.documents == pytest.approx(20_000, rel=0.01)
    assert not estimate.is_whole
    assert len(estimate.passages) == 3
    (line,) = estimate.read
    for word in ("faq.csv", "UTF-16", "id 编号", "text 内容"):
        assert word in line


def test_bad_documents_are_rejected_as_those_of_a_file_are(options: care.IndexOptions) -> None:
    good = make_records(20)
    bad: list[dict[str, Any]] = [
        {"_id": "x", "text": " "},
        {"text": "无编号"},
        {"_id": "y", "text": "坏\ud800"},
        {"_id": "z", "text": "数", "metadata": {"n": float("nan")}},
        {"_id": "title", "text": "题", "title": "长" * 10_000_000},
        {"_id": "value", "text": "值", "metadata": {"v": "长" * 1_000_000}},
        {"_id": "list", "text": "表", "metadata": {"v": list(range(1_000_000))}},
    ]
    with raises(CorpusError, "too_many_rejects", rejected=7, total=27):
        care.build_index("test", [*good, *bad], options)
    made = care.build_index("test", [*good, *bad], options, max_reject_rate=0.5)
    assert made.encoded
    assert (made.documents, made.encoded.staged.rejected) == (20, 7)
    with raises(CorpusError, "duplicate_id"):
        care.build_index("test", [good[0], good[0]], options)
    with raises(CareError, "not_a_list", argument="corpus"):
        care.build_index("test", good[0], options)
    with raises(CorpusError, "bad_document", number=2):
        care.build_index("test", [good[0], {"_id": "o", "text": object()}], options)
    for number, texts in enumerate(([5], [good[0], b"x"], [good[0], good[1], None]), 1):
        with raises(CorpusError, "bad_document", number=number):
            care.build_index("test", texts, options)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with raises(CorpusError, "bad_document", number=2):
        care.build_index("test", [good[0], {"_id": "deep", "metadata": {"v": deep}}], options)
    with raises(CorpusError, "empty_corpus"):
        care.build_index("test", [], options)


def test_an_up_to_date_version_is_returned_as_it_is(options: care.IndexOptions) -> None:
    records = make_records(10)
    first = care.build_index("test", records, options)
    again = care.build_index("test", records, options, reuse=True)
    assert (again.id, again.encoded) == (first.id, None)
    assert care.build_index("test", records[1:], options, reuse=True).id != first.id


def test_documents_are_added_replaced_and_deleted(
    options: care.IndexOptions, tmp_path: Path
) -> None:
    records = make_records(10)
    care.build_index("test", records, options)
    new = [records[0] | {"text": "新的内容"}, {"_id": "new", "text": "另一篇"}]
    version = care.update_index("test", add=iter(new), delete=["d0009"], options=options)
    change = version.manifest.corpus.update
    assert change
    assert (change.added, change.replaced, change.deleted, change.unchanged) == (1, 1, 1, 8)
    assert version.encoded
    assert version.encoded.summary.new_texts == 2
    with care.open_index("test", pair=options.pair, indexes=options.indexes) as index:
        assert {document.id for document in index.documents()} == {
            *(f"d{i:04d}" for i in range(9)),
            "new",
        }
    listed = tmp_path / "ids.txt"
    listed.write_text("new\n")
    assert care.update_index("test", delete=str(listed), options=options).documents == 9
    unchanged = care.update_index("test", add=[records[3]], options=options)
    assert (unchanged.documents, unchanged.encoded) == (9, None)


def test_ids_to_delete_must_exist_or_be_ignored(options: care.IndexOptions) -> None:
    care.build_index("test", make_records(5), options)
    with raises(CorpusError, "unknown_id", id="none", count=1, path=None):
        care.update_index("test", delete=["none", "d0001"], options=options)
    version = care.update_index("test", delete=["none", "d0001"], missing_ok=True, options=options)
    assert version.documents == 4
    with raises(CorpusError, "no_changes"):
        care.update_index("test", options=options)
    with raises(IndexVersionError, "no_active_version"):
        care.update_index("none", delete=["a"], options=options)


def test_full_text_and_its_weight_are_changed_alone(options: care.IndexOptions) -> None:
    def modes() -> tuple[str, ...]:
        with care.open_index("test", pair=options.pair, indexes=options.indexes) as index:
            return index.modes

    first = care.build_index("test", make_records(10), options, full_text=False)
    assert modes() == ("dense",)
    with raises(CareError, "option_not_taken", option="--lexical-weight"):
        care.update_index("test", options=options, lexical_weight=0.1)
    version = care.update_index("test", options=options, full_text=True, lexical_weight=0.25)
    assert modes() == ("hybrid", "dense", "lexical")
    assert (version.built, version.encoded, version.documents) == (True, None, 10)
    assert version.manifest.files == first.manifest.files
    same = care.update_index("test", options=options, lexical_weight=0.25)
    assert (same.built, same.id) == (False, version.id)
    # Another type of the index is another file of vectors.
    graph = care.update_index("test", options=options, lexical_weight=0.5, factory="HNSW8")
    assert (graph.manifest.factory, graph.manifest.fusion) == ("HNSW8", {"lexical": 0.5})
    assert graph.encoded
    assert graph.encoded.summary.new_texts == 0
    care.update_index("test", options=options, lexical_weight=0.0)
    assert modes() == ("dense", "hybrid", "lexical")
    care.update_index("test", options=options, full_text=False)
    assert modes() == ("dense",)


def test_encoded_shards_are_those_that_a_build_uses(options: care.IndexOptions) -> None:
    encoded = encode_corpus("test", make_records(10), options)
    assert encoded.summary.new_texts == 10
    assert not options.indexes.exists()
    made = care.build_index("test", make_records(10), options)
    assert made.encoded
    assert made.encoded.summary.new_texts == 0


def test_a_misspelt_option_is_refused(options: care.IndexOptions) -> None:
    with pytest.raises(TypeError):
        care.build_index("test", make_records(3), options, factori="Flat")
    with raises(CareError, "option_not_taken", option="--replicas"):
        care.build_index("test", make_records(3), options, replicas=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("recall", 2),
        ("recall", "0.9"),
        ("lexical_weight", float("nan")),
        ("chunk_tokens", 0),
        ("max_reject_rate", -1),
    ],
)
def test_a_value_that_the_command_line_refuses_is_refused(option: str, value: Any) -> None:
    with raises(CareError, "invalid_option", option=option):
        care.IndexOptions(**{option: value})


def test_folders_may_be_texts(options: care.IndexOptions) -> None:
    given: dict[str, Any] = {name: str(getattr(options, name)) for name in ("indexes", "builds")}
    care.build_index("test", make_records(30), options, **given)
    added = care.update_index("test", add=["新"], options=options, **given)
    assert care.merge_index("test", options=options, **given).documents == added.documents == 31


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces encoders in OpenVINO by test encoders and returns their dtypes."""
    used: list[str] = []

    def load(spec: EncoderSpec, folder: Path, threads: int, dtype: str) -> BigramEncoder:
        used.append(dtype)
        return BigramEncoder(spec.role, spec.embedding_space)

    module = SimpleNamespace(OpenVinoEncoder=load)
    monkeypatch.setitem(sys.modules, "models.encoders.openvino", module)
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)
    return used


def test_an_update_keeps_backend_and_dtype_of_openvino(
    options: care.IndexOptions, openvino: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flags(*names: str) -> None:
        monkeypatch.setattr(models.encoders.factory, "cpu_flags", lambda: set(names))

    flags("avx512_vnni")
    built = care.build_index("test", make_records(20), options, backend="openvino").manifest
    assert (built.backend, built.dtype) == ("openvino", "int8")
    # Another processor would choose bfloat16, but can compute in int8.
    flags("avx512_vnni", "amx_bf16")
    more = make_records(24)[20:]
    updated = care.update_index("test", add=more[:1], options=options).manifest
    assert (updated.backend, updated.dtype) == ("openvino", "int8")
    assert openvino == ["int8", "int8"]
    before = ["openvino", "int8"]
    for other in ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"backend": "onnx"}):
        with raises(EmbeddingSpaceError, "other_precision", before=before):
            care.update_index("test", add=more[1:], options=options, **other)
    flags("avx2")
    with raises(ProviderError, "unsupported_dtype", dtype="int8"):
        care.update_index("test", add=more[1:], options=options)
    other = {"backend": "onnx", "encode_all": True}
    changed = care.update_index("test", add=more[1:], options=options, **other).manifest
    assert (changed.backend, changed.dtype) == ("onnx", "auto")


def test_an_index_of_onnx_runtime_is_not_updated_with_openvino(
    options: care.IndexOptions, openvino: list[str]
) -> None:
    care.build_index("test", make_records(20), options)
    more = make_records(21)[20:]
    with raises(EmbeddingSpaceError, "other_precision", before=["onnx", "auto"]):
        care.update_index("test", add=more, options=options, backend="openvino")
    assert care.update_index("test", add=more, options=options).manifest.backend == "onnx"


def test_the_variables_say_where_indexes_and_builds_are(
    options: care.IndexOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("INDEXES", options.indexes), ("BUILDS", options.builds)):
        monkeypatch.setenv(f"CARE_{name}", str(value))
    monkeypatch.setenv("CARE_PAIR", options.pair)
    assert care.IndexOptions() == options
    monkeypatch.setenv("CARE_INDEXES", "")
    assert care.IndexOptions().indexes == Path("indexes")


def test_the_defaults_are_those_of_a_build() -> None:
    chosen, build = care.IndexOptions(), BuildOptions("", "")
    shared = {field.name for field in fields(chosen)} & {field.name for field in fields(build)}
    decided_later = {"store", "backend", "dtype", "batch_size", "threads", "full_text"}
    for name in shared - decided_later - {"executor"}:
        assert getattr(chosen, name) == getattr(build, name), name


def test_what_an_update_asks_of_the_index_is_done_without_other_documents(
    options: care.IndexOptions,
) -> None:
    records = make_records(40)
    care.build_index("test", records, options)
    same = records[:1]
    graph = care.update_index("test", add=same, options=options, factory="HNSW8")
    assert (graph.built, graph.manifest.factory) == (True, "HNSW8")
    assert not care.update_index("test", add=same, options=options, factory="HNSW8").built
    flat = care.update_index("test", options=options, factory="Flat")
    assert flat.manifest.factory == "Flat"
    asked: list[dict[str, Any]] = [{"add": same}, {"lexical_weight": 0.3}, {}]
    for more in asked:
        again = care.update_index("test", options=options, encode_all=True, **more)
        assert again.encoded
        assert again.encoded.summary.new_texts == 40
    assert again.manifest.fusion == {"lexical": 0.3}
