import csv
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from curation.audit import audit
from curation.config import AuditConfig
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.judges import THREE, lines, run
from tests.errors import raises


def test_an_audit_finds_both_kinds_of_errors(facts: dict[str, Any], data: Path) -> None:
    facts |= {"qrels": data / "qrels/test.tsv"}
    statistics, _ = run(AuditConfig, audit, facts, "first", "second")
    rows = {row["query_id"]: row for row in lines(facts["output"] / "audit.jsonl")}
    # d3 shares no word with q1: it is judged because the benchmark calls it relevant.
    assert rows["q1"]["original_positives"] == ["d1", "d3"]
    assert rows["q1"]["judged_positives"] == ["d1", "d5"]
    assert rows["q1"]["false_positives"] == ["d3"]
    assert rows["q1"]["false_negatives"] == ["d5"]
    assert rows["q2"]["false_negatives"] == []
    assert (statistics["false_positives"], statistics["false_negatives"]) == (1, 1)
    names = "original_positives", "judged_positives", "false_positives", "false_negatives"
    assert [statistics["means"][name] for name in names] == [1.5, 1.5, 0.5, 0.5]
    # The paper counts in the pools alone; d3 is not in that of q1.
    assert [statistics["means_of_pools"][name] for name in names] == [1, 1.5, 0, 0.5]
    (found,) = lines(facts["output"] / "false-negatives.jsonl")
    assert (found["query"], found["text"]) == (QUERIES["q1"], DOCUMENTS["d5"])
    with (facts["output"] / "audit.csv").open(encoding="utf-8-sig", newline="") as file:
        table = {row["query_id"]: row for row in csv.DictReader(file)}
    assert table["q1"]["false_negatives_count"] == "1"
    assert table["q1"]["original_positives"] == "d1 d3"


@pytest.mark.e2e
def test_an_audit_lists_disputed_pairs(facts: dict[str, Any], data: Path) -> None:
    facts |= {"qrels": data / "qrels/test.tsv"}
    run(AuditConfig, audit, facts, *THREE)
    rows = {row["query_id"]: row for row in lines(facts["output"] / "audit.jsonl")}
    assert rows["q1"]["false_negatives"] == []
    assert rows["q1"]["disputed"] == ["d5"]


def test_an_audit_of_an_unknown_document_is_an_error(facts: dict[str, Any], data: Path) -> None:
    path = data / "qrels/test.tsv"
    path.write_text("q1\td9\t1\n", encoding="utf-8")
    with raises(DataError, code="unknown_document", path=path, id="d9"):
        run(AuditConfig, audit, facts | {"qrels": path}, "first")
