"""Scenarios that are measured, metrics with goals, and files of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from loadtest.bench.results import ServiceOptions, figure, measure, medians
from tests.errors import raises


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


def _fail(_: ServiceOptions) -> dict[str, Any]:
    raise CareError("no such thing", code="missing")


def _break(_: ServiceOptions) -> dict[str, Any]:
    return {"figures": [1 / 0]}


def _succeed(_: ServiceOptions) -> dict[str, Any]:
    figures = [figure("throughput", 0.912, ">=", 0.88), figure("p99", 1.5, "<=", 1.0, "ms", "slow")]
    return {"figures": figures}


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
    lines = (tmp_path / "bench.md").read_text(encoding="utf-8").splitlines()
    assert lines[-4:-1] == [
        "| one | not measured | | | no | no such thing |",
        "| two | throughput | 0.91 | ≥ 0.88 | yes |  |",
        "| two | p99 | 1.50 ms | ≤ 1 ms | no | slow |",
    ]


def test_all_scenarios_run_by_default(tmp_path: Path) -> None:
    measure({"one": _succeed, "two": _succeed}, ServiceOptions(out=tmp_path), "peers")
    result = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    assert list(result["scenarios"]) == ["one", "two"]
    assert {"numpy", "onnxruntime", "wrk"} < result["environment"]["versions"].keys()
    # Absolute paths are not written to results.
    assert (result["options"]["out"], result["options"]["rounds"]) == (tmp_path.name, 3)
    assert result["options"]["queries"] == "data/sample/queries.jsonl"


def test_an_unknown_scenario_is_an_error(tmp_path: Path) -> None:
    with raises(CareError, "unknown_scenario", scenarios=["speed"]):
        measure({"one": _succeed}, ServiceOptions(out=tmp_path, only="one,speed"))
