import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import IndexVersionError
from core.filter_rows import Requirement
from stores.milvus.names import (
    COLLECTION,
    collection_name,
    head_name,
    labels_expression,
    read_collection,
    rows_expression,
    search_parameters,
    version_of,
)
from tests.errors import raises

VERSION = "20261121T143604.123456Z-0a1b2c3d"
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


def test_names_contain_index_and_version() -> None:
    assert head_name("sample") == "care_sample"
    assert collection_name("sample", VERSION) == "care_sample__20261121T143604_2e123456Z_2d0a1b2c3d"


@given(NAMES, NAMES)
def test_names_are_valid_in_milvus_and_the_version_round_trips(name: str, version: str) -> None:
    collection = collection_name(name, version)
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", collection)
    assert version_of(collection) == version


@given(NAMES, NAMES, NAMES)
def test_names_of_different_indexes_differ(one: str, other: str, version: str) -> None:
    same = one == other
    assert (head_name(one) == head_name(other)) == same
    assert (collection_name(one, version) == collection_name(other, version)) == same
    assert head_name(one) != collection_name(other, version)


def test_the_longest_name_fits() -> None:
    assert len(collection_name("-" * 64, VERSION)) <= 255


@pytest.mark.parametrize("name", ["care_sample", "sample__1", "care_sample__1-2"])
def test_other_collections_are_an_error(name: str) -> None:
    with raises(IndexVersionError, "foreign_collection"):
        version_of(name)


@pytest.mark.parametrize(
    "named", ["", "care_other__1", "care_sample", "care_sample_2dx__1", "customers", "\xff"]
)
def test_a_version_may_name_a_collection_of_its_own_index_only(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "sample" / ".1.tmp"
    folder.mkdir(parents=True)
    assert read_collection(folder) is None
    (folder / COLLECTION).write_text(f"{collection_name('sample', '1')}\n")
    assert read_collection(folder) == "care_sample__1"
    (folder / COLLECTION).write_text(named, encoding="latin-1")
    with raises(IndexVersionError, "foreign_collection", path=folder / COLLECTION):
        read_collection(folder)


def test_values_of_a_field_are_alternatives_and_fields_all_match() -> None:
    assert labels_expression([]) == ("", True)
    some, other = Requirement(np.array([1, 3])), Requirement(np.array([7]), excluded=True)
    expression = "array_contains_any(labels, [1, 3]) and not array_contains_any(labels, [7])"
    assert labels_expression([some, other]) == (expression, True)
    many = Requirement(np.arange(5_000))
    assert labels_expression([some, many, other]) == (expression, False)
    assert rows_expression([5, np.int64(2)]) == "row in [5, 2]"


def test_the_beam_is_at_least_as_wide_as_the_number_of_hits() -> None:
    assert search_parameters({}, 10) == {"metric_type": "IP", "params": {}}
    for depth, ef in ((10, 64), (100, 100), (65_536, 32_768)):
        assert search_parameters({"efSearch": 64}, depth)["params"] == {"ef": ef}
