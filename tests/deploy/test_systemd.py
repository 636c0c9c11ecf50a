"""The unit of systemd is valid and hardened; its command serves, writes nothing, and drains."""

import os
import re
import shlex
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from core.service_process import free_port, running_server
from service.settings import known_variables
from tests.deploy.tools import DEPLOY, run

pytestmark = [pytest.mark.deploy, pytest.mark.e2e]

UNIT = (DEPLOY / "care.service").read_text("utf-8")
STATE = "/var/lib/care"
PROGRAM = "/opt/care/current/bin/care"
# A service ends within this time after the drain [s].
ENDS_WITHIN = 10


def values(name: str) -> list[str]:
    """The values of a directive of the unit, in order."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def environment() -> dict[str, str]:
    pairs = [pair for line in values("Environment") for pair in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "care.service"
    unit.write_text(UNIT.replace(PROGRAM, sys.executable))
    assert run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit) == ""


def test_the_unit_is_hardened() -> None:
    run("systemd-analyze", "security", "--offline=true", "--threshold=20", DEPLOY / "care.service")
    for directive in ("MemoryMax", "User"):
        assert values(directive)
    assert values("ProtectSystem") == ["strict"]
    assert values("NoNewPrivileges") == ["yes"]
    # Nothing can be written: no folder of the service is an exception.
    assert not re.search("^(ReadWritePaths|StateDirectory)", UNIT, re.MULTILINE)


def test_the_service_has_time_to_drain_before_it_is_killed() -> None:
    assert environment().keys() <= known_variables()
    (seconds,) = values("TimeoutStopSec")
    assert float(environment()["CARE_DRAIN_SECONDS"]) + ENDS_WITHIN < float(seconds)
    assert values("KillMode") == ["mixed"]


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_it_serves_and_drains_with_nothing_but_the_variables_of_the_unit(
    indexes: Path, tmp_path: Path
) -> None:
    (start,) = values("ExecStart")
    program, *arguments = shlex.split(start)
    assert program == PROGRAM
    state = tmp_path / "state"
    state.mkdir()
    (state / "indexes").symlink_to(indexes)
    before = sorted(state.rglob("*")), sorted(indexes.rglob("*"))
    port = str(free_port())
    # As in /etc/care/care.env.
    given = {"CARE_INDEX": "test", "CARE_PORT": port, "CARE_WORKERS": "2"}
    variables = {name: value.replace(STATE, str(state)) for name, value in environment().items()}
    variables |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(DEPLOY.parent), **given}
    command = [sys.executable, "-m", "care", *arguments]
    url = f"http://127.0.0.1:{port}"
    with running_server(
        command, url, "/health/ready", environment=variables, folder=state
    ) as server:
        assert status(f"{url}/index") == 200
        began = time.monotonic()
        server.process.terminate()
        while status(f"{url}/health/ready") == 200:
            assert time.monotonic() < began + ENDS_WITHIN
        assert status(f"{url}/index") == 200
        assert server.process.wait(float(values("TimeoutStopSec")[0])) == 0
    assert time.monotonic() - began >= float(variables["CARE_DRAIN_SECONDS"])
    assert (sorted(state.rglob("*")), sorted(indexes.rglob("*"))) == before
