from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from core.triples import Triple, read_triples
from tests.conftest import write_jsonl
from tests.errors import raises


def test_texts_are_normalised_and_documents_may_have_a_title(tmp_path: Path) -> None:
    document = {"title": "题", "text": "第1段"}
    records = [{"query": " 问  题 ", "positives": [document], "negatives": ["乙"]}, {"query": "问"}]
    path = write_jsonl(tmp_path / "t.jsonl", records)
    assert list(read_triples(path)) == [
        (1, Triple("问 题", ("题\n第1段",), ("乙",))),
        (2, Triple("问", ())),
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"query": " "}, "query"),
        ({"positives": "甲"}, "positives"),
        ({"positives": [{"title": "题"}]}, "positives"),
        ({"negatives": [""]}, "negatives"),
    ],
)
def test_empty_and_other_values_are_errors(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"query": "问", "positives": ["甲"]} | change])
    with raises(DataError, "bad_field", path=path, line=1, field=field):
        list(read_triples(path))
