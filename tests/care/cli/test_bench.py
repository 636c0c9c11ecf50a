"""The command `care bench`: its options are the fields of the benchmarks' options."""

import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from loadtest.bench import service
from loadtest.bench.results import ServiceOptions
from tests.errors import error_code


def test_a_scenario_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scenario(options: ServiceOptions) -> dict[str, Any]:
        return {"figures": [], "index": options.index, "rounds": options.rounds}

    monkeypatch.setattr(service, "SCENARIOS", {"modes": scenario})
    monkeypatch.setenv("CARE_INDEX", "mine")
    out = ["--out", str(tmp_path)]
    assert main(["bench", "service", "--only", "modes", "--rounds", "2", *out]) == 0
    found = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    modes = found["scenarios"]["modes"]
    assert (modes["index"], modes["rounds"]) == ("mine", 2)
    assert main(["bench", "service", "--rounds", "0", *out]) == 2
    assert main(["bench", "service", "--only", "speed", *out]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_scenario"


@pytest.mark.train
def test_peers_are_scenarios_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", "--only", "modes", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error_code(error) == "unknown_scenario"
    assert "bare-loop, fastapi, sentence-transformers, infinity" in error
