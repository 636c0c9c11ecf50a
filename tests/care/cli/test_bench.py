"""The command `care bench`: its options are the fields of the benchmarks' options."""

import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from loadtest.bench import build, scale, service
from loadtest.bench.options import BuildBenchOptions, ScaleOptions, ServiceOptions
from tests.errors import error_code


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options that benchmarks were run with."""
    options: list[Any] = []
    monkeypatch.setattr(scale, "run", options.append)
    monkeypatch.setattr(build, "run", options.append)
    return options


def test_without_options_the_defaults_are_those_of_the_dataclass(given: list[Any]) -> None:
    assert main(["bench", "scale"]) == main(["bench", "build"]) == 0
    assert given == [ScaleOptions(), BuildBenchOptions()]


def test_fields_are_options(given: list[Any]) -> None:
    words = ["--vectors", "100", "--factory", "IVF4,SQ8", "--factory", "Flat", "--out", "o"]
    assert main(["bench", "scale", *words]) == 0
    assert main(["bench", "build", "--documents", "3", "--documents", "4"]) == 0
    assert given == [
        ScaleOptions(vectors=100, factories=["IVF4,SQ8", "Flat"], out=Path("o")),
        BuildBenchOptions(documents=[3, 4]),
    ]
    assert main(["bench", "scale", "--vectors", "0"]) == 2


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
