"""Scenarios that are measured, metrics with goals, and the tables of result files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from loadtest.bench import results
from loadtest.bench.options import ServiceOptions
from loadtest.bench.results import PEERS_NAME, figure, measure, medians, tables
from tests.errors import raises

RESULTS = Path(__file__).parents[3] / "loadtest" / "results"
ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": {"id": "0123456789abcdef", "changed": True},
    "hardware": {
        **{"processor": "Some CPU", "processors": 2, "memory_bytes": 8 * 2**30},
        "instructions": ["avx2"],
        "load_average": [0.25, 0.5, 1.0],
    },
    "versions": {"python": "3.11.7"},
    "other_environments": {".venv-bench": {"torch": "2.13.0"}},
}
OPTIONS = {"index": "sample", "pair": "care-mini", "rounds": 3, "seconds": 8}


def _rows(text: str) -> list[list[str]]:
    """Returns the cells of all rows of tables, including headings."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


@pytest.mark.parametrize(
    ("reached", "relation", "goal", "met"),
    [
        (0.88, ">=", 0.88, True),
        (0.8799, ">=", 0.88, False),
        (1.0, "<=", 1.0, True),
        (1.0001, "<=", 1.0, False),
    ],
)
def test_a_value_equal_to_its_goal_meets_it(
    reached: float, relation: str, goal: float, met: bool
) -> None:
    assert figure("a", reached, relation, goal)["met"] is met  # type: ignore[arg-type]


def test_medians_are_computed_of_numbers_only() -> None:
    rounds = [{"qps": 3.0, "http": {}}, {"qps": 1.0, "http": {}}, {"qps": 2.0, "http": {}}]
    assert medians(rounds) == {"qps": 2.0}


def test_the_environment_is_json_and_names_versions() -> None:
    found = results.describe([Path(sys.executable), Path("no/such/python")])
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["numpy"]
    (other,) = found["other_environments"].values()
    assert other["numpy"] == found["versions"]["numpy"]


def test_the_committed_tables_match_the_result_files() -> None:
    assert tables(RESULTS) == (RESULTS / results.TABLE_NAME).read_text(encoding="utf-8")


def test_a_table_holds_all_metrics_and_failures(tmp_path: Path) -> None:
    figures = [
        figure("throughput", 0.912, ">=", 0.88, note="91 of 100 | a pipe"),
        figure("latency", 1.5, "<=", 1.0, "ms"),
    ]
    scenarios = {"one": {"figures": figures}, "two": {"error": "wrk is missing\nmore"}}
    result = {"environment": ENVIRONMENT, "options": OPTIONS, "scenarios": scenarios}
    path = results.write(result, tmp_path / "results" / results.BENCH_NAME)
    _, throughput, latency, failed = _rows(path.read_text(encoding="utf-8"))
    command = "`make bench ONLY=one`"
    assert throughput == ["throughput", "0.91", "≥ 0.88", "yes", command, "91 of 100 \\| a pipe"]
    assert latency[:5] == ["latency", "1.50 ms", "≤ 1 ms", "no", command]
    assert (failed[0], failed[-1]) == ("two", "wrk is missing")
    assert json.loads((tmp_path / "results" / "bench.json").read_text()) == result
    peers = results.write(result, tmp_path / "results" / PEERS_NAME).read_text(encoding="utf-8")
    assert peers.count("`make bench ONLY=one`") == peers.count("`make bench-peers ONLY=one`") == 2


def _fail(_: ServiceOptions) -> dict[str, Any]:
    raise CareError("no such thing", code="missing")


def _break(_: ServiceOptions) -> dict[str, Any]:
    return {"figures": [1 / 0]}


def _succeed(_: ServiceOptions) -> dict[str, Any]:
    return {"figures": [figure("throughput", 2.0, ">=", 1.0)]}


def test_a_failed_scenario_does_not_lose_the_results_of_others(tmp_path: Path) -> None:
    scenarios = {"one": _fail, "two": _succeed, "three": _break, "four": _succeed}
    options = ServiceOptions(out=tmp_path, only="one,two,three")
    with raises(CareError, "not_measured", scenarios=["one", "three"]):
        measure(scenarios, options)
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["scenarios"]
    assert list(found) == ["one", "two", "three"]
    assert found["one"]["code"] == "missing"
    assert found["two"]["figures"][0]["met"]
    assert found["three"]["code"] == "unexpected_error"


def test_all_scenarios_run_by_default(tmp_path: Path) -> None:
    measure({"one": _succeed, "two": _succeed}, ServiceOptions(out=tmp_path), PEERS_NAME)
    result = json.loads((tmp_path / PEERS_NAME).read_text(encoding="utf-8"))
    assert list(result["scenarios"]) == ["one", "two"]
    # Absolute paths are not written to results.
    assert (result["options"]["out"], result["options"]["rounds"]) == (tmp_path.name, 3)
    assert result["options"]["queries"] == "data/sample/queries.jsonl"


def test_an_unknown_scenario_is_an_error(tmp_path: Path) -> None:
    with raises(CareError, "unknown_scenario", scenarios=["speed"]):
        measure({"one": _succeed}, ServiceOptions(out=tmp_path, only="one,speed"))
