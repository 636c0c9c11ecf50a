"""`care answerable`: measuring and calibrating on an index."""

import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from models.pairs import load_pair
from tests.conftest import Builder, make_records, write_jsonl

pytestmark = pytest.mark.usefixtures("test_encoders")


@pytest.fixture
def arguments(tmp_path: Path, build_version: Builder, indexes: Path, pair_file: Path) -> list[str]:
    records = make_records(120)
    build_version(records)
    asked = [{"_id": f"q{i}", "text": record["text"]} for i, record in enumerate(records[:60])]
    other = [{"_id": f"o{i}", "text": f"zebra{i} quartz{i}"} for i in range(101)]
    lines = [f"q{i}\t{record['_id']}\t1" for i, record in enumerate(records[:60])]
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n", encoding="utf-8")
    files = {
        "queries": write_jsonl(tmp_path / "queries.jsonl", asked),
        "unanswerable": write_jsonl(tmp_path / "other.jsonl", other),
        "qrels": qrels,
        "indexes": indexes,
    }
    options = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    return ["answerable", "--index", "test", "--json", *options]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_calibration_is_written_and_measured(
    arguments: list[str], tmp_path: Path, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibrated.toml"
    made = run(capsys, *arguments, "--pair", str(pair_file), "--out", str(out), "--refused", "0.1")
    shares = {(share["mode"], share["name"]): share for share in made["shares"]}
    for mode in ("dense", "hybrid"):
        assert shares[mode, "answered"]["queries"] == 60
        assert shares[mode, "answered"]["refused"] == pytest.approx(0.1, abs=0.05)
        # Every second question, the first of them included, was fitted.
        assert shares[mode, "other"]["queries"] == 50
        assert shares[mode, "other"]["refused"] == 1
        assert shares[mode, "other"]["auroc"] == 1
        # The text of each question is its passage: without it the best score is lower.
        assert shares[mode, "passages taken out"]["auroc"] > 0.6
    written = load_pair(str(out))
    assert {m: judge.model_dump() for m, judge in written.answerable.items()} == made["judges"]

    measured = run(capsys, *arguments, "--pair", str(out))
    assert measured["judges"] == made["judges"]
    again = {(share["mode"], share["name"]): share for share in measured["shares"]}
    assert again["dense", "other"]["queries"] == 101
    assert again["dense", "answered"] == shares["dense", "answered"]


def test_a_pair_without_calibration_measures_nothing(
    arguments: list[str], pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, *arguments, "--pair", str(pair_file))
    assert (found["judges"], found["shares"]) == ({}, [])


def test_the_folder_of_the_result_must_exist(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "none" / "pair.toml")]) == 2
