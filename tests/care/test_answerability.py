"""`care answerable`: measuring and calibrating on an index."""

import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from models.pairs import load_pair
from tests.conftest import Builder, make_records, write_jsonl
from tests.errors import error_code

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
    made = run(
        capsys,
        *arguments,
        "--pair",
        str(pair_file),
        "--out",
        str(out),
        "--refused",
        "0.1",
        "--sizes",
        "40",
        "--sizes",
        "120",
    )
    shares = {(each["mode"], each["vectors"], each["name"]): each for each in made["shares"]}
    for mode in ("dense", "hybrid"):
        # The text of each question is its passage, which a sample of those it answers has.
        for size in (40, 120):
            assert shares[mode, size, "queries"]["queries"] == 60
            assert shares[mode, size, "queries"]["refused"] == pytest.approx(0.1, abs=0.15)
            assert shares[mode, size, "other"]["refused"] == 1
            assert shares[mode, size, "other"]["auroc"] == 1
            assert shares[mode, size, "other"]["before"] is None
            assert shares[mode, size, "other"]["queries"] == 101
        assert shares[mode, 40, "passages not in the index"]["auroc"] > 0.6
        assert made["judges"][mode]["vectors"] == [40, 1200]
    written = load_pair(str(out))
    judges = {mode: judge.model_dump(mode="json") for mode, judge in written.answerable.items()}
    assert judges == made["judges"]

    again = run(capsys, *arguments, "--pair", str(out))
    assert again["judges"] == made["judges"]
    measured = {(each["mode"], each["vectors"]): each for each in again["shares"]}
    assert measured.keys() == {("dense", 120), ("hybrid", 120)}
    assert measured["dense", 120]["before"] is None

    one = run(capsys, *arguments, "--pair", str(out), "--out", str(tmp_path / "one.toml"))
    assert one["judges"]["dense"]["vectors"] == [12, 1200]
    assert "size" not in one["judges"]["dense"]["weights"]
    assert {each["before"] is None for each in one["shares"]} == {False}


def test_a_pair_without_calibration_measures_nothing(
    arguments: list[str], pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, *arguments, "--pair", str(pair_file))
    assert (found["judges"], found["shares"]) == ({}, [])


def test_samples_need_judgements_and_vectors_by_row(
    arguments: list[str], pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = arguments.index("--qrels")
    without = arguments[:at] + arguments[at + 2 :]
    assert main([*without, "--pair", str(pair_file), "--sizes", "40"]) == 1
    assert error_code(capsys.readouterr().err) == "no_samples"


def test_the_folder_of_the_result_must_exist(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--out", str(tmp_path / "none" / "pair.toml")]) == 2


def test_files_of_one_name_are_measured_apart(
    arguments: list[str], tmp_path: Path, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other" / "queries.jsonl"
    other.parent.mkdir()
    (tmp_path / "other.jsonl").rename(other)
    command = [str(other) if part.endswith("other.jsonl") else part for part in arguments]
    out = str(tmp_path / "calibrated.toml")
    made = run(capsys, *command, "--pair", str(pair_file), "--out", out)
    counts = {each["name"]: each["queries"] for each in made["shares"]}
    assert counts == {str(tmp_path / "queries.jsonl"): 60, str(other): 101}
