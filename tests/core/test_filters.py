import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import filter_rows, filter_table, filters
from core.conditions import COMPARISONS, parse_filter
from core.errors import IndexVersionError, QueryError
from core.filters import FilterReader, FilterWriter, Selection, filter_values
from core.types import Filter, RowArray
from tests.errors import raises

# Few distinct values, so that documents share them; "1", 1 and True are three values, 1 and 1.0
# are one, and the three integers from 2^53 on are two floats.
FIELDS = st.sampled_from(["a", "b", "科室"])
BIG = [2**53, 2**53 + 1, 2**53 + 2, 2**70]
NUMBERS = st.sampled_from([1, 0, -1, 10, 9, 1.0, 0.5, -0.5, 1e-7, 1e22, -0.0, *BIG])
VALUES = NUMBERS | st.sampled_from(["1", True, "true", False, "", "内科", "2019"])
UNFILTERED = st.none() | st.just(math.nan) | st.just(math.inf) | st.just({"x": 1})
METADATA = st.dictionaries(FIELDS, VALUES | UNFILTERED | st.lists(VALUES | UNFILTERED, max_size=3))
ACCEPTED = VALUES | st.lists(VALUES | st.just("absent"), min_size=1, max_size=4)
BOUNDS = {name: NUMBERS | st.floats(-20, 20) for name in COMPARISONS}
CONDITIONS = ACCEPTED | st.fixed_dictionaries({}, optional={**BOUNDS, "not": ACCEPTED}).filter(bool)
FILTERS = st.dictionaries(FIELDS, CONDITIONS)


def write(path: Path, metadata: Sequence[Mapping[str, Any]]) -> FilterWriter:
    with FilterWriter(path) as writer:
        for row, values in enumerate(metadata):
            writer.add(row, values)
    return writer


def open_reader(path: Path, metadata: Sequence[Mapping[str, Any]]) -> FilterReader:
    return FilterReader(path, write(path, metadata).fields(), len(metadata))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def naive_match(own: Sequence[Any], condition: Any) -> bool:
    def any_of(accepted: Any) -> bool:
        # Numbers are compared as numbers; text and booleans only with their own type.
        return any(
            value == other
            and (type(value) is type(other) or is_number(value) is is_number(other) is True)
            for value in own
            for other in as_list(accepted)
        )

    if not isinstance(condition, dict):
        return any_of(condition)
    bounds = {name: bound for name, bound in condition.items() if name != "not"}
    numbers = [value for value in own if is_number(value) and math.isfinite(value)]
    within = [n for n in numbers if all(COMPARISONS[name](n, b) for name, b in bounds.items())]
    return (not bounds or bool(within)) and not ("not" in condition and any_of(condition["not"]))


def naive_rows(metadata: Sequence[Mapping[str, Any]], filter_: Filter) -> list[int]:
    return [
        row
        for row, values in enumerate(metadata)
        if all(naive_match(as_list(values.get(f, [])), one) for f, one in filter_.items())
    ]


def matching(reader: FilterReader, filter_: Filter) -> RowArray:
    return reader.rows(reader.check(filter_))


def known_part(reader: FilterReader, filter_: Filter) -> Filter:
    """Returns the conditions that do not raise an error for this index."""
    known = {}
    for field, condition in filter_.items():
        with suppress(QueryError):
            reader.check({field: condition})
            known[field] = condition
    return known


@pytest.mark.e2e
@given(st.lists(METADATA, min_size=1, max_size=12), FILTERS)
def test_labels_match_the_values_of_rows(
    metadata: list[dict[str, Any]], filter_: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        reader = open_reader(Path(folder, "filters.arrow"), metadata)
        known = known_part(reader, filter_)
        places, labels = reader.labels_of_rows()
        of_row = [set(labels[a:b]) for a, b in pairwise(places)]
        wanted = reader.requirements(reader.check(known))
        found = [
            row
            for row, own in enumerate(of_row)
            if all(bool(own & set(one.labels)) != one.excluded for one in wanted)
        ]
        assert found == naive_rows(metadata, known)
        assert len(labels) == sum(len(own) for own in of_row)
        assert set(labels) == set(range(sum(reader.fields.values())))


def test_a_value_that_no_document_has_excludes_nothing(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "filters.arrow", [{"a": "x"}, {}])
    assert reader.requirements(reader.check({"a": {"not": "y"}})) == []
    rows = matching(reader, {"a": {"not": "y"}})
    assert rows.tolist() == [0, 1]


@pytest.mark.e2e
@given(
    st.lists(METADATA, max_size=12),
    FILTERS,
    st.sampled_from([1, 2, 65_536]),
    st.sampled_from([0, 0.3, 1]),
    st.sampled_from([0, 256]),
    st.sampled_from([0, 0.2, 2]),
)
def test_rows_equal_those_of_a_scan_of_all_documents(
    metadata: list[dict[str, Any]],
    filter_: Filter,
    batch: int,
    few: float,
    runs: int,
    frequent: float,
) -> None:
    """With each way to find rows: as a bitmap or as a mask, in one batch or several."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_BATCH_VALUES", batch)
        patch.setattr(filter_rows, "_FEW", few)
        patch.setattr(filter_rows, "_FREQUENT", frequent)
        patch.setattr(filter_rows, "_JOINED", 2)
        patch.setattr(filter_table, "_MANY_RUNS", runs)
        patch.setattr(filter_table, "_READ_ROWS", 2)
        reader = open_reader(Path(folder) / "f.arrow", metadata)
        known = known_part(reader, filter_)
        rows = matching(reader, known)
        again = matching(reader, known)
    assert rows.tolist() == naive_rows(metadata, known)
    assert again is rows


@pytest.mark.e2e
@given(st.lists(METADATA, min_size=1, max_size=12), FILTERS, FILTERS)
def test_two_filters_may_require_of_one_field(
    metadata: list[dict[str, Any]], one: Filter, other: Filter
) -> None:
    """A selection by both is what both select, in any order, and the same one."""
    with TemporaryDirectory() as folder:
        reader = open_reader(Path(folder) / "f.arrow", metadata)
        first, second = (reader.check(known_part(reader, each)) for each in (one, other))
        both = first & second
        assert both == second & first == both & first
        expected = set(reader.rows(first)) & set(reader.rows(second))
        assert Selection(reader, both).rows().tolist() == sorted(expected)


@pytest.mark.parametrize(("value", "row"), [("1", 0), (1, 1), (True, 2), ("true", 3)])
def test_equal_values_of_different_types_are_distinct(
    tmp_path: Path, value: str | int | bool, row: int
) -> None:
    metadata = [{"f": "1"}, {"f": 1}, {"f": True}, {"f": "true"}]
    rows = matching(open_reader(tmp_path / "f.arrow", metadata), {"f": [value]})
    assert rows.tolist() == [row]


@pytest.mark.e2e
def test_thousands_of_values_are_found(tmp_path: Path) -> None:
    metadata = [{"n": i, "s": f"值{i}", "parity": i % 2} for i in range(70_000)]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    assert reader.fields == {"n": 70_000, "parity": 2, "s": 70_000}
    for row in (0, 1, 9999, 65_535, 65_536, 69_999):
        rows = matching(reader, {"n": [row], "s": [f"值{row}", "值0"], "parity": [0, 1]})
        assert rows.tolist() == [row]


@pytest.mark.e2e
@given(
    st.lists(METADATA, max_size=12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([1, 6, 1 << 25]),
)
def test_many_runs_give_the_same_table_as_one(
    metadata: list[dict[str, Any]], held: int, batch: int, chars: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        whole = open_reader(Path(folder) / "whole", metadata)
        patch.setattr(filters, "_BUFFERED_ROWS", held)
        patch.setattr(filters, "_BATCH_VALUES", batch)
        patch.setattr(filters, "_BATCH_CHARS", chars)
        patch.setattr(filters, "_READ_VALUES", 2)
        merged = open_reader(Path(folder) / "merged", metadata)
        assert merged.fields == whole.fields
        assert merged._table.to_pylist() == whole._table.to_pylist()
        assert sorted(path.name for path in Path(folder).iterdir()) == ["merged", "whole"]


def test_many_values_are_written_as_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_BUFFERED_VALUES", 3)
    metadata = [{"n": i % 7, "s": "甲"} for i in range(50)]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    assert reader.fields == {"n": 7, "s": 1}
    rows = matching(reader, {"n": [3], "s": ["甲"]})
    assert rows.tolist() == list(range(3, 50, 7))


def test_long_values_are_written_in_bounded_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_BATCH_CHARS", 1_000)
    monkeypatch.setattr(filters, "_READ_CHARS", 100)
    metadata = [{"f": f"{i % 40:02}" + "甲" * 300} for i in range(50)]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    batches = reader._table.to_batches()
    assert len(batches) == 10  # of four values with 304 characters, as JSON
    rows = matching(reader, {"f": [metadata[7]["f"]]})
    assert rows.tolist() == [7, 47]


def test_after_an_error_the_runs_are_deleted(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), FilterWriter(tmp_path / "f.arrow") as writer:
        writer.add(0, {"a": 1})
        raise RuntimeError("stop")
    assert not list(tmp_path.glob(".*"))


def test_the_most_frequent_values_come_first(tmp_path: Path) -> None:
    metadata = [{"f": v, "g": 0} for v in ["b", "a", "c", "a", "b", "a", True]]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    listed = reader.frequent_values()
    assert listed.keys() == {"f", "g"}
    assert listed["f"][:2] == [("a", 3), ("b", 2)]
    assert set(listed["f"]) == {("a", 3), ("b", 2), ("c", 1), (True, 1)}
    assert reader.counts({"f": ["a", 1, "x"], "none": [0]}) == {"f": [("a", 3)], "none": []}


def test_an_unknown_field_is_an_error_that_names_the_known_fields(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "f.arrow", [{"year": 1, "department": "a"}])
    with raises(QueryError, "unknown_filter_field", field="filter.doctor") as caught:
        matching(reader, {"department": ["a"], "doctor": ["b"]})
    assert caught.value.field == "filter.doctor"


def test_an_index_without_metadata_has_no_filter_fields(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "f.arrow", [{}, {"only": None}])
    with raises(QueryError, "unknown_filter_field", field="filter.only"):
        reader.check({"only": [1]})


@pytest.mark.e2e
def test_broad_filters_cost_little(tmp_path: Path) -> None:
    """15 fields × 100 values of 20,000 rows took 4 s while values were repeated."""
    count, fields = 20_000, [f"f{i}" for i in range(15)]
    metadata = [dict.fromkeys(fields, f"值{row % 15}") for row in range(count)]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    filter_ = {field: [f"值{i % 15}" for i in range(100)] for field in fields}
    started = time.thread_time()
    rows = matching(reader, filter_)
    assert time.thread_time() - started < 1
    assert len(rows) == count


def test_a_filter_ends_at_the_check(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "f.arrow", [{"a": i % 5, "b": i % 3} for i in range(100)])
    filters_ = [{"a": [1, 2], "b": [0, 1]}, {"a": {"gt": 1}}, {"b": {"not": [1]}}]
    for filter_ in filters_:
        with pytest.raises(ZeroDivisionError):
            reader.rows(reader.check(filter_), lambda: 1 / 0)
        rows = matching(reader, filter_)
        assert len(rows) > 0


def test_many_fields_are_listed_in_part(tmp_path: Path) -> None:
    metadata = [{f"f{i:05}": i for i in range(20_000)} | {"x" * 201: 1}]
    reader = open_reader(tmp_path / "f.arrow", metadata)
    assert list(reader.frequent_values()) == [f"f{i:05}" for i in range(100)]
    with raises(QueryError, "unknown_filter_field", field="filter.g") as caught:
        reader.check({"g": 1})
    assert len(str(caught.value)) < 1_000
    rows = matching(reader, {"f19999": [19_999], "f00000": 0})
    assert rows.tolist() == [0]


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.arrow"
    fields = write(path, [{"a": 1, "b": ["x", "y"]}]).fields()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with raises(IndexVersionError, "unreadable_filters", path=path):
            FilterReader(path, fields, 1)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with raises(IndexVersionError, "unreadable_filters", path=tmp_path / "none.arrow"):
        FilterReader(tmp_path / "none.arrow", {}, 0)


@pytest.mark.parametrize("fields", [{}, {"a": 2}, {"a": 1, "b": 1}])
def test_a_file_of_another_index_is_an_error(tmp_path: Path, fields: dict[str, int]) -> None:
    write(tmp_path / "f.arrow", [{"a": 1}])
    with raises(IndexVersionError, "unreadable_filters"):
        FilterReader(tmp_path / "f.arrow", fields, 1)


def test_values_are_stored_as_unescaped_json(tmp_path: Path) -> None:
    write(tmp_path / "f.arrow", [{"科室": "儿科"}])
    assert json.dumps("儿科", ensure_ascii=False).encode() in (tmp_path / "f.arrow").read_bytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("儿科", {'"儿科"'}),
        ([1, 1.0, "1", True], {"1", '"1"', "true"}),
        (0.5, {"0.5"}),
        ([math.inf, math.nan, None, {"a": 1}, []], set()),
        (None, set()),
        ({"a": 1}, set()),
    ],
)
def test_metadata_has_the_values_that_filters_know(value: object, expected: set[str]) -> None:
    assert filter_values(value) == expected


@given(st.lists(METADATA, min_size=1, max_size=20), FILTERS, FILTERS.filter(bool))
def test_conditions_within_others_match_what_both_match(
    metadata: list[dict[str, Any]], filter_: Filter, within: Filter
) -> None:
    with TemporaryDirectory() as folder:
        reader = open_reader(Path(folder) / "f.arrow", metadata)
        bounds = parse_filter(within)
        expected = set(naive_rows(metadata, filter_)) & set(naive_rows(metadata, within))
        if reader.lacking(bounds):
            expected = set()
        rows = reader.rows(reader.check(filter_, bounds))
        assert set(rows.tolist()) == expected


@given(st.lists(METADATA, min_size=1, max_size=20), st.data())
def test_the_values_of_rows_are_those_of_an_index_of_these_rows(
    metadata: list[dict[str, Any]], data: st.DataObject
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, len(metadata) - 1))))
    with TemporaryDirectory() as folder:
        reader = open_reader(Path(folder) / "f.arrow", metadata)
        alone = open_reader(Path(folder) / "alone.arrow", [metadata[row] for row in rows])
        found, fields = reader.values_within(np.array(rows, np.int64))
        assert found == alone.frequent_values()
        assert fields == len(alone.fields)


def test_within_others_a_field_of_no_document_is_no_error(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "f.arrow", [{"a": 1, "b": "x"}, {"a": 2}])
    within = parse_filter({"a": [1, 2]})
    for filter_ in ({"none": 1}, {"none": {"gt": 0}}, {"b": {"gt": 0}}):
        assert reader.rows(reader.check(filter_, within)).tolist() == []
    assert reader.rows(reader.check({"none": {"not": [1]}}, within)).tolist() == [0, 1]
    with raises(QueryError, "invalid_filter", field="filter.a"):
        reader.check({"a": None}, within)  # type: ignore[dict-item]


def test_bounds_of_a_field_that_no_document_has_match_nothing(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "f.arrow", [{"a": 1}, {"a": 2}])
    for within in ({"none": {"not": [1]}}, {"a": [1, 2], "none": {"not": [1]}}):
        assert reader.rows(reader.check({}, parse_filter(within))).tolist() == []
