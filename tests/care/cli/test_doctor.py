import json
from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import Builder, make_records

pytestmark = pytest.mark.usefixtures("without_variables")


@pytest.fixture
def without_variables(monkeypatch: pytest.MonkeyPatch, indexes: Path) -> None:
    for name, value in {"INDEXES": str(indexes), "INDEX": "test", "PORT": "0"}.items():
        monkeypatch.setenv(f"CARE_{name}", value)


def test_findings_are_printed_and_an_error_is_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARE_INDEX")
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "warning  index" in output
    assert "\n0 errors, " in output
    monkeypatch.setenv("CARE_PORTS", "1")
    assert main(["doctor"]) == 1
    assert "[unknown_setting]" in capsys.readouterr().out


def test_findings_are_one_json_object(
    capsys: pytest.CaptureFixture[str], build_version: Builder
) -> None:
    # The test encoder's space is not that of care-mini.
    build_version(make_records(5))
    assert main(["doctor", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    found = {finding["check"]: finding for finding in result["findings"]}
    assert result["errors"] == 1
    assert found["index"]["status"] == "error"
    assert "[embedding_space_mismatch]" in found["index"]["message"]
    assert found["pair"]["status"] == "ok"
    assert {"python", "processors", "memory", "gpu", "disk", "packages"} <= found.keys()
