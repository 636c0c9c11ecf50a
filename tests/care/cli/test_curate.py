"""The command `care curate`."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from care.cli.main import main
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import grader, scripted_server
from tests.errors import error_code


def test_an_error_is_one_line_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("output: out\nsede: 1\n", encoding="utf-8")
    assert main(["curate", "sts", str(path)]) == 1
    shown = capsys.readouterr()
    assert error_code(shown.err) == "missing_key"
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert main(["curate", "diversify", "queries", "x", "--output", "y", "--seeds", "0"]) == 2


def test_the_command_filters_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in "甲乙丙丁"])
    vectors = np.array([[1, 0], [1, 0.01], [1, 0.02], [0, 1]], dtype=np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    words = ["curate", "diversify", "queries", str(tmp_path / "texts.jsonl"), "--seeds", "1"]
    words += ["--output", str(tmp_path / "kept.jsonl")]
    words += ["--vectors", str(tmp_path / "vectors.npy")]
    assert main(words) == 1
    assert error_code(capsys.readouterr().err) == "no_threshold"
    assert main([*words, "--t", "0.85"]) == 0
    assert "kept: 3" in capsys.readouterr().out
    report: dict[str, Any] = json.loads((tmp_path / "kept.jsonl.report.json").read_text("utf-8"))
    assert report["rule"] == {"k": 5, "t": 0.85, "near": 1}


def test_a_benchmark_its_expert_check_and_its_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, texts in (("corpus", DOCUMENTS), ("queries", QUERIES)):
        records = [{"_id": id_, "text": text} for id_, text in texts.items()]
        write_jsonl(tmp_path / f"{name}.jsonl", records)

    def grade(_: str, query: str, text: str) -> str:
        return "S" if query[:2] in text and "党参" in text else "C"

    with scripted_server(grader(grade)) as url:
        judge = {"name": "one", "model": "one", "base_url": url, "input_price": 1e6}
        facts = {
            "corpus": "corpus.jsonl",
            "queries": "queries.jsonl",
            "output": "out",
            "retrievers": [{"kind": "bm25"}],
            "judges": [judge],
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(facts, allow_unicode=True), encoding="utf-8")
        assert main(["curate", "build-benchmark", str(path)]) == 0
    output = capsys.readouterr().out
    assert "positive: 2" in output and "cost_calls: 2" in output
    assert (tmp_path / "out" / "retrieval" / "qrels" / "test.tsv").is_file()

    pairs = tmp_path / "pairs"
    assert main(["curate", "expert-sample", str(tmp_path / "out"), "--output", str(pairs)]) == 0
    with (pairs / "pairs.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    with (pairs / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"label": int("党参" in row["passage"])} for row in rows)
    key = ["--key", str(pairs / "key.jsonl")]
    assert main(["curate", "expert-agreement", str(pairs / "pairs.csv"), *key]) == 0
    assert "agreement: 1.0" in capsys.readouterr().out
    assert main(["curate", "expert-agreement", str(pairs / "pairs.csv"), *key, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agreement"] == 1


def test_questions_are_reworded_by_a_part_of_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = write_jsonl(
        tmp_path / "queries.jsonl",
        [{"_id": id_, "text": text} for id_, text in QUERIES.items()],
    )
    words = ["curate", "reword", str(queries), "--versions", "2", "--json", "--output"]
    made = {}
    for part in ("a", "b"):
        out = tmp_path / "new" / f"{part}.jsonl"
        assert main([*words, str(out), "--part", part]) == 0
        assert json.loads(capsys.readouterr().out) == {"queries": 2, "rewordings": 4}
        made[part] = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        assert [row["_id"] for row in made[part]] == ["q1-1", "q1-2", "q2-1", "q2-2"]
        assert [row["original"] for row in made[part]] == ["q1", "q1", "q2", "q2"]
        assert all(row["original_text"] == QUERIES[row["original"]] for row in made[part])
    assert not {row["text"] for row in made["a"]} & {row["text"] for row in made["b"]}
    # Misspelt rewordings mean what the rewordings mean.
    out = tmp_path / "misspelt.jsonl"
    words = ["curate", "reword", str(tmp_path / "new" / "a.jsonl"), "--errors", "1", "--output"]
    assert main([*words, str(out)]) == 0
    misspelt = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {row["original_text"] for row in misspelt} == set(QUERIES.values())
    capsys.readouterr()
    assert main([*words, str(tmp_path / "queries.jsonl" / "x")]) == 1
    assert error_code(capsys.readouterr().err) == "input_output"
