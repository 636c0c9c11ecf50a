"""The command `care cmedteb`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from care.cli.main import main
from evaluation.cmedteb import evaluate
from evaluation.cmedteb.results import read_scores
from models.pairs import load_pair, write_pair
from tests.errors import error_code
from tests.evaluation.cmedteb.data import Encoders, write_data

pytestmark = pytest.mark.train

Run = Callable[..., int]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command with encoders that count characters."""
    load = partial(evaluate.load_systems, load=Encoders().load)
    monkeypatch.setattr(evaluate, "load_systems", load)
    return care


def care(*words: str | Path) -> int:
    return main(["cmedteb", *map(str, words)])


def test_the_command_scores_compares_and_reports(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    common = ["--data", data, "--out", out]
    systems = ["--system", "care-mini", "--system", "bm25", "--cache", tmp_path / "cache"]
    assert run("run", *common, *systems) == 0
    table = (out / "table.md").read_text("utf-8")
    assert table in capsys.readouterr().out
    assert {line.split(" ")[1] for line in table.splitlines()[2:4]} == {"bm25", "care-mini"}
    mean = sum(s.value for s in read_scores(out)["care-mini"].values()) / 5
    assert f"{100 * mean:.2f}" in table

    assert run("compare", "care-mini", "bm25", "--out", out) == 0
    assert "| Retrieval |" in capsys.readouterr().out
    assert run("compare", "care-mini", "no", "--out", out) == 1
    assert error_code(capsys.readouterr().err) == "unknown_system"

    assert run("report", *common) == 0
    html = (out / "report.html").read_text("utf-8")
    assert html.count("<svg") == 5

    assert run("run", *common, "--task", "medical-retrieval") == 1
    assert error_code(capsys.readouterr().err) == "missing_task"


def test_tradeoff_measures_rates_and_draws_the_plot(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    systems = ["--system", "care-mini", "--system", "bm25", "--cache", tmp_path / "cache"]
    assert care("tradeoff", *systems, "--data", data, "--out", out) == 0
    assert "queries/s" in capsys.readouterr().out
    points = {p["name"]: p for p in json.loads((out / "tradeoff.json").read_text())["points"]}
    assert points["bm25"]["document_bytes"] is None
    document = load_pair("care-mini").folder / "../care-mini/document.onnx"
    assert points["care-mini"]["document_bytes"] == document.stat().st_size
    assert points["care-mini"]["queries_per_second"] > 0
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "tradeoff.svg").read_text("utf-8")


def test_splits_are_compared(
    run: Run,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evaluation.cmedteb.splits._TIMED", 32)
    monkeypatch.setattr("evaluation.cmedteb.splits._ROUNDS", 1)
    out = tmp_path / "out"
    systems = ["--system", "care-mini", "--system", "bm25", "--cache", tmp_path / "cache"]
    words = ["splits", "--data", data / "retrieval", "--split", "test", *systems, "--out", out]
    assert run(*words) == 0
    table = (out / "splits.md").read_text("utf-8")
    assert table in capsys.readouterr().out
    scores = json.loads((out / "splits.json").read_text("utf-8"))["systems"]
    assert [s["name"] for s in scores] == ["care-mini", "bm25"]
    assert f"| bm25 | {100 * scores[1]['splits']['test']['ndcg@10']['value']:.2f} |" in table


@pytest.mark.parametrize(
    ("name", "code"), [("care-mini", "duplicate_system"), ("a/b", "bad_system_name")]
)
def test_duplicate_and_invalid_system_names(
    run: Run,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    code: str,
) -> None:
    path = tmp_path / "other.toml"
    write_pair(load_pair("care-mini").model_copy(update={"name": name}), path)
    systems = ["--system", "care-mini", "--system", path]
    assert run("run", *systems, "--data", data, "--out", tmp_path / "out") == 1
    assert error_code(capsys.readouterr().err) == code
    assert not (tmp_path / "out").exists()


def test_systems_scored_on_other_data_are_not_compared(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", data, "--out", tmp_path / "out", "--task", "retrieval"]
    assert run("run", *common, "--system", "bm25") == 0
    with (data / "retrieval" / "corpus.jsonl").open("a") as corpus:
        corpus.write(json.dumps({"_id": "more", "text": "more"}) + "\n")
    assert run("run", *common, "--system", "care-mini", "--cache", tmp_path / "cache") == 1
    assert run("compare", "bm25", "care-mini", "--out", tmp_path / "out") == 1
    assert error_code(capsys.readouterr().err.splitlines()[-1]) == "different_data"
