from pathlib import Path

import pytest

from core.errors import CareError
from evaluation.cmedteb.results import (
    TaskScore,
    compare,
    difference,
    markdown_table,
    read_score,
    read_scores,
    write_score,
)
from tests.errors import raises


def score(system: str, value: float, task: str = "retrieval", **changes: object) -> TaskScore:
    facts = {
        "system": system,
        "task": task,
        "measure": "nDCG@10",
        "value": value,
        "low": value,
        "high": value,
        "items": {"q1": value, "q2": value},
        "data_sha256": "0",
        "libraries": {},
    }
    return TaskScore.model_validate(facts | changes)


def test_a_score_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_score(tmp_path, score("a", 0.25))
    assert read_score(tmp_path / "a" / "retrieval.json") == score("a", 0.25)
    (tmp_path / "a" / "retrieval.json").write_text("{}", encoding="utf-8")
    with raises(CareError, code="not_score", path=tmp_path / "a" / "retrieval.json"):
        read_score(tmp_path / "a" / "retrieval.json")


def test_systems_are_sorted_by_tasks_then_by_mean(tmp_path: Path) -> None:
    for item in (
        score("b", 0.3),
        score("b", 0.3, "rerank"),
        score("a", 0.2),
        score("a", 0.2, "rerank"),
        score("c", 0.9),
    ):
        write_score(tmp_path, item)
    scores = read_scores(tmp_path)
    assert list(scores) == ["b", "a", "c"]
    rows = [line.split(" ")[1] for line in markdown_table(scores).splitlines()[2:5]]
    assert rows == ["b", "a", "c"]


def test_systems_scored_on_other_data(tmp_path: Path) -> None:
    one, other = score("a", 0.2), score("b", 0.3, data_sha256="1")
    with raises(CareError, code="different_data", task="retrieval"):
        difference(one, other)
    for item in (one, other):
        write_score(tmp_path, item)
    with raises(CareError, code="different_data", task="retrieval"):
        read_scores(tmp_path)


def test_the_difference_of_two_systems() -> None:
    first = {"retrieval": score("a", 0.5, items={"q1": 0.4, "q2": 0.6})}
    second = {"retrieval": score("b", 0.25, items={"q2": 0.5, "q1": 0.0})}
    assert difference(first["retrieval"], second["retrieval"]).value == pytest.approx(0.25)
    assert "+25.00" in compare(first, second)
    with raises(CareError, code="no_shared_task"):
        compare(first, {"rerank": score("b", 0.25, "rerank")})


def test_a_folder_without_scores(tmp_path: Path) -> None:
    with raises(CareError, code="no_scores", path=tmp_path):
        read_scores(tmp_path)
