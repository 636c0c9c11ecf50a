import pytest

from core.yaml_text import parse_yaml


def test_values_are_plain() -> None:
    assert parse_yaml("a: [1, 头痛]\nb: {c: null}") == {"a": [1, "头痛"], "b": {"c": None}}
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        "[" * 100_000,
        "1" * 10_000,
        "2026-99-99",
        "\0",
        "!!python/object/apply:os.getcwd []",
    ],
    ids=["open", "deep", "long number", "no date", "control", "object"],
)
def test_other_texts_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)
