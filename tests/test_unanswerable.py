import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from evaluation.beir import read_queries

FOLDER = Path(__file__).parents[1] / "data" / "unanswerable"
FILES = {
    **{"other-fields": 60, "near": 200, "short": 220, "spoken": 220},
    **{"short-test": 133, "spoken-test": 160},
}


@pytest.mark.parametrize(("name", "count"), FILES.items())
def test_each_file_has_its_questions_with_a_kind(name: str, count: int) -> None:
    lines = (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines()
    kinds = Counter(json.loads(line)["metadata"]["kind"] for line in lines)
    assert len(read_queries(FOLDER / f"{name}.jsonl")) == len(lines) == kinds.total() == count
    assert len(kinds) >= 9


def test_no_two_questions_are_alike() -> None:
    queries: dict[str, str] = {}
    for name in FILES:
        queries |= read_queries(FOLDER / f"{name}.jsonl")
    assert len(queries) == sum(FILES.values())
    bigrams = [{text[at : at + 2] for at in range(len(text) - 1)} for text in queries.values()]
    assert max(len(a & b) / len(a | b) for a, b in combinations(bigrams, 2)) < 0.5


def test_no_question_is_one_of_the_sample() -> None:
    sample = read_queries(FOLDER.parent / "sample" / "queries.jsonl").values()
    for name in FILES:
        assert not set(sample) & set(read_queries(FOLDER / f"{name}.jsonl").values())
