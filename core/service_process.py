"""Starts and stops the search service, or another server, as a child process."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Self

from core.errors import CareError
from core.loopback import open_local

# The import of model libraries takes minutes if their files are not in the page cache.
_START_WITHIN = 180.0
_STOP_WITHIN = 30.0
_POLL_EVERY = 0.01
# Below those that Linux gives to connections, which therefore take none before its server binds it.
_PORTS = range(20_000, 32_768)
# Loaded here: a new process must not load a library before it runs its program.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server; `url` is its address on the loopback interface."""

    url: str
    process: "subprocess.Popen[bytes]"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Sends SIGTERM and, after 30 s, SIGKILL; returns the exit status."""
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
    *,
    launcher: Sequence[str] = ("-m", "care", "serve"),
    ends_with_caller: bool = False,
) -> ServerProcess:
    """Starts `care serve`, on a free port unless `PORT` is set, and waits until it is ready.

    It has one worker unless `WORKERS` is set.

    Variables `CARE_*` and `OTEL_*` of the caller are not inherited: API keys or limits that are
    set for another service must not apply to this one. `CARE_PAIRS` is, so that both find the same
    pairs.

    Args:
        settings: Settings without the prefix `CARE_`, for example `{"PAIR": "care-mini"}`.
        environment: Variables of the process; by default those of the caller.
        launcher: Arguments of Python that run the service.
        ends_with_caller: Whether the service ends when the caller is killed. The main thread must
            then make the call.

    Raises:
        CareError: If the service does not start; its output is on standard error.
    """
    inherited = {
        name: value
        for name, value in (os.environ if environment is None else environment).items()
        if name == "CARE_PAIRS" or not name.startswith(("CARE_", "OTEL_"))
    }
    given = {"INDEXES": str(indexes), "INDEX": index, "PORT": "0", "LOG_LEVEL": "warning"}
    given["WORKERS"] = "1"
    variables = {f"CARE_{name}": value for name, value in (given | dict(settings or {})).items()}

    def announced(output: IO[bytes]) -> str | None:
        output.seek(0)
        line = output.readline().decode()
        return line.split()[-1] if line.endswith("\n") else None

    before = partial(end_with, os.getpid()) if ends_with_caller else None
    command = [sys.executable, *launcher]
    return _start(command, inherited | variables, None, announced, before)


def running_service(
    indexes: Path | str, index: str, pair: str | None = None, **settings: str
) -> ServerProcess:
    """Starts the service, which the `with` block stops at its end; see `start_service`."""
    return start_service(indexes, index, settings | ({"PAIR": pair} if pair else {}))


def running_server(
    command: Sequence[str],
    url: str,
    ready: str,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> ServerProcess:
    """Starts any HTTP server, which the `with` block stops at its end.

    Args:
        url: Address of the server, on this machine.
        ready: Path that returns status 200 once the server is ready.
        environment: All variables of the process; none is inherited.

    Raises:
        CareError: If the server exits or is not ready in time.
    """

    def ready_url(_: IO[bytes]) -> str | None:
        try:
            with open_local(url + ready, timeout=30):
                return url
        except (urllib.error.URLError, OSError):
            return None

    return _start(list(command), environment, folder, ready_url)


def free_port() -> int:
    """Returns a free port of the loopback interface, one of `_PORTS` if it can."""
    with socket.socket() as probe:
        for port in random.SystemRandom().sample(_PORTS, 20):
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_with(parent: int) -> None:
    """Lets this process get SIGTERM when its parent ends, even by SIGKILL; on Linux only.

    It is called in a new process (`preexec_fn`) with the id of the process that starts it, whose
    main thread must be the one that does so: the signal comes when that thread ends.
    """
    if _PRCTL:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def _start(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path | None,
    address: Callable[[IO[bytes]], str | None],
    before: Callable[[], None] | None = None,
) -> ServerProcess:
    """Starts a process and waits until `address` returns the server's URL from its output."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdout=output,
            preexec_fn=before,
        )
        end = time.monotonic() + _START_WITHIN
        try:
            while process.poll() is None and time.monotonic() < end:
                if url := address(output):
                    return ServerProcess(url, process)
                time.sleep(_POLL_EVERY)
            name, status = " ".join(command[1:4]), process.poll()
            if status is None:
                message = f"'{name}' was not ready within {_START_WITHIN:.0f} s"
                raise CareError(message, code="server_not_ready")
            reason = f"exited with status {status} before it was ready: see its output above"
            raise CareError(f"'{name}' {reason}", code="server_ended", status=status)
        except BaseException:
            process.kill()
            process.wait()
            raise
