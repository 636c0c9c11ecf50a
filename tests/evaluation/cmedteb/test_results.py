from pathlib import Path

import pytest

from core.errors import CareError
from evaluation.cmedteb.results import (
    TaskScore,
    compare,
    difference,
    html_report,
    low_queries,
    markdown_table,
    read_score,
    read_scores,
    write_score,
)
from evaluation.cmedteb.tasks import RankingData, find_tasks, task
from evaluation.metrics import write_run
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


DATA = RankingData(
    corpus={"d": "<script>头痛</script>", "e": "骨折"},
    queries={"q": "头痛", "r": "<b>其他</b>", "s": "咳嗽"},
    qrels={"q": {"d": 1}, "r": {"e": 1}, "s": {"e": 1}},
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_score(tmp_path, score("bm25", 1 / 3, items={"q": 1.0, "r": 0.0, "s": 0.0}))
    # r retrieves documents without judgements, s retrieves none.
    write_run(tmp_path / "bm25" / "retrieval.trec", {"q": {"d": 1.5}, "r": {"d": 0.5}}, "bm25")
    return tmp_path


def test_the_report_of_incomplete_data(out: Path) -> None:
    html = html_report(out, {task("retrieval"): lambda: DATA}, failures=5)
    assert html.count("<details>") == 2 and html.count("<svg") == 1
    assert "&lt;b&gt;其他&lt;/b&gt;" in html
    assert "&lt;script&gt;头痛" in html and "<script>" not in html


def test_low_queries_are_shown_and_good_ones_are_not() -> None:
    values = {f"q{i}": i / 10 for i in range(10)}
    data = RankingData({"d": "t"}, dict.fromkeys(values, "t"), {id_: {"d": 1} for id_ in values})
    shown = low_queries(score("x", 0.45, items=values), {}, data, count=50)
    assert [query.score for query in shown] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert [query.relevant[0].rank for query in shown] == [None] * 5
    assert [query.query_id for query in low_queries(score("x", 0, items=values), {}, data, 2)] == [
        *("q0", "q1")
    ]


def test_systems_are_listed_by_their_scores(out: Path) -> None:
    for name, value in (("aa", 0.1), ("zz", 0.9)):
        write_score(out, score(name, value, items={"q": value, "r": value, "s": value}))
        write_run(out / name / "retrieval.trec", {}, name)
    html = html_report(out, {task("retrieval"): lambda: DATA}, failures=5)
    rows = [html.index(f"<td>{name}<td>") for name in ("zz", "bm25", "aa")]
    assert rows == sorted(rows)


def test_a_run_of_other_data(out: Path) -> None:
    with (out / "bm25" / "retrieval.trec").open("a") as run:
        run.write("r Q0 gone 1 3.5 bm25\n")
    with raises(CareError, code="run_of_other_data", system="bm25", task="retrieval", id="gone"):
        html_report(out, {task("retrieval"): lambda: DATA}, failures=5)


def test_a_report_without_the_data_of_a_task(out: Path) -> None:
    tasks = find_tasks("hub", "test")  # without CMedTEB's own data
    assert "<details>" not in html_report(out, tasks, failures=5)
