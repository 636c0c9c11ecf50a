"""The command `python -m loadtest.bench`: which scenarios it runs, and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from loadtest.bench.__main__ import SCENARIOS, main, measure
from loadtest.bench.processes import Options
from loadtest.bench.results import figure
from tests.errors import error_code, raises


def _fail(_: Options) -> dict[str, Any]:
    raise CareError("no such thing", code="missing")


def _break(_: Options) -> dict[str, Any]:
    return {"figures": [1 / 0]}


def _succeed(_: Options) -> dict[str, Any]:
    return {"figures": [figure("throughput", 2.0, ">=", 1.0)]}


def test_a_scenario_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    scenarios = {"idle": _fail, "cache": _succeed, "redis": _break, "efficiency": _succeed}
    options = Options(out=tmp_path, only="idle,cache,redis")
    with raises(CareError, "not_measured", scenarios=["idle", "redis"]):
        measure(scenarios, options)
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["scenarios"]
    assert list(found) == ["idle", "cache", "redis"]
    assert found["idle"]["code"] == "missing"
    assert found["cache"]["figures"][0]["met"]
    assert found["redis"]["code"] == "unexpected_error"


def test_without_a_choice_all_scenarios_run(tmp_path: Path) -> None:
    measure({"cache": _succeed, "redis": _succeed}, Options(out=tmp_path))
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert list(result["scenarios"]) == ["cache", "redis"]
    assert result["options"]["out"] == tmp_path.name


def test_an_unknown_scenario_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "idle,speed"]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_scenario"
    assert set(SCENARIOS) > {"idle", "infinity", "overload"}
