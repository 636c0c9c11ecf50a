import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.conditions import parse_filter
from core.errors import QueryError
from tests.errors import raises

VALUES = st.text(max_size=3) | st.integers() | st.floats(-9, 9) | st.booleans()
LISTS = st.lists(VALUES, min_size=1, max_size=9)


def canonical(filter_: Any) -> str:
    return json.dumps(parse_filter(filter_).as_json())


@given(st.dictionaries(st.text(max_size=3), LISTS, max_size=4), st.randoms())
def test_order_and_repetition_do_not_matter(filter_: dict[str, list[Any]], random: Any) -> None:
    items = [(field, [*values, random.choice(values)]) for field, values in filter_.items()]
    random.shuffle(items)
    for _, values in items:
        random.shuffle(values)
    assert canonical(dict(items)) == canonical(filter_)
    excluding = {field: {"not": values} for field, values in filter_.items()}
    assert canonical({field: {"not": values} for field, values in items}) == canonical(excluding)
    assert not filter_ or canonical(excluding) != canonical(filter_)


@pytest.mark.parametrize(
    "equal",
    [
        ("儿科", ["儿科"], ["儿科", "儿科"]),
        (1, 1.0, [1, 1.0]),
        (0, -0.0),
        (True, [True]),
        ({"not": "儿科"}, {"not": ["儿科"]}),
        ({"gte": 2019, "lt": 2024.0}, {"lt": 2024, "gte": 2019.0}),
    ],
)
def test_conditions_that_mean_the_same_are_equal(equal: tuple[Any, ...]) -> None:
    assert len({canonical({"f": condition}) for condition in equal}) == 1


def test_conditions_that_mean_something_else_differ() -> None:
    others = ["1", 1, True, 1.5, {"gt": 1}, {"gte": 1}, {"lt": 1}, {"lte": 1}, {"not": 1}]
    others += [{"not": "1"}, {"not": True}, {"gt": 1, "lt": 2}, {"gt": 1, "not": 2}]
    assert len({canonical({"f": condition}) for condition in others}) == len(others)


@pytest.mark.parametrize(
    "condition",
    [
        *(None, [], {}, [None], [[1]], [{}], {"not": []}, {"not": None}, {"not": {"gt": 1}}),
        *({"gte": "1"}, {"gte": True}, {"gte": None}, {"gte": [1]}, {"between": [1, 2]}),
        *({"gte": math.nan}, {"lt": math.inf}, math.nan, [-math.inf], 10**400),
    ],
)
def test_a_malformed_condition_is_an_error_that_names_the_field(condition: Any) -> None:
    with raises(QueryError, "invalid_filter", field="filter.year"):
        parse_filter({"department": "儿科", "year": condition})


@pytest.mark.parametrize("filter_", [None, [], "a", 1, [["year", 1]], {1: [1]}])
def test_a_filter_that_is_no_object_is_an_error(filter_: Any) -> None:
    with raises(QueryError, "invalid_filter", field="filter"):
        parse_filter(filter_)


@pytest.mark.parametrize(
    ("filter_", "field", "limit"),
    [
        ({f"f{i}": "a" for i in range(17)}, "filter", 16),
        ({"f": list(range(101))}, "filter.f", 100),
        ({"f": {"not": list(range(101))}}, "filter.f", 100),
        ({"f": "a" * 1025}, "filter.f", 1024),
        ({"f" * 99: ["a" * 1025]}, "filter." + "f" * 64, 1024),
    ],
)
def test_a_filter_beyond_a_limit_is_an_error_that_names_it(
    filter_: Any, field: str, limit: int
) -> None:
    with raises(QueryError, "filter_too_large", field=field, limit=limit):
        parse_filter(filter_)


def test_a_filter_at_the_limits_is_accepted() -> None:
    values = [f"{i:04}" * 256 for i in range(100)]
    assert len(parse_filter({f"f{i}": values for i in range(16)}).conditions) == 16
