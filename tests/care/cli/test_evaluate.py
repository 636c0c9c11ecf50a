"""The command `care evaluate`: what it prints of an evaluation, and what it writes."""

import json
from pathlib import Path

import pytest

from care.cli.main import main
from evaluation import index_evaluation
from evaluation.index_evaluation import IndexEvaluation, JudgementCoverage
from evaluation.metrics import MEASURES
from evaluation.thresholds import MinScoreSuggestion
from tests.conftest import write_jsonl
from tests.errors import error_code

RESULT = IndexEvaluation(
    index="x",
    version="v1",
    documents=9,
    queries=20,
    index_scores=dict.fromkeys(MEASURES, 0.75),
    bm25_scores=dict.fromkeys(MEASURES, 0.5),
    index_label="pair, Flat, HTTP",
    bm25_label="BM25",
    coverage=JudgementCoverage(8, 4, 2),
    min_score=MinScoreSuggestion(0.8123, 0.95, 0.4, 1, 20),
    queries_per_second=100.0,
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
    monkeypatch.setattr(index_evaluation, "evaluate_index", lambda *_: RESULT)
    output = tmp_path / "scores.json"
    assert main([*command, "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert "0.7500" in shown.out and "0.5000" in shown.out and "0.8123" in shown.out
    (warning,) = [line for line in shown.err.splitlines() if line.startswith("warning: ")]
    assert "4 of 8" in warning
    assert json.loads(output.read_text("utf-8")) == RESULT.as_json()

    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == RESULT.as_json()
    assert shown.err.startswith("warning: ")
