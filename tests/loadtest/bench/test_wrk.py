"""Running wrk, replaced by a script that prints its summary."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from loadtest.bench.wrk import bodies, drive
from tests.errors import raises
from tests.loadtest.bench.conftest import ERRORS, SUMMARY


def _prints(wrk: Path, *lines: str, status: int = 0) -> None:
    text = "\n".join(f"echo '{line}'" for line in lines)
    wrk.write_text(f"#!/bin/sh\n{text}\nexit {status}\n")
    wrk.chmod(0o755)


def _summary(**changes: Any) -> str:
    return json.dumps(SUMMARY | changes)


def test_the_summary_is_read(wrk: Path) -> None:
    _prints(wrk, "Running 2s test", "", _summary())
    load = drive("http://127.0.0.1:1", ["{}"], 8, 2)
    assert load["connections"] == 8
    assert load["qps"] == 100.0
    assert load["p99_ms"] == 3.5


def test_output_without_a_summary_is_an_error(wrk: Path) -> None:
    _prints(wrk, "unable to connect to 127.0.0.1:1", status=1)
    with raises(CareError, "wrk_failed", status=1):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


@pytest.mark.parametrize("changes", [{"errors": ERRORS | {"status": 10}}, {"requests": 0}])
def test_failed_requests_are_an_error(wrk: Path, changes: dict[str, Any]) -> None:
    _prints(wrk, _summary(**changes))
    with raises(CareError, "requests_failed", **changes.get("errors", ERRORS)):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_wrk_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(CareError, "wrk_missing"):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_bodies_are_single_lines() -> None:
    assert bodies(["一\n二"], 3) == ['{"query": "一\\n二", "top_k": 3, "mode": "dense"}']
