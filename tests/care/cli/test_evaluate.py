"""The command `care evaluate`: what it prints of an evaluation, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from care import evaluation
from care.cli.evaluate import _lines
from care.cli.main import main
from care.options import EvaluationOptions
from evaluation.index_evaluation import IndexEvaluation, JudgementCoverage, Speed
from evaluation.metrics import MEASURES
from evaluation.statistics import Difference
from evaluation.thresholds import MinScoreSuggestion
from evaluation.weights import WeightScore
from tests.conftest import write_jsonl
from tests.errors import error_code

RESULT = IndexEvaluation(
    index="x",
    version="v1",
    pair="pair",
    factory="Flat",
    documents=9,
    queries=20,
    mode="hybrid",
    scores={
        "hybrid": dict.fromkeys(MEASURES, 0.75),
        "dense": dict.fromkeys(MEASURES, 0.625),
        "BM25": dict.fromkeys(MEASURES, 0.5),
    },
    ndcg_by_query={
        "hybrid": {"a": 1.0, "b": 0.5},
        "dense": {"a": 1.0, "b": 0.25},
        "BM25": {"a": 1.0, "b": 0.0},
    },
    differences={
        "hybrid": Difference(0.125, 0.0625, 0.1875, 0.01),
        "BM25": Difference(-0.125, -0.25, 0.03125, 0.2),
    },
    rerank_gain=Difference(0.0625, 0.03125, 0.09375, 0.01),
    speeds={"hybrid": Speed(300.0, 2.5, 9.5), "dense": Speed(400.0, 1.5, 8.5)},
    timed=20,
    coverage=JudgementCoverage(8, 4, 2, 4),
    min_score=MinScoreSuggestion(0.8123, 0.95, 0.4, 1, 20),
    bytes_per_passage={"vectors": 1536.0, "lexical": 320.0},
    weights=[WeightScore(0.1, 0.75, Difference(0.125, 0.0625, 0.1875, 0.01))],
    facts={"top_k": 100},
)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The command over judgements of a query that does not exist."""
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "t"}])
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("other\td\t1\n", encoding="utf-8")
    return ["evaluate", "--index", "x", "--queries", str(queries), "--qrels", str(qrels)]


def test_a_missing_folder_of_the_output_is_wrong_usage(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--output", str(tmp_path / "none" / "scores.json")]) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize("weights", ["x", "0.1,", "0", "-1", "inf"])
def test_weights_are_numbers(
    command: list[str], weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--weights={weights}"]) == 2
    assert "--weights" in capsys.readouterr().err


def test_no_weight_may_be_better_than_dense() -> None:
    worse = WeightScore(0.1, 0.5, Difference(-0.1, -0.2, 0.1, 0.5))
    (*_, last) = _lines(replace(RESULT, weights=[worse], min_score=None))
    assert "--lexical-weight 0)" in last


def test_an_error_is_one_line_with_its_code(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    assert error_code(capsys.readouterr().err) == "unknown_query"


def test_scores_warning_and_suggestion_are_shown(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[EvaluationOptions] = []

    def evaluate(_: str, options: EvaluationOptions) -> IndexEvaluation:
        given.append(options)
        return RESULT

    monkeypatch.setattr(evaluation, "compare_modes", evaluate)
    output = tmp_path / "scores.json"
    more = ["--weights", "0.1,0.2", "--rerank-url", "http://r", "--output", str(output)]
    assert main([*command, *more]) == 0
    assert (given[0].weights, given[0].rerank_url) == ("0.1,0.2", "http://r")
    assert given[0].max_query_chars == 2000
    shown = capsys.readouterr()
    assert "0.7500" in shown.out and "0.5000" in shown.out and "0.8123" in shown.out
    for part in (
        "+0.1250 (+0.0625 to +0.1875)",
        "+0.0625 (+0.0312 to +0.0938)",
        "300",
        "2.5",
        "9.5",
        "1,536",
        "lexical 320",
    ):
        assert part in shown.out
    assert "care update --index x --lexical-weight 0.1" in shown.out
    (warning,) = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert "4 of 8" in warning
    assert json.loads(output.read_text("utf-8")) == RESULT.as_json()

    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    shown_json = json.loads(shown.out)
    assert shown_json == RESULT.as_json()
    assert shown_json["ndcg_by_query"]["dense"] == {"a": 1.0, "b": 0.25}
    assert shown.err.startswith("warning: ")
