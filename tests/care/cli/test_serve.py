import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import values

from care.cli.main import main
from core.conditions import parse_filter
from service.access.api_keys import ApiKeys
from service.access.grants import Caller, Grant
from tests.errors import error_code


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the handlers and hooks that the command replaces."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def without_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service that would find no index: whatever it refuses, it does before it loads a model."""
    monkeypatch.setenv("CARE_INDEXES", str(tmp_path / "indexes"))
    monkeypatch.setenv("CARE_INDEX", "test")
    monkeypatch.setenv("CARE_PORT", "0")
    # What settings do not refuse, a worker does: each takes a second of a processor to start.
    monkeypatch.setenv("CARE_WORKERS", "1")


def failure(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Runs the command, which must fail with one line, and returns its code and the line."""
    assert main(["serve"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return error_code(err), err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CARE_HOST", ""),
        ("CARE_PORT", "http"),
        ("CARE_PORT", "65536"),
        ("CARE_PORT", "-1"),
        ("CARE_THREADS", "0"),
        ("CARE_MAX_QUERY_CHARS", "0"),
        ("CARE_MAX_TOP_K", "ten"),
        ("CARE_MAX_BATCH", "0"),
        ("CARE_MAX_BODY_BYTES", "1.5"),
        ("CARE_QUEUE_TOKENS", "0"),
        ("CARE_CACHE_ENTRIES", "-1"),
        ("CARE_WATCH_SECONDS", "-1"),
        ("CARE_ROOT_PATH", "care"),
        ("CARE_ROOT_PATH", "/care/"),
        ("CARE_CORS_ORIGINS", "foo"),
        ("CARE_CORS_ORIGINS", "https://a.example,https://b.example/path"),
        ("CARE_CORS_ORIGINS", "https://A.example"),
        ("CARE_CORS_ORIGINS", "https://a.example:http"),
        ("CARE_CORS_ORIGINS", "https://门户.example"),
        ("CARE_LOG_LEVEL", "loud"),
        ("CARE_TOKEN_ALGORITHMS", "none"),
        ("CARE_TOKEN_ALGORITHMS", "RS256,HS512"),
        ("CARE_TOKEN_AUDIENCE", ""),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    code, line = failure(capsys)
    assert code == "invalid_setting"
    assert line.startswith(f"error: {variable}: ")


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"CARE_API_KEYS": "app:search:not-a-hash"}, "invalid_key_hash"),
        ({"CARE_API_KEYS_FILE": "/missing"}, "key_file_unreadable"),
        ({"CARE_API_KEYS_FILE": "/"}, "key_file_unreadable"),
        ({"CARE_API_KEYS_FILE": "/dev/null"}, "key_file_unreadable"),
        ({"CARE_TOKEN_ALGORITHMS": "EdDSA"}, "invalid_setting"),
        ({"CARE_TOKEN_KEYS": "/dev/null"}, "invalid_setting"),
        (
            {"CARE_TOKEN_KEYS": "/dev/null", "CARE_TOKEN_ALGORITHMS": "EdDSA, HS256"},
            "key_file_unreadable",
        ),
        ({"CARE_AUDIT_FILE": "/missing/audit"}, "audit_file_unwritable"),
        ({"CARE_REDIS_URL": "cache:6379", "CARE_CACHE_SECRET": "s"}, "invalid_setting"),
        ({"CARE_PAIR": "missing"}, None),
        ({"CARE_HOST": "192.0.2.1"}, "address_unavailable"),
    ],
)
def test_values_are_checked_before_the_index_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    code: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found, line = failure(capsys)
    assert code in (None, found)
    assert "care index" not in line
    if len(variables) == 1 and code not in ("invalid_key_hash", "no_api_keys", "invalid_setting"):
        assert next(iter(variables.values())) in line


def test_a_taken_port_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("CARE_PORT", str(port))
        code, line = failure(capsys)
    assert code == "address_unavailable"
    assert f"127.0.0.1:{port}" in line
    assert "CARE_PORT" in line


def test_a_missing_index_is_named_with_the_command_to_build_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, line = failure(capsys)
    assert "'test'" in line
    assert "care index" in line


def test_a_name_that_leaves_the_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_INDEX", "../test")
    assert "'../test'" in failure(capsys)[1]


def test_a_key_is_made_with_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "--name", "ops", "--role", "admin"]) == 0
    secret, entry = capsys.readouterr().out.splitlines()
    key = ApiKeys.parse(entry, "test").find(secret)
    assert key == Caller("ops", (Grant("test", "admin"),))
    assert main(["key", "--name", "care_ops"]) == 1
    assert error_code(capsys.readouterr().err) == "invalid_key_name"


def test_a_key_for_indexes_is_made_with_an_entry_of_toml(
    capsys: pytest.CaptureFixture[str],
) -> None:
    filter_ = ["--filter", "department=内科", "--filter", "year>=2020"]
    where = ["--index", "ward-*", "--index", "lab", "--expires", "2999-12-31"]
    assert main(["key", "--name", "app", *where, *filter_]) == 0
    secret, *entry = capsys.readouterr().out.splitlines()
    key = ApiKeys.parse_toml("\n".join(entry)).find(secret)
    assert key is not None
    bounds = parse_filter({"department": "内科", "year": {"gte": 2020}})
    assert key.grants == tuple(Grant(each, "search", bounds) for each in ("ward-*", "lab"))
    assert key.expires == datetime(3000, 1, 1, tzinfo=UTC)
    assert main(["key", "--name", "app", "--index", "lab", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert ApiKeys.parse_toml(made["entry"]).find(made["secret"])


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--filter", "a=b"], None),
        (["--expires", "2999-12-31"], None),
        (["--index", "lab", "--expires", "tomorrow"], None),
        (["--index", "lab", "--filter", "a"], None),
        (["--index", "../lab"], "invalid_grant"),
        (["--index", "lab", "--role", "admin", "--filter", "a=b"], "invalid_grant"),
    ],
)
def test_a_wrong_grant_makes_no_key(
    capsys: pytest.CaptureFixture[str], options: list[str], code: str | None
) -> None:
    assert main(["key", "--name", "app", *options]) == (1 if code else 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert not code or error_code(err) == code
