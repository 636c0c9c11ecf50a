"""The language of filters: what a user may require of each field, checked."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import QueryError
from core.types import Condition, Conjunction, Filter, FilterValue

# Fields of a filter that a user writes, values of a list, and characters of a text.
MAX_FIELDS = 16
MAX_VALUES = 100
MAX_TEXT_CHARS = 1024
# Characters of a field name in an error.
_SHOWN_CHARS = 64

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def parse_filter(filter_: Filter) -> Conjunction:
    """Returns the conditions of a filter that a user has written.

    Values are distinct and ordered, so that equal filters are equal. A float without a fraction is
    the same number as the integer; `"1"`, `1` and `true` are different values.

    Raises:
        QueryError: If the filter is malformed (code `invalid_filter`) or exceeds a limit
            (`filter_too_large`); `field` names the metadata field.
    """
    if not isinstance(filter_, Mapping) or not all(isinstance(field, str) for field in filter_):
        raise QueryError("filter", "is not an object of conditions by field", code="invalid_filter")
    if not filter_:
        return Conjunction()
    if len(filter_) > MAX_FIELDS:
        raise _too_large("filter", f"names {len(filter_)} fields", MAX_FIELDS)
    return Conjunction.of((field, _condition(field, filter_[field])) for field in filter_)


def filter_field(field: str) -> str:
    """Returns the path of a filter's field in errors."""
    return f"filter.{field[:_SHOWN_CHARS]}"


def _condition(field: str, condition: Any) -> Condition:
    if not isinstance(condition, Mapping):
        return Condition(accepted=_values(field, condition))
    if not condition or not condition.keys() <= {*COMPARISONS, "not"}:
        raise _invalid(
            field, f"is not an object of one or more of {', '.join(COMPARISONS)} and not"
        )
    return Condition(
        bounds=tuple(
            (key, _bound(field, condition[key])) for key in COMPARISONS if key in condition
        ),
        excluded=_values(field, condition["not"]) if "not" in condition else (),
    )


def _bound(field: str, bound: Any) -> float:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise _invalid(field, "has a bound that is not a number")
    return _number(field, bound)


def _values(field: str, given: Any) -> tuple[FilterValue, ...]:
    values = given if isinstance(given, list | tuple) else (given,)
    if not values:
        raise _invalid(field, "has an empty list of values")
    if len(values) > MAX_VALUES:
        raise _too_large(filter_field(field), f"has {len(values)} values", MAX_VALUES)
    texts, numbers, booleans = set(), set(), set()
    for value in values:
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, bool):
            booleans.add(value)
        elif isinstance(value, int | float):
            numbers.add(_number(field, value))
        else:
            raise _invalid(field, "has a value that is not text, a number or a boolean")
    if texts and (longest := max(map(len, texts))) > MAX_TEXT_CHARS:
        raise _too_large(filter_field(field), f"has {longest} characters", MAX_TEXT_CHARS)
    return (*sorted(texts), *sorted(numbers), *sorted(booleans))


def _number(field: str, number: float) -> float:
    try:
        finite = math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        finite = False
    if not finite:
        raise _invalid(field, "has a number that is not finite or too large")
    return canonical_number(number)


def canonical_number(number: float) -> float:
    """Returns a finite number, as an integer if it has no fraction."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _invalid(field: str, message: str) -> QueryError:
    return QueryError(filter_field(field), message, code="invalid_filter")


def _too_large(field: str, message: str, limit: int) -> QueryError:
    message = f"{message}; the limit is {limit}"
    return QueryError(field, message, code="filter_too_large", limit=limit)
