"""Full text of several segments, which is searched as if it was of one."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from core.documents import FILE_NAME, DocumentReader, DocumentWriter
from core.errors import IndexVersionError
from core.filter_table import hash_value
from core.filters import FilterReader, FilterWriter, Selection
from core.manifest import FULL_TEXT
from core.types import Document
from stores.lexical import LexicalIndex, Part, is_current, write_full_text
from stores.order import with_ties
from tests.core.test_filters import FILTERS, METADATA, known_part, naive_rows
from tests.errors import raises

WORDS = ["胃痛", "反酸", "烧心", "头痛", "腹泻", "CA-125", "CA125", "患者", "护理", "的", "5mg"]
QUERIES = ["胃痛反酸", "患者头痛的护理", "CA125", "腹泻5mg"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join)
RECORDS = st.lists(st.tuples(TEXTS, METADATA), min_size=2, max_size=24)
CUTS = st.lists(st.floats(0, 1), max_size=5)

Record = tuple[str, Mapping[str, Any]]
_INDEX = tantivy.Index
# Tantivy waits for the disk when it writes.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def write(folder: Path, records: Sequence[Record]) -> tuple[Part, FilterReader]:
    """Writes the full text of records, and what it is made from."""
    folder.mkdir(parents=True)
    names = folder / FILE_NAME, folder / "filters.arrow"
    with DocumentWriter(names[0]) as documents, FilterWriter(names[1]) as filters:
        for row, (text, metadata) in enumerate(records):
            documents.write(Document(id=str(row), text=text, metadata=dict(metadata)))
            filters.add(row, metadata)
    reader = FilterReader(names[1], filters.fields(), len(records))
    component = write_full_text(folder, DocumentReader(names[0]), reader)
    return Part(folder, component, len(records)), reader


def write_parts(
    folder: Path, records: Sequence[Record], cuts: Sequence[float]
) -> list[tuple[Part, FilterReader]]:
    """Writes consecutive records as parts; a cut is a share of all records."""
    ends = sorted({0, len(records), *(round(cut * len(records)) for cut in cuts)})
    return [write(folder / f"{a}-{b}", records[a:b]) for a, b in pairwise(ends)]


def lists(found: tuple[Any, Any]) -> tuple[list[float], list[int]]:
    scores, rows = found
    assert (scores.dtype, rows.dtype) == (np.float32, np.int64)
    return scores.tolist(), rows.tolist()


@settings(max_examples=20, deadline=None)
@given(RECORDS, CUTS, FILTERS, st.integers(1, 30), st.sampled_from([0, 1024]))
def test_parts_are_searched_as_one_index(
    records: list[Record], cuts: list[float], filter_: dict[str, Any], k: int, most: int
) -> None:
    with TemporaryDirectory(dir=_FOLDER) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("stores.lexical._MANY_HASHES", most)
        part, reader = write(Path(folder, "whole"), records)
        written = write_parts(Path(folder), records, cuts)
        whole, parts = LexicalIndex([part]), LexicalIndex([part for part, _ in written])
        assert parts.count == whole.count == len(records)
        conditions = reader.check(known_part(reader, filter_))
        required = reader.hashed(conditions)
        # The hashes of a part that has other values are those of its own.
        for at, one in enumerate(required):
            own = [each.hashed(conditions)[at] for _, each in written]
            assert {hash_ for each in own for hash_ in each.hashes} == set(one.hashes)
            assert {each.excluded for each in own} == {one.excluded}
        metadata = [values for _, values in records]
        selected = set(naive_rows(metadata, known_part(reader, filter_)))
        selection = Selection(reader, conditions) if conditions else None
        for query in QUERIES:
            assert parts.idf(query) == whole.idf(query)
            for characters in (True, False):
                found = lists(parts.search(query, k, characters=characters))
                assert found == lists(whole.search(query, k, characters=characters))
            every = lists(whole.search(query, len(records)))
            expected = [pair for pair in zip(*every, strict=True) if pair[1] in selected]
            some = lists(parts.search(query, len(records), selection))
            assert list(zip(*some, strict=True)) == expected


@settings(max_examples=20, deadline=None)
@given(RECORDS, CUTS, st.sets(st.integers(0, 23)), st.integers(1, 30), st.booleans())
def test_deleted_rows_are_left_out(
    records: list[Record], cuts: list[float], deleted: set[int], k: int, tied: bool
) -> None:
    if tied:
        records = [(records[0][0], metadata) for _, metadata in records]
    deleted &= set(range(len(records)))
    with TemporaryDirectory(dir=_FOLDER) as folder, pytest.MonkeyPatch.context() as patch:
        whole = LexicalIndex([write(Path(folder, "whole"), records)[0]])
        written = [part for part, _ in write_parts(Path(folder), records, cuts)]
        live = LexicalIndex(written, deleted=BitMap(deleted))
        patch.setattr("stores.lexical._TIED", 1)
        patch.setattr("stores.lexical._DELETED", 0)
        patch.setattr("stores.order.MOST_TIED", 4)
        assert live.count == len(records)
        for query in QUERIES:
            assert live.idf(query) == whole.idf(query)
            scores, rows = whole.search(query, len(records))
            kept = np.array([row not in deleted for row in rows.tolist()], np.bool_)
            scores, rows = scores[kept], rows[kept]
            expected = with_ties(
                lambda n, s=scores, r=rows: (s[:n], r[:n]), k, k + 1, len(records) - len(deleted)
            )
            assert lists(live.search(query, k)) == lists(expected)


@pytest.mark.parametrize("deleted", [(), range(100)])
def test_ranges_of_many_values_are_exact(tmp_path: Path, deleted: Sequence[int]) -> None:
    records: list[Record] = [
        ("胃痛" * (row % 7 + 1), {"n": row, "a": row % 2}) for row in range(3000)
    ]
    part, reader = write(tmp_path / "part", records)
    index, every = LexicalIndex([part], deleted=BitMap(deleted)), LexicalIndex([part])
    scores, rows = every.search("胃痛", 3000)
    for bounds in ({"gte": 1500}, {"lt": 1200}):
        selection = Selection(reader, reader.check({"n": bounds, "a": 1}))
        kept = np.isin(rows, selection.rows()) & ~np.isin(rows, list(deleted))
        expected = with_ties(
            lambda n, s=scores[kept], r=rows[kept]: (s[:n], r[:n]), 5, 69, 3000 - len(deleted)
        )
        assert lists(index.search("胃痛", 5, selection)) == lists(expected)


def test_a_search_goes_on_until_it_has_found_rows_that_are_not_deleted(tmp_path: Path) -> None:
    records: list[Record] = [("胃痛", {"n": row}) for row in range(400)] + [("胃痛的护理", {})] * 3
    written, (_, reader) = write_parts(tmp_path, records, [0.5]), write(tmp_path / "all", records)
    deleted = BitMap(range(398))
    index = LexicalIndex([part for part, _ in written], deleted=deleted)
    assert index.search("胃痛", 1)[1].tolist() == [398, 399]
    assert index.search("胃痛", 3)[1].tolist() == [398, 399, 400, 401, 402]
    selection = Selection(reader, reader.check({"n": {"gte": 100}}))
    assert index.search("胃痛", 5, selection)[1].tolist() == [398, 399]
    none = LexicalIndex([part for part, _ in written], deleted=BitMap(range(403)))
    assert none.search("胃痛", 5)[1].tolist() == []


class _Committing:
    """An index of Tantivy whose writer ends a segment after each third document."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._index = _INDEX(*args, **options)
        self._added = 0

    def writer(self, **options: Any) -> "_Committing":
        self._writer = self._index.writer(**options)
        return self

    def add_document(self, document: tantivy.Document) -> None:
        self._writer.add_document(document)
        self._added += 1
        if self._added % 3 == 0:
            self._writer.commit()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def test_a_part_can_have_several_segments_of_tantivy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Record] = [(f"胃痛{word}", {}) for word in WORDS]
    whole = LexicalIndex([write(tmp_path / "whole", records)[0]])
    with monkeypatch.context() as patch:
        patch.setattr("stores.lexical.tantivy.Index", _Committing)
        first, _ = write(tmp_path / "first", records[:8])
    assert len({Path(name).stem for name in first.component.files}) == 4  # with meta.json
    parts = [first, write(tmp_path / "second", records[8:])[0]]
    for query in ("胃痛", *WORDS):
        found = lists(LexicalIndex(parts).search(query, 20))
        assert sorted(zip(*found, strict=True)) == sorted(
            zip(*lists(whole.search(query, 20)), strict=True)
        )


@pytest.fixture
def positional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Part, FilterReader]:
    """A full text as release 0.1.0 wrote it, with positions instead of hashes."""
    records: list[Record] = [
        (f"胃痛{word}", {"科室": ["内科", word], "year": 2000 + row, "new": row % 2 == 0})
        for row, word in enumerate(WORDS)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(FilterReader, "hashes", lambda self: np.arange(len(self._table)).astype("S"))
        part, reader = write(tmp_path / "positional", records)
    component = part.component.model_copy(update={"settings": {"names": True}})
    return replace(part, component=component), reader


@pytest.mark.parametrize(
    ("filter_", "rows"),
    [
        ({"科室": "反酸"}, [1]),
        ({"科室": {"not": ["反酸", "头痛"]}}, [0, 2, *range(4, 11)]),
        ({"year": {"gte": 2003, "lt": 2006}, "new": True}, [4]),
        ({"科室": ["内科"], "year": 2002.0}, [2]),
    ],
)
def test_full_text_of_an_older_release_is_filtered_by_positions(
    positional: tuple[Part, FilterReader], filter_: Mapping[str, Any], rows: list[int]
) -> None:
    part, reader = positional
    assert not is_current(part.component)
    selection = Selection(reader, reader.check(filter_))
    found = LexicalIndex([part]).search("胃痛", 20, selection)[1]
    assert sorted(found.tolist()) == rows


def test_full_text_of_an_older_release_is_not_searched_with_other_parts(
    positional: tuple[Part, FilterReader], tmp_path: Path
) -> None:
    part, _ = write(tmp_path / "part", [("胃痛", {})])
    assert is_current(part.component)
    for parts in ([positional[0], part], [part, positional[0]]):
        with raises(IndexVersionError, "unreadable_full_text") as caught:
            LexicalIndex(parts)
        assert str(positional[0].folder) in str(caught.value)


@pytest.mark.parametrize("damage", ["meta", "file", "count", "format"])
def test_an_error_names_the_part(tmp_path: Path, damage: str) -> None:
    parts = [write(tmp_path / name, [("胃痛", {})])[0] for name in ("one", "two", "three")]
    folder = parts[1].folder / FULL_TEXT
    if damage == "meta":
        (folder / "meta.json").write_text("{}")
    elif damage == "file":
        next(folder.glob("*.term")).write_bytes(b"")
    elif damage == "count":
        parts[1] = replace(parts[1], count=2)
    else:
        component = parts[1].component.model_copy(update={"format": 2})
        parts[1] = replace(parts[1], component=component)
    with raises(IndexVersionError, "unreadable_full_text") as caught:
        LexicalIndex(parts)
    assert str(folder) in str(caught.value)


def test_hashes_are_the_same_in_all_releases() -> None:
    assert hash_value("科室", "内科") == "-PSeBvr2s4WIp4WY"
    assert hash_value("year", 1) == hash_value("year", 1.0) != hash_value("year", "1")
    assert hash_value("a", True) != hash_value("a", 1)
