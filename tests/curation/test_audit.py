import csv
import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from core.records import Triple
from curation.benchmark import annotate, audit
from curation.config import AnnotationConfig, AuditConfig
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import endpoint, read_question, scripted_server
from tests.curation.judges import IDS, THREE, lines, run
from tests.errors import raises
from training.data import read_examples
from training.schema import DataEntry


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


def test_annotation_makes_triples(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IDS, "党参", "q3")
    texts = QUERIES | {"q3": "党参"}
    write_jsonl(facts["queries"], [{"_id": id_, "text": text} for id_, text in texts.items()])
    statistics, _ = run(AnnotationConfig, annotate, facts, "first")
    (triple,) = lines(facts["output"] / "triples.jsonl")
    assert triple["query"] == QUERIES["q1"]
    assert set(triple["positives"]) == {DOCUMENTS["d1"], DOCUMENTS["d5"]}
    assert triple["negatives"] == [DOCUMENTS["d2"]]
    # For q2 BM25 finds only its answer; q3 has no answer.
    assert (statistics["no_negative"], statistics["no_positive"]) == (1, 1)
    assert (statistics["queries"], statistics["triples"], statistics["negatives"]) == (3, 1, 1)


def test_training_reads_triples_of_a_corpus_with_duplicates(facts: dict[str, Any]) -> None:
    texts = DOCUMENTS | {"d6": DOCUMENTS["d1"], "d7": DOCUMENTS["d2"]}
    write_jsonl(facts["corpus"], [{"_id": id_, "text": text} for id_, text in texts.items()])

    def respond(body: Any, *_: object) -> str:
        """Grades the same text as relevant in one call, and as not relevant in the next."""
        _, passages = read_question(body)
        first = {text: name for name, text in reversed(passages.items())}
        answers = first.get(DOCUMENTS["d1"])
        return json.dumps({name: "A" if name == answers else "C" for name in passages})

    with scripted_server(respond) as url:
        facts |= {"judges": [endpoint(url)], "passages_per_call": 10}
        annotate(AnnotationConfig.model_validate(facts))
    path = facts["output"] / "triples.jsonl"
    examples, _ = read_examples([DataEntry(triples=str(path))], frozenset(), {})
    (example,) = examples
    assert example.positives == (DOCUMENTS["d1"],)
    assert set(example.negatives) == {DOCUMENTS["d2"], DOCUMENTS["d5"]}
    (row,) = lines(path)
    assert Triple(row["query"], tuple(row["positives"]), tuple(row["negatives"])) == example
