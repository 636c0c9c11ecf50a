"""Server processes under test: the service, or what it is compared with."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from loadtest.bench.options import BenchError, Options

# Model libraries import slowly where nothing is in the page cache.
_START_WITHIN = 180.0
_STOP_WITHIN = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    process: psutil.Process

    def rss(self) -> int:
        """Resident memory [bytes]."""
        return int(self.process.memory_info().rss)

    def cpu(self) -> float:
        """Processor seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def get(self, path: str) -> str:
        """The body of the answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any) -> Any:
        """The JSON that answers a POST of JSON."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        """The sum of a metric's series in `GET /metrics`.

        Raises:
            BenchError: If there is no such series.
        """
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        if not values:
            raise BenchError(f"the service does not show {name}")
        return sum(values)


@contextmanager
def run_service(options: Options, **settings: str) -> Iterator[Server]:
    """Runs the service over the index under test; `settings` are CARE_… without the prefix."""
    fixed = {
        "INDEXES": str(options.indexes),
        "INDEX": options.index,
        "PAIR": options.pair,
        "LOG_LEVEL": "warning",
    }
    port = free_port()
    variables = {f"CARE_{k}": v for k, v in (fixed | settings | {"PORT": str(port)}).items()}
    # What the caller's shell sets must not change what is measured.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CARE_", "OTEL_"))}
    command = [sys.executable, "-m", "service"]
    with run_server(command, port, "/health/ready", inherited | variables) as server:
        yield server


@contextmanager
def run_server(
    command: Sequence[str],
    port: int,
    ready: str,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Iterator[Server]:
    """Runs a server until the block ends.

    Args:
        command: What starts it.
        port: Where it listens, on the loopback address.
        ready: Path that is answered with 200 once it serves.
        environment: All of its variables.
        folder: Where it runs, or None for here.

    Raises:
        BenchError: If it ends or does not answer in time.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
            _await(server, ready, process, log)
            yield server
        finally:
            _stop(process)


def _await(server: Server, ready: str, process: "subprocess.Popen[Any]", log: Any) -> None:
    end = time.monotonic() + _START_WITHIN
    while process.poll() is None and time.monotonic() < end:
        try:
            server.get(ready)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
        else:
            return
    log.seek(0)
    what = "does not answer" if process.poll() is None else "ended"
    command = " ".join(map(str, process.args)) if isinstance(process.args, list) else ""
    raise BenchError(f"{command} {what}:\n{log.read()[-2000:]}")


def _stop(process: "subprocess.Popen[Any]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Memory:
    """Resident memory of a server over time [bytes]."""

    samples: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, int]:
        """The first, the last and the largest sample."""
        first, last = self.samples[0], self.samples[-1]
        return {"before": first, "after": last, "max": max(self.samples)}


@contextmanager
def watch_memory(server: Server, every: float = 0.1) -> Iterator[Memory]:
    """Samples a server's memory at the start, every 100 ms, and at the end of the block."""
    memory = Memory([server.rss()])
    over = threading.Event()

    def sample() -> None:
        while not over.wait(every):
            memory.samples.append(server.rss())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()
        memory.samples.append(server.rss())
