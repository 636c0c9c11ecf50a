"""The command `care bench`: its options are the fields of the benchmarks' options."""

import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from loadtest.bench import hostile, service
from loadtest.bench.options import HostileOptions, ServiceOptions
from tests.errors import error_code


def test_fields_of_the_dataclass_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(hostile, "run", given.append)
    words = ["--only", "idle", "--only", "header", "--hold", "2", "--out", "o"]
    assert main(["bench", "hostile"]) == main(["bench", "hostile", *words]) == 0
    changed = HostileOptions(only=["idle", "header"], hold=2, out=Path("o"))
    assert given == [HostileOptions(), changed]
    assert main(["bench", "hostile", "--hold", "0"]) == 2


def test_a_scenario_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scenario(options: ServiceOptions) -> dict[str, Any]:
        return {"figures": [], "index": options.index}

    monkeypatch.setattr(service, "SCENARIOS", {"idle": scenario})
    monkeypatch.setenv("CARE_INDEX", "mine")
    assert main(["bench", "service", "--only", "idle", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert found["scenarios"]["idle"]["index"] == "mine"
    assert main(["bench", "service", "--only", "speed", "--out", str(tmp_path)]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_scenario"
