import json
from pathlib import Path

import pytest

from care.cli.main import main as care
from loadtest.live_writes import main
from tests.conftest import make_records, write_jsonl

pytestmark = pytest.mark.e2e


def test_writes_beside_searches_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indexes = tmp_path / "indexes"
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(12))
    folders = ["--indexes", str(indexes), "--builds", str(tmp_path / "builds")]
    assert care(["index", str(corpus), "--index", "base", *folders]) == 0
    capsys.readouterr()
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"_id": "1", "text": "咳嗽"}) + "\n", encoding="utf-8")
    given = ["--indexes", str(indexes), "--documents", str(corpus), "--queries", str(queries)]
    given += ["--rate", "10", "--others", "9", "--flush-ms", "1", "--parts", "single,caches,bulk"]
    assert main([*given, "--workers", "1", "--seconds", "0.5", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = dict(line.split(": ", 1) for line in lines if ": " in line and line[0].isalnum())
    assert named["single documents per second"][0] != "0"
    assert named["queries per second with the cache of vectors"][0] != "0"
    assert named["share of hits in vectors without it"] == "0.00 (0.00 to 0.00)"
    assert named["12 documents as lines"].endswith("their bytes on disk")
    assert "one document, until all searches find it" in named
