import json
import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from core.documents import DocumentReader, DocumentWriter
from core.errors import IndexVersionError
from core.types import Document
from tests.errors import raises

SPECIAL = [
    Document("a", "文字", "标题", {"n": 1, "deep": {"list": [True, None, 0.5, "值"]}}),
    Document("id with spaces", "a\x00b\nc", "", {}),
    Document("😀", "𠀀" * 1000, "", {"字段": "值"}),
]


CHUNKS = [
    Document("a#0", "一", parent="a", chunk=0, chunks=3),
    Document("a#1", "二", parent="a", chunk=1, chunks=3),
    Document("a#2", "三", parent="a", chunk=2, chunks=3),
    Document("b", "四", parent="b"),
    Document("c#0", "五", parent="c", chunk=0, chunks=2),
    Document("c#1", "六", parent="c", chunk=1, chunks=2),
]


def write(path: Path, documents: list[Document], *, chunked: bool = False) -> Path:
    with DocumentWriter(path, chunked=chunked) as writer:
        for document in documents:
            writer.write(document)
    return path


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 8192, 10_000])
def test_documents_round_trip_over_any_number_of_batches(tmp_path: Path, count: int) -> None:
    documents = [Document(f"d{i}", f"text {i}", metadata={"i": i}) for i in range(count)]
    reader = DocumentReader(write(tmp_path / "d.arrow", documents))
    assert len(reader) == count
    assert list(reader) == documents
    for row in {0, 4095, 4096, 4097, count - 1} & set(range(count)):
        assert reader[row] == documents[row]
        (stored,) = reader.read([row])
        assert (stored.id, stored.text, stored.metadata) == (f"d{row}", f"text {row}", {"i": row})


def test_any_text_and_metadata_round_trip(tmp_path: Path) -> None:
    assert list(DocumentReader(write(tmp_path / "d.arrow", SPECIAL))) == SPECIAL


@pytest.mark.parametrize(("documents", "chunked"), [(SPECIAL, False), (CHUNKS, True)])
def test_documents_are_read_as_json(
    tmp_path: Path, documents: list[Document], chunked: bool
) -> None:
    reader = DocumentReader(write(tmp_path / "d.arrow", documents, chunked=chunked))
    for row, document in enumerate(documents):
        found = reader.read([row])[0].json()
        names = ("id", "title", "text", "metadata")
        fields = {name: json.loads(getattr(found, name)) for name in names}
        assert fields == {name: getattr(document, name) for name in names}
        chunk = json.loads(b'{"":0' + found.chunk + b"}")
        expected = ("parent", "chunk", "chunks") if chunked else ()
        assert chunk == {"": 0} | {name: getattr(document, name) for name in expected}


def test_chunks_round_trip_and_first_chunks_are_found(tmp_path: Path) -> None:
    reader = DocumentReader(write(tmp_path / "d.arrow", CHUNKS, chunked=True))
    assert reader.chunked
    assert list(reader) == CHUNKS
    rows = np.array([5, 0, 3, 2, 4])
    assert reader.first_chunks(rows).tolist() == [4, 0, 3, 0, 4]


def test_documents_are_listed_from_a_row_on(tmp_path: Path) -> None:
    chunked = DocumentReader(write(tmp_path / "c.arrow", CHUNKS, chunked=True))
    assert [(one.id, one.chunks) for one in chunked.listed(0, 9)] == [("a", 3), ("b", 1), ("c", 2)]
    # A row within a document stands behind its beginning.
    assert [one.id for one in chunked.listed(1, 1)] == ["b"]
    assert chunked.listed(5, 9) == []
    whole = DocumentReader(write(tmp_path / "d.arrow", CHUNKS))
    assert [(one.id, one.chunks) for one in whole.listed(4, 9)] == [("c#0", None), ("c#1", None)]
    assert whole.listed(6, 9) == []
    many = [Document(f"d{i}", "", f"t{i}") for i in range(4100)]
    across = DocumentReader(write(tmp_path / "e.arrow", many)).listed(4095, 2)
    assert [(one.id, one.title) for one in across] == [("d4095", "t4095"), ("d4096", "t4096")]


@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_a_row_is_found_by_its_id(tmp_path: Path, count: int) -> None:
    reader = DocumentReader(
        write(tmp_path / "d.arrow", [Document(f"d{i}", "") for i in range(count)])
    )
    for row in {0, 4095, 4096, count - 1} & set(range(count)):
        assert reader.find(f"d{row}") == range(row, row + 1)
    for unknown in (f"d{count}", "d", "", "D0", "d0 ", "\ud800"):
        assert not reader.find(unknown)


def test_chunks_are_found_by_their_id_and_by_that_of_their_document(tmp_path: Path) -> None:
    reader = DocumentReader(write(tmp_path / "d.arrow", CHUNKS, chunked=True))
    found = {id_: reader.find(id_) for id_ in ("a", "b", "c", "a#0", "a#2", "c#1")}
    assert found == {
        "a": range(3),
        "b": range(3, 4),
        "c": range(4, 6),
        "a#0": range(1),
        "a#2": range(2, 3),
        "c#1": range(5, 6),
    }
    assert not any(map(reader.find, ("a#3", "b#0", "d", "")))


def test_the_chunks_of_a_document_are_found_across_batches(tmp_path: Path) -> None:
    rows = [Document(f"d{i}", "", parent=f"d{i}") for i in range(4090)]
    rows += [Document(f"e#{i}", str(i), parent="e", chunk=i, chunks=10) for i in range(10)]
    reader = DocumentReader(write(tmp_path / "d.arrow", rows, chunked=True))
    assert reader.find("e") == range(4090, 4100)
    assert reader.find("e#9") == range(4099, 4100)


def test_without_chunks_each_row_is_its_own_first_chunk(tmp_path: Path) -> None:
    reader = DocumentReader(write(tmp_path / "d.arrow", CHUNKS))
    assert not reader.chunked
    assert {(document.parent, document.chunk, document.chunks) for document in reader} == {
        (None, 0, 1)
    }
    assert reader.first_chunks(np.arange(6)).tolist() == list(range(6))


def test_an_empty_index_of_chunks_is_read(tmp_path: Path) -> None:
    assert len(DocumentReader(write(tmp_path / "d.arrow", [], chunked=True))) == 0


@pytest.mark.parametrize("rows", [[1, 2], [0, 2, 1], [0, 1, 3, 5], [0, 0, 1, 1]])
def test_chunks_out_of_order_are_an_error(tmp_path: Path, rows: list[int]) -> None:
    path = write(tmp_path / "d.arrow", [CHUNKS[row] for row in rows], chunked=True)
    with raises(IndexVersionError, "unreadable_documents", path=path):
        DocumentReader(path)


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_out_of_range_is_an_index_error(tmp_path: Path, row: int) -> None:
    reader = DocumentReader(write(tmp_path / "d.arrow", SPECIAL))
    with pytest.raises(IndexError, match=f"row {row} "):
        reader[row]


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "d.arrow", SPECIAL[:2]).read_bytes()
    path = tmp_path / "cut.arrow"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with raises(IndexVersionError, "unreadable_documents", path=path):
            DocumentReader(path)


def test_after_an_error_of_the_writer_the_file_is_not_readable(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), DocumentWriter(tmp_path / "d.arrow") as writer:
        writer.write(SPECIAL[0])
        raise RuntimeError
    with raises(IndexVersionError, "unreadable_documents"):
        DocumentReader(tmp_path / "d.arrow")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with raises(IndexVersionError, "unreadable_documents", path=tmp_path / "none.arrow"):
        DocumentReader(tmp_path / "none.arrow")


def test_a_table_with_other_columns_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"], "text": ["b"]})
    path = tmp_path / "foreign.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with raises(IndexVersionError, "unreadable_documents", path=path):
        DocumentReader(path)


def test_batches_of_another_size_are_an_error(tmp_path: Path) -> None:
    source = pa.ipc.open_file(str(write(tmp_path / "d.arrow", SPECIAL)))
    path = tmp_path / "uneven.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, source.schema) as writer:
        for _ in range(2):
            writer.write_batch(source.get_batch(0))
    with raises(IndexVersionError, "unreadable_documents", path=path):
        DocumentReader(path)


@pytest.mark.parametrize("chunked", [False, True])
def test_of_some_rows_only_these_are_found(tmp_path: Path, chunked: bool) -> None:
    documents = CHUNKS if chunked else [Document(f"d{i}", "文") for i in range(5000)]
    reader = DocumentReader(write(tmp_path / "d.arrow", documents, chunked=chunked))
    ids = {each.id for each in documents} | {each.parent for each in documents if each.parent}
    for visible in ([], [3], [0, 1, 2], list(range(len(documents)))):
        rows = np.array(visible, np.int64)
        for id_ in {*sorted(ids)[:20], "d4999", "c", "none", "\ud800"}:
            whole = reader.find(id_)
            seen = whole if set(whole) <= set(visible) else range(0)
            assert reader.find(id_, rows) == seen


@pytest.mark.e2e
def test_an_id_outside_of_some_rows_takes_the_time_of_one_that_no_row_has(tmp_path: Path) -> None:
    """Where a search ends at the row with the id, its time says that there is one."""
    count = 200_000
    documents = [Document(f"d{i:06d}", "文") for i in range(count)]
    reader = DocumentReader(write(tmp_path / "d.arrow", documents))
    within = np.arange(0, count, 3, dtype=np.int64)
    ids = {"first": "d000001", "last": "d199999", "missing": "d200000", "visible": "d100002"}
    assert [len(reader.find(id_, within)) for id_ in ids.values()] == [0, 0, 0, 1]
    times: dict[str, list[float]] = {name: [] for name in ids}
    for _ in range(200):
        for name, id_ in ids.items():
            started = time.thread_time()
            reader.find(id_, within)
            times[name].append((time.thread_time() - started) * 1e6)
    medians = {name: statistics.median(each) for name, each in times.items()}
    print("processor time, median [us]:", medians)
    assert max(medians.values()) < 1.5 * min(medians.values())
