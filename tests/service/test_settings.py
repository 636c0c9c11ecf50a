from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from core.cpus import available_cpus
from service.settings import Settings

VALUES = [
    ("HOST", "::1", "::1"),
    ("PORT", "0", 0),
    ("INDEXES", "elsewhere", Path("elsewhere")),
    ("INDEX", "mine", "mine"),
    ("PAIR", "pair.toml", "pair.toml"),
    ("THREADS", "3", 3),
    ("MAX_QUERY_CHARS", "5", 5),
    ("MAX_TOP_K", "6", 6),
    ("MAX_BATCH", "7", 7),
    ("MAX_BODY_BYTES", "8", 8),
    ("MAX_IN_FLIGHT", "9", 9),
    ("CACHE_ENTRIES", "0", 0),
    ("ADMIN_TOKEN", "token", SecretStr("token")),
    ("LOG_LEVEL", "debug", "debug"),
]


@pytest.mark.parametrize(("variable", "value", "expected"), VALUES)
def test_a_variable_sets_what_it_names(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: object
) -> None:
    assert getattr(Settings(), variable.lower()) != expected
    monkeypatch.setenv(f"CARE_{variable}", value)
    assert getattr(Settings(), variable.lower()) == expected


def test_every_setting_has_its_variable_here_and_a_description() -> None:
    assert {variable.lower() for variable, _, _ in VALUES} == set(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_threads_are_the_processors_that_the_process_may_use() -> None:
    assert Settings().threads == available_cpus()


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(Settings(admin_token=SecretStr("secret")))


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
