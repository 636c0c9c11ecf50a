import json
from collections import Counter
from pathlib import Path

import pytest

from evaluation.beir import Qrels, beir_paths, read_qrels, read_queries

SAMPLE = Path(__file__).parents[1] / "data" / "sample"


def read_all_qrels() -> Qrels:
    train, test = (read_qrels(beir_paths(SAMPLE, split).qrels) for split in ("train", "test"))
    assert not train.keys() & test.keys()
    return train | test


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, object]]:
    lines = (SAMPLE / "corpus.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_there_are_enough_passages_over_enough_departments(corpus: list[dict]) -> None:
    departments = Counter(record["metadata"]["department"] for record in corpus)
    assert len(corpus) >= 300
    assert len(departments) >= 11
    assert min(departments.values()) >= 10


@pytest.mark.parametrize("field", ["_id", "title", "text"])
def test_no_two_passages_share_an_id_a_title_or_a_text(corpus: list[dict], field: str) -> None:
    assert max(Counter(record[field] for record in corpus).values()) == 1


def test_passages_have_80_to_250_characters(corpus: list[dict]) -> None:
    assert all(80 <= len(record["text"]) <= 250 for record in corpus)


def test_every_question_has_a_passage_that_answers_it(corpus: list[dict]) -> None:
    queries, qrels = read_queries(SAMPLE / "queries.jsonl"), read_all_qrels()
    assert len(queries) == 90
    assert len(set(queries.values())) == 90
    assert qrels.keys() == queries.keys()
    assert all(max(grades.values()) == 2 for grades in qrels.values())


def test_every_judged_passage_exists(corpus: list[dict]) -> None:
    ids = {record["_id"] for record in corpus}
    for grades in read_all_qrels().values():
        assert grades.keys() <= ids
        assert set(grades.values()) <= {1, 2}
