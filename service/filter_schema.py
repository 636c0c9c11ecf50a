"""The `filter` field of requests as it is documented; `core/conditions.py` checks it."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from core.conditions import MAX_FIELDS, MAX_TEXT_CHARS, MAX_VALUES

FilterItem = str | int | float | bool
_Item = Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | float | bool
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_VALUES)]


class FilterConditions(BaseModel):
    """Conditions of a field; those that are given must all hold."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=lambda schema: _all_optional(schema)
    )

    gt: float = Field(description="A number of the document is greater.")
    gte: float = Field(description="A number of the document is greater or equal.")
    lt: float = Field(description="A number of the document is less.")
    lte: float = Field(description="A number of the document is less or equal.")
    excluded: _Item | _Items = Field(
        alias="not",
        description="No value of the document is this one, or in this list. Documents without the "
        "field match.",
    )


def _all_optional(schema: dict[str, object]) -> None:
    del schema["required"]
    schema["minProperties"] = 1


# Nothing is validated here, so that the same checks and errors apply over HTTP and in Python.
FilterField = Annotated[
    dict[str, Any],
    PlainValidator(
        lambda filter_: filter_,
        json_schema_input_type=dict[str, _Item | _Items | FilterConditions],
    ),
    Field(
        json_schema_extra={"maxProperties": MAX_FIELDS},
        description="Conditions by metadata field; a document matches if all hold. A value or a "
        "list of values: the document has one of them. An object: numbers by `gt`, `gte`, `lt` and "
        "`lte`, and excluded values by `not`.",
        examples=[
            {"department": "心血管科"},
            {"department": ["心血管科", "内分泌科"], "year": {"gte": 2019, "lt": 2024}},
            {"department": {"not": ["儿科"]}},
        ],
    ),
]
