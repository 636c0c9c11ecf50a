import json
from typing import Any

import pytest

from curation.annotation import annotate
from curation.config import AnnotationConfig
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import endpoint, read_question, scripted_server
from tests.curation.judges import IDS, lines, run
from training.corpus import Example
from training.data import read_examples
from training.schema import DataEntry


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
    assert Example(row["query"], tuple(row["positives"]), tuple(row["negatives"])) == example
