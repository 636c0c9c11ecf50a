import gzip
import io
import json
import logging
import os
import tracemalloc
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import CorpusError
from core.records import other_encoding
from core.types import Document
from indexer import corpus, limits
from indexer.corpus import (
    Location,
    Record,
    corpus_checksum,
    corpus_files,
    read_byte_range,
    read_corpus,
    warn_about_unread,
)
from indexer.records import Reject
from tests.conftest import Builder, make_records, write_jsonl
from tests.errors import raises

GOOD = b'{"_id": "a", "text": "x"}'
ADVICE = other_encoding(b"")


def with_peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Returns a result, and the peak of the memory of Python's objects meanwhile [bytes]."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels > 1 else []


def read(path: Path, content: bytes) -> list[Record]:
    path.write_bytes(content)
    return list(read_corpus([path]))


def contents(path: Path, content: bytes) -> list[Document | Reject]:
    return [each for _, each in read(path, content)]


def record(**fields: Any) -> bytes:
    return json.dumps({"_id": "b", "text": "y"} | fields).encode()


def tagged(**metadata: Any) -> bytes:
    return record(metadata=metadata)


def parquet(rows: list[dict[str, Any]] | pa.Table, schema: pa.Schema | None = None) -> bytes:
    """Returns a file of Parquet."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"_id": "b", "text": "\xff"}', f"the line is not UTF-8 (byte 23): {ADVICE}"),
        ("{'_id': '发热'}".encode("gb18030"), f"the line is not UTF-8 (byte 10): {ADVICE}"),
        (b'{"_id": "b", "text": "y"', "the line is not JSON: Expecting ',' delimiter (column 25)"),
        (b"\x00", "the line is not JSON: Expecting value (column 1)"),
        (GOOD + GOOD, "the line is not JSON: Extra data (column 26)"),
        (b"[" * 100_000, "the line is not JSON: nested too deeply"),
        (tagged(n=float("nan")), "the line is not JSON: NaN is not a JSON number"),
        (record(n=float("-inf")), "the line is not JSON: -Infinity is not a JSON number"),
        (b'{"_id": ' + b"1" * 5000 + b"}", "the line is not JSON: a number has too many digits"),
        (b"[1]", "the line is not a JSON object"),
        (b'{"text": "y"}', "_id is missing"),
        (record(_id=""), "_id is missing"),
        (record(_id=True), "_id is neither a string nor an integer"),
        (record(_id=1.5), "_id is neither a string nor an integer"),
        (record(_id="b\n"), "_id has more than 512 characters or is not printable"),
        (record(_id="\ud800"), "_id has more than 512 characters or is not printable"),
        (record(_id="b" * 513), "_id has more than 512 characters or is not printable"),
        (b'{"_id": "b"}', "text is missing"),
        (record(text=1), "text is not a string"),
        (record(text=""), "text is empty"),
        (record(text=" \t\u3000\n\u200b"), "text is empty"),
        (record(text="\ud83d"), "text contains an unpaired surrogate"),
        (record(text="x" * 100_001), "text has 100001 characters; the limit is 100000: split it"),
        (record(title=1), "title is not a string"),
        (record(title="\ud83d"), "title contains an unpaired surrogate"),
        (record(metadata=[]), "metadata is not an object"),
        (tagged(k=nested(32)), "metadata is nested more than 32 levels deep"),
        (tagged(k="\ud83d"), "metadata contains an unpaired surrogate"),
        (record(title="t" * 4001), "title has 4001 characters; the limit is 4000: shorten it"),
        (tagged(k="v" * 8001), "metadata.k has 8001 characters; the limit is 8000: shorten it"),
        (tagged(k=["v" * 8001]), "metadata.k has 8001 characters; the limit is 8000: shorten it"),
        (tagged(k=[1] * 10**6), "metadata.k has 1000000 values; the limit is 1000: remove some"),
        (tagged(k=[10**400]), "metadata.k has a number beyond 1.7e308: write it as text"),
        (
            tagged(**{f"k{i}": i for i in range(101)}),
            "metadata has 101 fields; the limit is 100: remove some",
        ),
        (
            tagged(**{"k" * 129: 1}),
            "the name of a metadata field has 129 characters; the limit is 128: rename it",
        ),
        (
            tagged(k={"o": "v" * 70_000}),
            "metadata has 70016 bytes as JSON; the limit is 65536: shorten it",
        ),
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
    # Empty lines are skipped, but numbered.
    records = read(path, line + b"\n\n \r\n" + GOOD + b"\n\n")
    assert records == [
        (Location(str(path), 1), Reject(reason)),
        (Location(str(path), 4), Document("a", "x")),
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
        (record(title="t" * 4000), Document("b", "y", "t" * 4000)),
        (
            record(metadata={"k" * 128: ["v" * 8000, *range(999)]}),
            Document("b", "y", "", {"k" * 128: ["v" * 8000, *range(999)]}),
        ),
        (record(text="x" * 100_000), Document("b", "x" * 100_000)),
        (record(text="\ud83d\ude00"), Document("b", "😀")),
        (record(surprise=1), Document("b", "y")),
    ],
)
def test_a_valid_line_is_a_document(tmp_path: Path, line: bytes, document: Document) -> None:
    assert contents(tmp_path / "c.jsonl", line) == [document]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TEXTS = st.text() | st.integers(1, 200_000).map(lambda count: "字" * count)
VALUES = TEXTS | JSON_VALUES | st.integers(1, 3000).map(lambda count: ["值"] * count)
RECORDS = JSON_VALUES | st.fixed_dictionaries(
    {"_id": TEXTS | JSON_VALUES, "text": TEXTS},
    optional={
        "title": TEXTS | JSON_VALUES,
        "metadata": st.dictionaries(TEXTS, VALUES)
        | st.integers(1, 300).map(lambda count: {str(i): i for i in range(count)}),
    },
)


@given(RECORDS, st.booleans())
def test_a_record_is_a_document_within_the_limits_or_a_reject(record: Any, ascii_: bool) -> None:
    lines = json.dumps(record, ensure_ascii=ascii_).encode(errors="surrogatepass")
    (found,) = read_byte_range(io.BytesIO(lines), 0, 1, limits.MAX_TEXT_CHARS)
    if isinstance(found, Reject):
        return
    metadata = json.dumps(found.metadata, ensure_ascii=False).encode()
    assert 0 < len(found.id) <= limits.MAX_ID_CHARS
    assert 0 < len(found.text) <= limits.MAX_TEXT_CHARS
    assert len(found.title) <= limits.MAX_TITLE_CHARS
    assert len(metadata) <= limits.MAX_METADATA_BYTES
    assert sum(value is not None for value in found.metadata.values()) <= limits.MAX_FIELDS
    for name, content in found.metadata.items():
        values = content if isinstance(content, list) else [content]
        assert len(name) <= limits.MAX_FIELD_NAME_CHARS
        assert len(values) <= limits.MAX_LIST_VALUES
        assert all(len(v) <= limits.MAX_VALUE_CHARS for v in values if isinstance(v, str))


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
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 64)
    content = record(text="x" * 300) + b"\n" + GOOD + b"\n"
    long = [Reject("the line is longer than 64 bytes")] if start == 0 else []
    assert list(read_byte_range(Lines(content), start, end, 100)) == [*long, Document("a", "x")]


def test_parquet_gzip_and_jsonl_give_the_same_records(tmp_path: Path) -> None:
    records = make_records(2500)
    plain = write_jsonl(tmp_path / "c.jsonl", records)
    expected = [(place.line, content) for place, content in read_corpus([plain])]
    assert [line for line, _ in expected] == list(range(1, 2501))
    for name, content in (
        ("c.parquet", parquet(records)),
        ("c.jsonl.gz", gzip.compress(plain.read_bytes())),
    ):
        found = read(tmp_path / name, content)
        assert [(place.line, content) for place, content in found] == expected


def test_a_row_of_parquet_may_have_many_fields_that_are_null(tmp_path: Path) -> None:
    rows = [{"_id": f"{i}", "text": "x", "metadata": {f"k{i}": i}} for i in range(150)]
    kind = pa.struct([(f"k{i}", pa.int64()) for i in range(150)])
    schema = pa.schema([("_id", pa.string()), ("text", pa.string()), ("metadata", kind)])
    documents = contents(tmp_path / "c.parquet", parquet(rows, schema))
    assert all(isinstance(document, Document) for document in documents)


def test_an_invalid_or_very_long_row_of_parquet_is_rejected_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.parquet"
    rows = [{"_id": "a", "text": "x"}, {"text": "y"}, {"_id": "c", "text": " "}]
    assert read(path, parquet(rows)) == [
        (Location(str(path), 1), Document("a", "x")),
        (Location(str(path), 2), Reject("_id is missing")),
        (Location(str(path), 3), Reject("text is empty")),
    ]
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 200)
    long = make_records(1)[0] | {"_id": "b", "text": "y" * 300}
    found = contents(path, parquet([*make_records(2), long, make_records(1)[0]]))
    assert found[2] == Reject("the row is longer than 200 bytes")
    assert all(isinstance(found[i], Document) for i in (0, 1, 3))
    for value in (b"\x00\x01", timedelta(days=1)):  # JSON has none of them
        row = {"_id": "1", "text": "头痛", "metadata": {"odd": {"inner": value}}}
        (rejected,) = contents(path, parquet([row]))
        assert "metadata.odd.inner" in rejected.reason


def test_few_rows_of_parquet_are_read_at_a_time_if_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PARQUET_BYTES", 1 << 20)
    path = tmp_path / "c.parquet"
    path.write_bytes(parquet([{"_id": f"{i}", "text": f"{i}" + "x" * 100_000} for i in range(200)]))
    count, peak = with_peak(lambda: sum(1 for _ in read_corpus([path], 200_000)))
    assert count == 200
    assert peak < 5_000_000


# Microseconds since 1970, beyond the range of Python's datetime.
FAR = pa.array([2**62], pa.timestamp("us"))


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    table = pa.table({"_id": ["a"], "text": ["x"], "when": FAR})
    assert contents(tmp_path / "c.parquet", parquet(table)) == [Document("a", "x")]
    without = contents(tmp_path / "c.parquet", parquet(table.select(["when"])))
    assert without == [Reject("_id is missing")]


PARQUET = parquet([{"_id": "a", "text": "x"}])
NOT_UTF8 = pa.StringArray.from_buffers(
    1, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xfe")
)
GZIP = gzip.compress("\n".join(map(json.dumps, make_records(100))).encode(), mtime=0)


BEYOND = pa.StructArray.from_arrays([FAR], ["when"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("c.parquet", PARQUET[:end]) for end in (0, 3, 100, -1)),
        ("c.parquet", parquet(pa.table({"_id": ["a"], "text": NOT_UTF8}))),
        # A time beyond the range of datetime.
        ("c.parquet", parquet(pa.table({"_id": ["a"], "text": ["x"], "metadata": BEYOND}))),
        *(("c.jsonl.gz", GZIP[:end]) for end in (1, 15, 400, -9, -1)),
        ("c.jsonl.gz", b"not gzip"),
        ("c.jsonl.gz", GZIP[:12] + b"\xff" * 30),
    ],
)
def test_an_unreadable_file_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes
) -> None:
    with raises(CorpusError, "unreadable", path=tmp_path / name):
        read(tmp_path / name, content)


def test_a_small_file_that_expands_to_a_huge_line_is_read_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RECORD_BYTES", 1 << 16)
    packed = gzip.compress(b'"' * 30_000_000 + b"\n" + GOOD)
    found, peak = with_peak(lambda: read(tmp_path / "c.jsonl.gz", packed))
    assert [place.line for place, _ in found] == [1, 2]
    long = Reject("the line is longer than 65536 bytes")
    assert [content for _, content in found] == [long, Document("a", "x")]
    assert peak < 5_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three corpus files at two depths, and another file."""
    for name in ("b.jsonl", "a.jsonl", "deep/c.parquet", "notes.xyz"):
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
        ("notes.xyz", "unsupported_format", "notes.xyz"),
        ("*", "unsupported_format", "notes.xyz"),
        ("**.jsonl", "bad_glob", "**.jsonl"),
    ],
)
def test_a_missing_or_unsupported_corpus_is_named(
    folder: Path, corpus: str, code: str, named: str
) -> None:
    with raises(CorpusError, code) as caught:
        corpus_files(str(folder / corpus))
    assert named in str(caught.value)


def test_compressed_files_of_a_folder_and_a_glob_are_read(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz", "c.json.gz")]
    for path in paths:
        path.write_bytes(gzip.compress(GOOD))
    with raises(CorpusError, "unsupported_format"):
        corpus_files(str(paths[2]))
    paths.pop().unlink()
    assert corpus_files(str(tmp_path)) == corpus_files(f"{tmp_path}/*.gz") == paths
    assert corpus_files(str(paths[0])) == paths[:1]


def unread(corpus: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Returns the warning about a corpus, or "" if there is none."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_about_unread(str(corpus))
    return "".join(caplog.messages)


def test_files_of_a_folder_that_are_not_read_are_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert unread(folder / "deep", caplog) == unread(folder / "a.jsonl", caplog) == ""
    assert unread(folder, caplog).endswith(": notes.xyz")
    (folder / ".git").mkdir()
    for name in (".git/HEAD", *(f"{i}.bin" for i in range(8))):
        (folder / name).touch()
    assert unread(folder, caplog).endswith(": 0.bin, 1.bin, 2.bin, 3.bin, 4.bin and 4 more")


def test_links_out_of_a_folder_and_special_files_are_not_read(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = corpus_files(str(folder))
    (folder / "notes.xyz").unlink()
    secret = write_jsonl(tmp_path / "secret.jsonl", make_records(1))
    (folder / "out.jsonl").symlink_to(secret)
    (folder / "parent").symlink_to(tmp_path)
    (folder / "gone.jsonl").symlink_to(tmp_path / "none")
    os.mkfifo(folder / "pipe.jsonl")
    assert corpus_files(str(folder)) == before
    assert unread(folder, caplog).endswith(": gone.jsonl, out.jsonl, parent, pipe.jsonl")
    (folder / "in.jsonl").symlink_to("a.jsonl")
    assert corpus_files(str(folder)) == sorted([*before, folder / "in.jsonl"])
    # What the user names is followed.
    assert corpus_files(str(folder / "out.jsonl")) == [folder / "out.jsonl"]
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert len(corpus_files(str(link))) == len(before) + 1
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "data.jsonl").symlink_to(secret)
    with raises(CorpusError, "corpus_missing") as caught:
        corpus_files(str(hub))
    assert "data.jsonl" in str(caught.value)
    assert len(corpus_files(str(hub / "*.jsonl"))) == 1


def test_a_special_file_and_a_folder_without_corpus_files_are_errors(tmp_path: Path) -> None:
    with raises(CorpusError, "corpus_missing", path=tmp_path):
        corpus_files(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.jsonl")
    for special in ("/dev/zero", "pipe.jsonl"):
        with raises(CorpusError, "corpus_missing"):
            corpus_files(str(tmp_path / special))


def test_the_checksum_depends_only_on_contents_and_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, content in zip(paths, ("1", "2", "1"), strict=True):
        path.write_text(content)
    a, b, c = paths
    assert corpus_checksum([a, b]) == corpus_checksum([c, b])
    assert len({corpus_checksum(files) for files in ([a], [b], [a, b], [b, a], [a, c])}) == 5


RECORDS = [{"_id": str(i), "text": "头痛", "department": "神经科"} for i in range(3)]


def test_fields_that_are_not_read_are_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*RECORDS, {"_id": "9", "text": "头痛", "year": 1}])
    (tmp_path / "b.parquet").write_bytes(parquet(RECORDS[:2]))
    ignored: Counter[str] = Counter()
    found = list(read_corpus([tmp_path / "a.jsonl", tmp_path / "b.parquet"], ignored=ignored))
    assert len(found) == 6
    assert ignored == {"department": 5, "year": 1}


def test_ignored_and_nested_fields_are_named_once(
    build_version: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    nested = [r | {"metadata": {"author": {"name": "a"}, "year": 1}} for r in RECORDS]
    build_version(nested)
    (ignored,) = [r for r in caplog.records if "department" in r.getMessage()]
    (objects,) = [r for r in caplog.records if "author" in r.getMessage()]
    assert "(3 records)" in ignored.getMessage()
    assert "(3 records)" in objects.getMessage()
    assert "year" not in objects.getMessage()


TYPED = {
    "day": (date(2020, 1, 31), "2020-01-31"),
    "at": (datetime(2020, 1, 31, 8, 30, tzinfo=UTC), "2020-01-31T08:30:00+00:00"),
    "clock": (time(8, 30), "08:30:00"),
    "price": (Decimal("12.50"), 12.5),
    "count": (Decimal("3"), 3),
    "exact": (Decimal("0.12345678901234567890"), "0.12345678901234567890"),
    "days": ([date(2020, 2, 1)], ["2020-02-01"]),
}


def test_typed_values_of_parquet_become_values_of_json(tmp_path: Path) -> None:
    metadata = {name: value for name, (value, _) in TYPED.items()}
    labels = pa.field("labels", pa.map_(pa.string(), pa.int64()))
    kind = pa.struct([*pa.Table.from_pylist([metadata]).schema, labels])
    schema = pa.schema({"_id": pa.string(), "text": pa.string(), "metadata": kind})
    row = {"_id": "1", "text": "头痛", "metadata": metadata | {"labels": [("a", 1), ("b", 2)]}}
    (found,) = contents(tmp_path / "c.parquet", parquet([row], schema))
    expected = {name: value for name, (_, value) in TYPED.items()}
    assert found.metadata == expected | {"labels": {"a": 1, "b": 2}}
