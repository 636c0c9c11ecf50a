import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from models.curation.scripted import scripted_server
from tests.conftest import write_jsonl
from tests.curation.endpoints import grader


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "models.curation", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_the_command_says_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("output: out\nsede: 1\n", encoding="utf-8")
    result = command("sts", str(path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {path} line ")
    assert result.stderr.count("\n") == 1


def test_the_command_filters_and_reports(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in "甲乙丙丁"])
    vectors = np.array([[1, 0], [1, 0.01], [1, 0.02], [0, 1]], dtype=np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    result = command(
        *("diversify", "queries", str(tmp_path / "texts.jsonl"), "--seeds", "1"),
        *("--output", str(tmp_path / "kept.jsonl"), "--vectors", str(tmp_path / "vectors.npy")),
    )
    assert result.returncode == 0, result.stderr
    assert "kept: 3" in result.stdout
    report: dict[str, Any] = json.loads((tmp_path / "kept.jsonl.report.json").read_text("utf-8"))
    assert report["rule"] == {"k": 5, "t": 0.85, "near": 1}


def test_a_benchmark_its_expert_check_and_its_costs(data: Path, tmp_path: Path) -> None:
    def grade(_: str, query: str, text: str) -> str:
        return "S" if query[:2] in text and "党参" in text else "C"

    with scripted_server(grader(grade)) as url:
        judge = {"name": "one", "model": "one", "base_url": url, "input_price": 1e6}
        facts = {
            "corpus": "data/corpus.jsonl",
            "queries": "data/test.queries.jsonl",
            "output": "out",
            "retrievers": [{"kind": "bm25"}],
            "judges": [judge],
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(facts, allow_unicode=True), encoding="utf-8")
        result = command("build-benchmark", str(path))
    assert result.returncode == 0, result.stderr
    assert "positive: 2" in result.stdout
    assert "all calls: 2" in result.stdout
    assert (tmp_path / "out" / "retrieval" / "test.qrels.tsv").is_file()

    pairs = tmp_path / "pairs"
    result = command("expert-sample", str(tmp_path / "out"), "--output", str(pairs))
    assert result.returncode == 0, result.stderr
    with (pairs / "pairs.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    with (pairs / "pairs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"label": int("党参" in row["passage"])} for row in rows)
    result = command(
        "expert-agreement", str(pairs / "pairs.csv"), "--key", str(pairs / "key.jsonl")
    )
    assert "agreement: 1.0" in result.stdout, result.stderr
