"""The search service, or another server, as a child process: started, waited for, stopped."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from core.errors import CareError

# Model libraries import slowly where nothing is in the page cache.
_START_WITHIN = 180.0
_STOP_WITHIN = 30.0
_POLL_EVERY = 0.01


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that answers at `url`, on the loopback address."""

    url: str
    process: "subprocess.Popen[bytes]"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Sends SIGTERM, after 30 s SIGKILL, and returns the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(_STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_service(
    indexes: Path | str,
    index: str,
    settings: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Starts `python -m service`, on a free port unless `PORT` is given, and waits until it serves.

    Settings of the calling shell (`CARE_*`, `OTEL_*`) are not passed on: a service that is
    started for a purpose must not be closed by a key, or slowed by a limit, that was set for
    another.

    Settings come without `CARE_`, as in `{"PAIR": "care-mini"}`; `environment` are the process's
    variables instead of the caller's.

    Raises:
        CareError: If it does not start; what it printed is on standard error.
    """
    inherited = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if not name.startswith(("CARE_", "OTEL_"))
    }
    given = {"INDEXES": str(indexes), "INDEX": index, "PORT": "0", "LOG_LEVEL": "warning"}
    variables = {f"CARE_{name}": value for name, value in (given | dict(settings or {})).items()}

    def announced(output: IO[bytes]) -> str | None:
        output.seek(0)
        line = output.readline().decode()
        return line.split()[-1] if line.endswith("\n") else None

    return _start([sys.executable, "-m", "service"], inherited | variables, None, announced)


def running_service(
    indexes: Path | str, index: str, pair: str | None = None, **settings: str
) -> ServerProcess:
    """Runs the service until the block of a `with` ends; see `start_service`."""
    return start_service(indexes, index, settings | ({"PAIR": pair} if pair else {}))


def running_server(
    command: Sequence[str],
    url: str,
    ready: str,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> ServerProcess:
    """Runs any HTTP server until the block of a `with` ends.

    It listens at `url` and answers the path `ready` with 200 once it serves; `environment` are all
    of its variables.

    Raises:
        CareError: If it ends or does not answer in time.
    """

    def answers(_: IO[bytes]) -> str | None:
        try:
            with urllib.request.urlopen(url + ready, timeout=30):
                return url
        except (urllib.error.URLError, OSError):
            return None

    return _start(list(command), environment, folder, answers)


def free_port() -> int:
    """Returns a port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path | None,
    address: Callable[[IO[bytes]], str | None],
) -> ServerProcess:
    """Starts a process and waits until `address` finds out, from its output, where it serves."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=dict(environment), cwd=folder, stdout=output)
        end = time.monotonic() + _START_WITHIN
        try:
            while process.poll() is None and time.monotonic() < end:
                if url := address(output):
                    return ServerProcess(url, process)
                time.sleep(_POLL_EVERY)
            name, status = " ".join(command[1:3]), process.poll()
            if status is None:
                message = f"'{name}' did not answer within {_START_WITHIN:.0f} s"
                raise CareError(message, code="server_not_ready")
            reason = f"ended with status {status} before it served: what it printed says why"
            raise CareError(f"'{name}' {reason}", code="server_ended", status=status)
        except BaseException:
            process.kill()
            process.wait()
            raise
