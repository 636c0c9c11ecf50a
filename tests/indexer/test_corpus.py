import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import CorpusError
from core.types import Document
from indexer import corpus
from indexer.corpus import (
    Location,
    Record,
    Reject,
    corpus_checksum,
    corpus_files,
    read_byte_range,
    read_corpus,
)
from tests.conftest import make_records, write_jsonl
from tests.errors import raises

GOOD = b'{"_id": "a", "text": "x"}'


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels > 1 else []


def read(path: Path, content: bytes) -> list[Record]:
    path.write_bytes(content)
    return list(read_corpus([path]))


def record(**fields: Any) -> bytes:
    return json.dumps({"_id": "b", "text": "y"} | fields).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"_id": "b", "text": "\xff"}', "the line is not UTF-8 (byte 23)"),
        ("{'_id': '发热'}".encode("gb18030"), "the line is not UTF-8 (byte 10)"),
        (b'{"_id": "b", "text": "y"', "the line is not JSON: Expecting ',' delimiter (column 25)"),
        (b"\x00", "the line is not JSON: Expecting value (column 1)"),
        (GOOD + GOOD, "the line is not JSON: Extra data (column 26)"),
        (b"[" * 100_000, "the line is not JSON: nested too deeply"),
        (record(metadata={"n": float("nan")}), "the line is not JSON: NaN is not a JSON number"),
        (record(n=float("-inf")), "the line is not JSON: -Infinity is not a JSON number"),
        (b'{"_id": ' + b"1" * 5000 + b"}", "the line is not JSON: a number has too many digits"),
        (b"[1]", "the line is not a JSON object"),
        (b'"text"', "the line is not a JSON object"),
        (b"null", "the line is not a JSON object"),
        (b'{"text": "y"}', "_id is missing"),
        (record(_id=""), "_id is missing"),
        (record(_id=None), "_id is missing"),
        (record(_id=True), "_id is neither a string nor an integer"),
        (record(_id=1.5), "_id is neither a string nor an integer"),
        (record(_id=["b"]), "_id is neither a string nor an integer"),
        (record(_id="b\n"), "_id has more than 512 characters or is not printable"),
        (record(_id="\ud800"), "_id has more than 512 characters or is not printable"),
        (record(_id="b" * 513), "_id has more than 512 characters or is not printable"),
        (b'{"_id": "b"}', "text is missing"),
        (record(text=None), "text is missing"),
        (record(text=1), "text is not a string"),
        (record(text=""), "text is empty"),
        (record(text=" \t\u3000\n\u200b"), "text is empty"),
        (record(text="\ud83d"), "text contains an unpaired surrogate"),
        (
            record(text="x" * 1_000_000),
            "text has 1000000 characters; the limit is 100000: split it",
        ),
        (record(title=1), "title is not a string"),
        (record(title="\ud83d"), "title contains an unpaired surrogate"),
        (record(metadata=[]), "metadata is not an object"),
        (record(metadata="m"), "metadata is not an object"),
        (record(metadata={"k": nested(32)}), "metadata is nested more than 32 levels deep"),
        (record(metadata={"k": "\ud83d"}), "metadata contains an unpaired surrogate"),
        (
            b'{"_id": "b", "text": "y", "metadata": {"n": 1e999}}',
            "metadata cannot be written as JSON: Out of range float values are not JSON compliant",
        ),
    ],
)
def test_an_invalid_line_is_rejected_and_the_next_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "c.jsonl"
    records = read(path, line + b"\n" + GOOD + b"\n")
    assert records == [
        (Location(str(path), 1), Reject(reason)),
        (Location(str(path), 2), Document("a", "x")),
    ]


@pytest.mark.parametrize(
    ("line", "document"),
    [
        (GOOD, Document("a", "x")),
        (b"\xef\xbb\xbf" + GOOD, Document("a", "x")),
        (GOOD + b"\r", Document("a", "x")),
        (b'{"id": "a", "text": "x"}', Document("a", "x")),
        (b'{"_id": "a", "id": "other", "text": "x"}', Document("a", "x")),
        (b'{"_id": 7, "text": "x"}', Document("7", "x")),
        (b'{"_id": 0, "text": "x"}', Document("0", "x")),
        (record(title=None, metadata=None), Document("b", "y")),
        (record(title="t", metadata={"k": [1]}), Document("b", "y", "t", {"k": [1]})),
        (record(metadata={"k": nested(31)}), Document("b", "y", "", {"k": nested(31)})),
        (record(_id="b" * 512), Document("b" * 512, "y")),
        (record(text="x" * 100_000), Document("b", "x" * 100_000)),
        (record(text="\ud83d\ude00"), Document("b", "😀")),
        (record(surprise=1), Document("b", "y")),
    ],
)
def test_a_valid_line_is_a_document(tmp_path: Path, line: bytes, document: Document) -> None:
    records = read(tmp_path / "c.jsonl", line)
    assert [content for _, content in records] == [document]


def test_empty_lines_are_skipped_but_numbered(tmp_path: Path) -> None:
    records = read(tmp_path / "c.jsonl", b"\n \r\n" + GOOD + b"\n\n" + record())
    assert [place.line for place, _ in records] == [3, 5]


def test_a_very_long_line_is_rejected_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 64)
    long = record(text="x" * 200)
    records = read(tmp_path / "c.jsonl", b"\n".join([GOOD, long, GOOD, long]))
    reject = Reject("the line is longer than 64 bytes")
    assert [content for _, content in records] == [Document("a", "x"), reject] * 2
    assert [place.line for place, _ in records] == [1, 2, 3, 4]


class Lines(io.BytesIO):
    """A file from which at most 64 bytes are read at a time."""

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 < size <= 64
        return super().readline(size)


@pytest.mark.parametrize(("start", "end"), [(0, 400), (1, 400), (300, 400)])
def test_a_byte_range_within_a_very_long_line_is_read_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, start: int, end: int
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 64)
    content = record(text="x" * 300) + b"\n" + GOOD + b"\n"
    path: Any = SimpleNamespace(open=lambda _: Lines(content))
    long = [Reject("the line is longer than 64 bytes")] if start == 0 else []
    assert list(read_byte_range(path, start, end, 100)) == [*long, Document("a", "x")]


def test_parquet_and_jsonl_give_the_same_records(tmp_path: Path) -> None:
    records = make_records(2500)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet")
    write_jsonl(tmp_path / "c.jsonl", records)
    from_parquet = list(read_corpus([tmp_path / "c.parquet"]))
    from_jsonl = list(read_corpus([tmp_path / "c.jsonl"]))
    assert [content for _, content in from_parquet] == [content for _, content in from_jsonl]
    assert [place.line for place, _ in from_parquet] == list(range(1, 2501))


def test_an_invalid_row_of_parquet_is_rejected_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"_id": ["a", None, "c"], "text": ["x", "y", " "]}), path)
    assert list(read_corpus([path])) == [
        (Location(str(path), 1), Document("a", "x")),
        (Location(str(path), 2), Reject("_id is missing")),
        (Location(str(path), 3), Reject("text is empty")),
    ]


@pytest.mark.parametrize("size", [0, 3, 100, -1])
def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path: Path, size: int) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"_id": ["a"], "text": ["x"]}), path)
    path.write_bytes(path.read_bytes()[:size])
    with raises(CorpusError, "unreadable", path=path):
        list(read_corpus([path]))


def test_parquet_text_that_is_not_utf8_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    offsets, data = pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")
    text = pa.StringArray.from_buffers(1, offsets, data)
    pq.write_table(pa.table({"_id": ["a"], "text": text}), path)
    with raises(CorpusError, "unreadable", path=path):
        list(read_corpus([path]))


# Microseconds since 1970, beyond the range of Python's datetime.
FAR = pa.array([2**62], pa.timestamp("us"))


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"_id": ["a"], "text": ["x"], "when": FAR}), path)
    assert list(read_corpus([path])) == [(Location(str(path), 1), Document("a", "x"))]
    pq.write_table(pa.table({"when": FAR}), path)
    assert list(read_corpus([path])) == [(Location(str(path), 1), Reject("_id is missing"))]


def test_values_outside_the_range_of_python_are_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.parquet"
    metadata = pa.StructArray.from_arrays([FAR], ["when"])
    pq.write_table(pa.table({"_id": ["a"], "text": ["x"], "metadata": metadata}), path)
    with raises(CorpusError, "unreadable", path=path):
        list(read_corpus([path]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three corpus files at two depths, and another file."""
    for name in ("b.jsonl", "a.jsonl", "deep/c.parquet", "notes.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("corpus", "names"),
    [
        ("", ["a.jsonl", "b.jsonl", "deep/c.parquet"]),
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.parquet", ["deep/c.parquet"]),
        ("deep", ["deep/c.parquet"]),
        ("b.jsonl", ["b.jsonl"]),
    ],
)
def test_a_path_a_folder_and_a_glob_give_sorted_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, names: list[str]
) -> None:
    assert corpus_files(str(folder / corpus)) == [folder / name for name in names]
    monkeypatch.chdir(folder.parent)
    assert corpus_files(f"data/{corpus}") == [Path("data") / name for name in names]


@pytest.mark.parametrize(
    ("corpus", "code", "named"),
    [
        ("none.jsonl", "corpus_missing", "none.jsonl"),
        ("*.csv", "corpus_missing", "*.csv"),
        ("notes.txt", "unsupported_format", "notes.txt"),
        ("*", "unsupported_format", "notes.txt"),
        ("**.jsonl", "bad_glob", "**.jsonl"),
    ],
)
def test_a_missing_or_unsupported_corpus_is_named(
    folder: Path, corpus: str, code: str, named: str
) -> None:
    with raises(CorpusError, code) as caught:
        corpus_files(str(folder / corpus))
    assert named in str(caught.value)


def test_a_folder_without_corpus_files_is_an_error(tmp_path: Path) -> None:
    with raises(CorpusError, "corpus_missing", path=tmp_path):
        corpus_files(str(tmp_path))


def test_the_checksum_depends_only_on_contents_and_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, content in zip(paths, ("1", "2", "1"), strict=True):
        path.write_text(content)
    a, b, c = paths
    assert corpus_checksum([a, b]) == corpus_checksum([c, b])
    assert len({corpus_checksum(files) for files in ([a], [b], [a, b], [b, a], [a, c])}) == 5
