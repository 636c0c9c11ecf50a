from pathlib import Path

import pytest

from evaluation.comparison import compare_runs, run_name
from evaluation.metrics import read_run
from evaluation.statistics import mean_interval, paired_difference

QRELS = {"q1": {"a": 1}, "q2": {"b": 1, "x": 0}}
RUNS = {
    "dense": {"q1": {"a": 0.9, "b": 0.1}, "q2": {"b": 0.9}},
    "BM25, words": {"q1": {"b": 2.0}, "q2": {"b": 3.0, "a": 1.0}},
}


def test_systems_are_compared_query_by_query_with_the_baseline() -> None:
    found = compare_runs(QRELS, RUNS, "dense")
    assert found.queries == ["q1", "q2"]
    assert {name: means["nDCG@10"] for name, means in found.scores.items()} == {
        "dense": 1.0,
        "BM25, words": 0.5,
    }
    assert found.ndcg("BM25, words") == [0.0, 1.0]
    assert found.differences == {"BM25, words": paired_difference([0.0, 1.0], [1.0, 1.0])}
    assert found.intervals["BM25, words"] == mean_interval([0.0, 1.0])
    written = found.as_json()
    assert written["ndcg_by_query"]["BM25, words"] == {"q1": 0.0, "q2": 1.0}
    assert written["baseline"] == "dense"
    assert written["intervals"]["dense"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_measures_are_written_by_system_and_query(tmp_path: Path) -> None:
    compare_runs(QRELS, RUNS, "dense").write_per_query(tmp_path / "q.tsv")
    header, *rows = [
        line.split("\t") for line in (tmp_path / "q.tsv").read_text("utf-8").splitlines()
    ]
    assert header == ["system", "query-id", "nDCG@10", "MRR@10", "Recall@10", "Recall@100"]
    assert rows == [
        ["dense", "q1", "1.0", "1.0", "1.0", "1.0"],
        ["dense", "q2", "1.0", "1.0", "1.0", "1.0"],
        ["BM25, words", "q1", "0.0", "0.0", "0.0", "0.0"],
        ["BM25, words", "q2", "1.0", "1.0", "1.0", "1.0"],
    ]


def test_runs_are_written_under_names_without_white_space(tmp_path: Path) -> None:
    compare_runs(QRELS, RUNS, "dense").write_runs(tmp_path, list(RUNS))
    assert {path.name for path in tmp_path.iterdir()} == {"dense.trec", "bm25.trec"}
    assert read_run(tmp_path / "bm25.trec") == RUNS["BM25, words"]


@pytest.mark.parametrize(
    ("system", "name"),
    [
        ("BM25, characters and bigrams", "bm25-characters"),
        ("hybrid + late interaction", "hybrid+late-interaction"),
        ("BAAI/bge-m3", "BAAI-bge-m3"),
        ("care-mini", "care-mini"),
    ],
)
def test_names_of_runs(system: str, name: str) -> None:
    assert run_name(system) == name
