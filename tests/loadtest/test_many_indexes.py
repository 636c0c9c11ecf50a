import json
import re
import shutil
from pathlib import Path

import pytest

from loadtest.many_indexes import main

pytestmark = pytest.mark.e2e


def test_copies_of_an_index_are_measured(
    indexes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(indexes, tmp_path / "indexes"))
    queries = tmp_path / "queries.jsonl"
    queries.write_text(json.dumps({"_id": "1", "text": "咳嗽"}) + "\n", encoding="utf-8")
    few = ["--index", "sample", "--count", "3", "--seconds", "0.2"]
    assert main(["--indexes", str(copied), "--queries", str(queries), *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split("[:;]", line)[0] for line in lines] == [
        "start",
        "first query to each",
        *["many-0000", "3 indexes"] * 3,
        "at the end",
    ]
    assert len(list(copied.glob("many-*"))) == 3
