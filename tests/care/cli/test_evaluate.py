"""The command `care evaluate`: what it prints of an evaluation, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from care import evaluation
from care.cli.evaluate import _lines
from care.cli.main import main
from care.options import EvaluationOptions
from evaluation.comparison import Comparison
from evaluation.index_evaluation import IndexEvaluation, JudgementCoverage, Speed
from evaluation.metrics import MEASURES, read_run
from evaluation.statistics import Difference, Interval
from evaluation.weights import MinScoreSuggestion, WeightScore
from models.pairs import write_pair
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import make_pair, make_spec
from tests.errors import error_code

RESULT = IndexEvaluation(
    index="x",
    version="v1",
    pair="pair",
    factory="Flat",
    documents=9,
    queries=20,
    mode="hybrid",
    comparison=Comparison(
        baseline="dense",
        runs={},
        by_query={
            "hybrid": {"nDCG@10": {"a": 1.0, "b": 0.5}},
            "dense": {"nDCG@10": {"a": 1.0, "b": 0.25}},
            "BM25": {"nDCG@10": {"a": 1.0, "b": 0.0}},
        },
        scores={
            "hybrid": dict.fromkeys(MEASURES, 0.75),
            "dense": dict.fromkeys(MEASURES, 0.625),
            "BM25": dict.fromkeys(MEASURES, 0.5),
        },
        intervals={
            "hybrid": Interval(0.75, 0.7125, 0.7875),
            "dense": Interval(0.625, 0.6, 0.65),
            "BM25": Interval(0.5, 0.4, 0.6),
        },
        differences={
            "hybrid": Difference(0.125, 0.0625, 0.1875, 0.01),
            "BM25": Difference(-0.125, -0.25, 0.03125, 0.2345),
        },
    ),
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


@pytest.mark.parametrize("output", ["none/scores.json", ".", "/dev/null"])
def test_an_output_that_cannot_be_written_is_wrong_usage(
    command: list[str], output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--output", str(tmp_path / output)]) == 2
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
        "0.7125 - 0.7875",
        "0.2345",
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


def test_neither_queries_nor_a_run_is_wrong_usage(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *command[command.index("--qrels") :]]) == 2
    assert "--run" in capsys.readouterr().err


def test_runs_are_scored_without_an_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qrels, first, second = tmp_path / "qrels.tsv", tmp_path / "a.trec", tmp_path / "b.trec"
    qrels.write_text("q1\ta\t1\nq2\tb\t1\n", "utf-8")
    first.write_text("q1 Q0 a 1 0.5 x\nq2 Q0 b 1 0.5 x\n", "utf-8")
    second.write_text("q1 Q0 a 1 0.5 x\nq1 Q0 b 2 0.25 x\n", "utf-8")
    per_query, output = tmp_path / "queries.tsv", tmp_path / "scores.json"
    arguments = ["evaluate", "--qrels", str(qrels), "--run", str(first), "--run", str(second)]
    more = ["--per-query", str(per_query), "--output", str(output), "--json"]
    assert main([*arguments, *more]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found == json.loads(output.read_text("utf-8"))
    assert (found["queries"], found["baseline"]) == (2, str(first))
    assert {name: scores["nDCG@10"] for name, scores in found["scores"].items()} == {
        str(first): 1.0,
        str(second): 0.5,
    }
    assert found["differences"][str(second)]["value"] == -0.5
    assert f"{second}\tq2\t0.0\t" in per_query.read_text("utf-8")
    (warning,) = shown.err.splitlines()
    assert str(second) in warning and " 1 " in warning

    assert main(arguments) == 0
    assert "0.5000" in capsys.readouterr().out
    assert main([*arguments, "--run", str(first)]) == 1
    assert error_code(capsys.readouterr().err) == "duplicate_system"


@pytest.mark.usefixtures("test_encoders")
def test_pairs_and_runs_are_compared_on_the_only_index(
    build_version: Builder,
    indexes: Path,
    pair_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = make_records(30)
    build_version(records)
    texts = [{"_id": r["_id"], "text": r["text"]} for r in records]
    queries = write_jsonl(tmp_path / "queries.jsonl", texts)
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("".join(f"{r['_id']}\t{r['_id']}\t1\n" for r in records), "utf-8")
    other = tmp_path / "other" / "pair.toml"
    other.parent.mkdir()
    sides = {role: make_spec(role, "bigrams-2") for role in ("query", "document")}
    write_pair(make_pair(name="other", folder=other.parent, **sides), other)
    run = tmp_path / "perfect.trec"
    run.write_text("".join(f"{r['_id']} Q0 {r['_id']} 1 1 x\n" for r in records), "utf-8")
    files = ["--queries", str(queries), "--qrels", str(qrels), "--run", str(run)]
    pairs = ["--pair", str(pair_file), "--pair", str(other.parent)]
    folders = ["--indexes", str(indexes), "--cache", str(tmp_path / "cache")]
    runs = tmp_path / "runs"
    command = ["evaluate", *files, *pairs, *folders]
    assert main([*command, "--save-runs", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    modes, bm25 = ["dense", "lexical", "hybrid"], ["BM25, words", "BM25, characters and bigrams"]
    assert list(found["scores"]) == [*modes, *bm25, str(run), "other"]
    assert found["scores"][str(run)]["nDCG@10"] == 1
    assert found["scores"]["other"]["nDCG@10"] > 0.9
    assert found["differences"].keys() == found["scores"].keys() - {"dense"}
    names = {"dense", "lexical", "hybrid", "bm25", "bm25-characters", "other"}
    assert {path.stem for path in runs.iterdir()} == names
    assert read_run(runs / "other.trec").keys() == {r["_id"] for r in records}

    # A run that was saved scores as the system that it is of.
    saved = runs / "other.trec"
    assert main(["evaluate", "--qrels", str(qrels), "--run", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][str(saved)] == found["scores"]["other"]

    assert main([*command, "--pair", str(other)]) == 1
    assert error_code(capsys.readouterr().err) == "duplicate_system"
    # Its row would replace that of the mode, and its run the saved one.
    for name in ("dense", "bm25"):
        taken = tmp_path / f"{name}.toml"
        write_pair(make_pair(name=name, folder=other.parent, **sides), taken)
        assert main([*command, "--pair", str(taken)]) == 1
        assert error_code(capsys.readouterr().err) == "duplicate_system"
    assert main([*command, "--pair", "none"]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_pair"
