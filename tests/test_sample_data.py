import json
from collections import Counter
from pathlib import Path

import pytest

from core.sentences import sentences
from evaluation.beir import Qrels, beir_paths, read_qrels, read_queries

SAMPLE = Path(__file__).parents[1] / "data" / "sample"


SPLITS = {"train": 40, "dev": 40, "test": 30}


def read_all_qrels() -> Qrels:
    qrels: Qrels = {}
    for split in SPLITS:
        qrels |= read_qrels(beir_paths(SAMPLE, split).qrels)
    return qrels


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, object]]:
    lines = (SAMPLE / "corpus.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_sample_has_enough_passages_and_departments(corpus: list[dict]) -> None:
    departments = Counter(record["metadata"]["department"] for record in corpus)
    assert len(corpus) >= 300
    assert len(departments) >= 11
    assert min(departments.values()) >= 10


@pytest.mark.parametrize("field", ["_id", "title", "text"])
def test_ids_titles_and_texts_of_passages_are_unique(corpus: list[dict], field: str) -> None:
    assert max(Counter(record[field] for record in corpus).values()) == 1


def test_passages_have_80_to_250_characters(corpus: list[dict]) -> None:
    assert all(80 <= len(record["text"]) <= 250 for record in corpus)


def test_no_question_is_in_two_splits() -> None:
    for split, count in SPLITS.items():
        assert len(read_qrels(beir_paths(SAMPLE, split).qrels)) == count
    assert len(read_all_qrels()) == sum(SPLITS.values())


def test_the_questions_of_dev_are_of_all_departments(corpus: list[dict]) -> None:
    departments = {record["_id"]: record["metadata"]["department"] for record in corpus}
    dev = read_qrels(beir_paths(SAMPLE, "dev").qrels).values()
    answers = {id_ for grades in dev for id_, grade in grades.items() if grade == 2}
    assert {departments[id_] for id_ in answers} == set(departments.values())


def test_every_question_has_a_relevant_passage(corpus: list[dict]) -> None:
    queries, qrels = read_queries(SAMPLE / "queries.jsonl"), read_all_qrels()
    assert len(queries) == len(set(queries.values())) == 110
    assert qrels.keys() == queries.keys()
    assert all(max(grades.values()) == 2 for grades in qrels.values())


def test_every_judged_passage_exists(corpus: list[dict]) -> None:
    ids = {record["_id"] for record in corpus}
    for grades in read_all_qrels().values():
        assert grades.keys() <= ids
        assert set(grades.values()) <= {1, 2}


def test_evidence_marks_whole_sentences_of_passages_that_answer(corpus: list[dict]) -> None:
    """At most half of a passage's sentences, and in a passage of at least three."""
    texts = {record["_id"]: record["text"] for record in corpus}
    qrels = read_all_qrels()
    lines = (SAMPLE / "evidence.jsonl").read_text("utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    assert len({(item["query-id"], item["corpus-id"]) for item in items}) == len(items) == 116
    for item in items:
        assert qrels[item["query-id"]][item["corpus-id"]] == 2
        spans = sentences(texts[item["corpus-id"]])
        marked = [(start, end) for start, end in item["sentences"]]
        assert len(spans) >= 3
        assert 1 <= len(marked) <= len(spans) / 2
        assert marked == sorted(set(marked) & set(spans))


def test_evidence_of_real_answers_has_ids_and_offsets() -> None:
    path = SAMPLE.parent / "medical-qa-zh-evidence" / "evidence.jsonl"
    items = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({item["query-id"] for item in items}) == len(items) == 38
    for item in items:
        assert item["query-id"].startswith("train-t")
        assert item["corpus-id"].startswith("t")
        offsets = [at for span in item["sentences"] for at in span]
        assert len(offsets) % 2 == 0
        assert offsets == sorted(offsets)
        assert 0 <= offsets[0] < offsets[-1] <= item["characters"]
