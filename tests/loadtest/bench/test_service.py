"""The scenarios that are measured, and the results that are written."""

import json
from pathlib import Path
from typing import Any

from core.errors import CareError
from loadtest.bench.options import ServiceOptions
from loadtest.bench.results import figure
from loadtest.bench.service import SCENARIOS, measure
from tests.errors import raises


def _fail(_: ServiceOptions) -> dict[str, Any]:
    raise CareError("no such thing", code="missing")


def _break(_: ServiceOptions) -> dict[str, Any]:
    return {"figures": [1 / 0]}


def _succeed(_: ServiceOptions) -> dict[str, Any]:
    return {"figures": [figure("throughput", 2.0, ">=", 1.0)]}


def test_a_failed_scenario_does_not_lose_the_results_of_others(tmp_path: Path) -> None:
    scenarios = {"idle": _fail, "cache": _succeed, "redis": _break, "efficiency": _succeed}
    options = ServiceOptions(out=tmp_path, only="idle,cache,redis")
    with raises(CareError, "not_measured", scenarios=["idle", "redis"]):
        measure(scenarios, options)
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["scenarios"]
    assert list(found) == ["idle", "cache", "redis"]
    assert found["idle"]["code"] == "missing"
    assert found["cache"]["figures"][0]["met"]
    assert found["redis"]["code"] == "unexpected_error"


def test_all_scenarios_run_by_default(tmp_path: Path) -> None:
    measure({"cache": _succeed, "redis": _succeed}, ServiceOptions(out=tmp_path))
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert list(result["scenarios"]) == ["cache", "redis"]
    assert result["options"]["out"] == tmp_path.name


def test_an_unknown_scenario_is_an_error(tmp_path: Path) -> None:
    with raises(CareError, "unknown_scenario", scenarios=["speed"]):
        measure(SCENARIOS, ServiceOptions(out=tmp_path, only="idle,speed"))
    assert set(SCENARIOS) > {"idle", "infinity", "overload"}
