import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import __main__
from service.__main__ import main
from tests.encoders import BigramEncoder


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Puts back what the command changes."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(__main__, "load_query_encoder", lambda _: BigramEncoder())
    monkeypatch.setenv("CARE_INDEXES", str(tmp_path / "indexes"))
    monkeypatch.setenv("CARE_INDEX", "test")
    monkeypatch.setenv("CARE_PORT", "0")


def failure(capsys: pytest.CaptureFixture[str]) -> str:
    """Runs the command, which must fail with one line, and returns it."""
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
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
        ("CARE_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert failure(capsys).startswith(f"error: {variable}: ")


def test_the_command_ends_with_status_1_and_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "service"],
        env=os.environ | {"CARE_PORT": "http"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: CARE_PORT: ")
    assert result.stderr.count("\n") == 1


def test_a_taken_port_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("CARE_PORT", str(port))
        message = failure(capsys)
    assert f"127.0.0.1:{port} cannot be used" in message
    assert "set CARE_HOST or CARE_PORT to another" in message


def test_an_address_that_is_not_ours_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_HOST", "192.0.2.1")
    assert "192.0.2.1:8000 cannot be used" in failure(capsys)


def test_an_unknown_pair_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_PORT", "0")
    monkeypatch.setenv("CARE_PAIR", "missing")
    assert re.search("unknown pair .missing.: registered are .*care-mini", failure(capsys))


@pytest.mark.usefixtures("without_model")
def test_a_missing_index_is_named_with_the_command_to_build_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = failure(capsys)
    assert "index 'test' has no active version" in message
    assert "make build-index" in message


@pytest.mark.usefixtures("without_model")
def test_a_name_that_leaves_the_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_INDEX", "../test")
    assert "'../test' is no index name" in failure(capsys)
