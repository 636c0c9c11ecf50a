"""Metrics with goals, their environment, and the tables of result files."""

import json
import sys
from pathlib import Path

import pytest

from loadtest.bench import results
from loadtest.bench.results import figure, medians, tables

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
