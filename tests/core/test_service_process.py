import pytest

from core.service_process import start_service


def test_the_service_finds_the_pairs_of_its_caller_and_has_no_other_setting_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.service_process._start", lambda _, environment, *rest: environment)
    monkeypatch.setenv("CARE_PAIRS", "elsewhere")
    monkeypatch.setenv("CARE_MAX_BATCH", "1")
    found: object = start_service("indexes", "sample", {"PAIR": "mine"})
    assert isinstance(found, dict)
    settings = {name: value for name, value in found.items() if name.startswith("CARE_")}
    given = {"INDEXES": "indexes", "INDEX": "sample", "PORT": "0", "LOG_LEVEL": "warning"}
    given["WORKERS"] = "1"
    given |= {"PAIR": "mine", "PAIRS": "elsewhere"}
    assert settings == {f"CARE_{name}": value for name, value in given.items()}
