import json
from pathlib import Path

import pytest

from care.cli.main import main
from core.errors import DataError
from loadtest.bench.encoders import compare, lines
from tests.conftest import write_jsonl
from tests.errors import raises

pytestmark = pytest.mark.e2e


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "queries.jsonl", [{"text": f"头痛{i}"} for i in range(34)])


def test_encoders_are_compared_with_the_first(
    queries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["care-mini", "models/registry/care-mini.toml", "--queries", str(queries)]
    assert main(["bench", "encoders", *words, "--rounds", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["queries"]) == (32, {"alone": 32, "batches": 32})
    first, second = found["encoders"]
    assert [first["pair"], second["pair"]] == words[:2]
    assert first["megabytes"] == second["megabytes"] > 20
    for way in ("alone", "batches"):
        assert first[way]["ratio"] == first[way]["cpu_ratio"] == 1
        # The two are the same graph.
        assert 0.5 < second[way]["cpu_ratio"] < 2
        assert second[way]["cpu_ms"] > 0
    assert first["batches"]["cpu_ms"] < first["alone"]["cpu_ms"] * 2
    *_, row, last = lines(found)
    assert row.split()[0] == "care-mini"
    assert len(last.split()) == 10


def test_a_file_without_queries_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "empty.jsonl", [])
    with raises(DataError, "empty_file", path=path):
        compare(["care-mini"], path, 1, 1)
