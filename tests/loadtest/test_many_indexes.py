import json
import re
from pathlib import Path

import pytest

from care.cli.main import main as care
from loadtest.many_indexes import main
from tests.conftest import make_records, write_jsonl

pytestmark = pytest.mark.e2e


def test_copies_of_an_index_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "indexes"
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(12))
    folders = ["--indexes", str(copied), "--builds", str(tmp_path / "builds")]
    assert care(["index", str(corpus), "--index", "base", *folders]) == 0
    capsys.readouterr()
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"_id": "1", "text": "咳嗽"}) + "\n", encoding="utf-8")
    few = ["--count", "3", "--seconds", "0.2"]
    assert main(["--indexes", str(copied), "--queries", str(queries), *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split("[:;]", line)[0] for line in lines] == [
        "start",
        "first query to each",
        *["many-0000", "3 indexes"] * 3,
        "at the end",
    ]
    assert len(list(copied.glob("many-*"))) == 3
