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
    assert main([*given, "--workers", "1", "--seconds", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split(" at ")[0] for line in lines] == [
        "searches as fast as they are answered",
        *[
            "searches",
            "searches beside single documents",
            "one document, until all searches find it",
        ]
        * 3,
        "12 documents in requests of 100",
    ]
