"""Servers and new processes of the benchmarks, and measurement of their resources."""

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from core.errors import CareError
from core.loopback import open_local
from core.service_process import ServerProcess, free_port, running_server, running_service
from loadtest.bench.options import ServiceOptions
from service.observe.metrics import SHARED_SECONDS


@contextmanager
def bench_service(options: ServiceOptions, **settings: str) -> Iterator["Server"]:
    """Runs the service with the index; `settings` are CARE_* variables without the prefix."""
    settings = {"WORKERS": str(options.workers)} | settings
    with running_service(options.indexes, options.index, options.pair, **settings) as server:
        yield Server(server)


@contextmanager
def peer_server(
    name: str,
    python: Path,
    variables: Mapping[str, str],
    folder: Path | None = None,
    workers: int = 1,
) -> Iterator["Server"]:
    """Runs an application of `baselines/app.py` with uvicorn, in `workers` processes.

    `name` is that of its function there, `python` the Python of its environment. `variables` are
    environment variables besides those of this process; `folder` is its working directory.
    """
    port = free_port()
    command = [
        *(str(python.absolute()), "-m", "uvicorn", "app:app"),
        *("--app-dir", str(Path(__file__).with_name("baselines"))),
        *("--port", str(port), "--log-level", "warning", "--no-access-log"),
        *("--workers", str(workers)),
    ]
    url, environment = f"http://127.0.0.1:{port}", os.environ | variables | {"BENCH_PEER": name}
    with running_server(
        command, url, "/openapi.json", environment=environment, folder=folder
    ) as server:
        yield Server(server)


class Server:
    """A running server: sends requests and measures the resources of its processes."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self.process = psutil.Process(server.process.pid)

    def rss(self) -> int:
        """Returns the memory [bytes]; of a shared page each process has an equal part (PSS)."""
        return sum(int(process.memory_full_info().pss) for process in self._processes())

    def cpu(self) -> float:
        """Returns the CPU seconds used so far."""
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def get(self, path: str) -> str:
        """Sends a GET; returns the body of the response."""
        with open_local(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any) -> Any:
        """Sends a POST of JSON; returns the JSON of the response."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with open_local(request, timeout=30) as response:
            return json.load(response)

    def metrics(self) -> str:
        """Returns the current metrics: waits until no earlier response is shared any more."""
        time.sleep(SHARED_SECONDS)
        return self.get("/metrics")

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's series in `GET /metrics`; CareError if there is none."""
        series = re.compile(rf"^{name}(?:\{{.*\}})? (\S+)$", re.MULTILINE)
        values = series.findall(self.metrics())
        if not values:
            message = f"{self.url}/metrics has no series {name}"
            raise CareError(message, code="metric_missing", metric=name)
        return sum(map(float, values))


@contextmanager
def sampled(read: Callable[[], int], every: float) -> Iterator[list[int]]:
    """Yields a list of samples, taken at the start, every `every` seconds, and at the end."""
    samples = [read()]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(every):
            samples.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
        samples.append(read())


def run_in_new_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a new process, in which waiting OpenMP threads do not spin."""
    with (
        patch.dict(os.environ, OMP_WAIT_POLICY="PASSIVE"),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(work, *arguments).result()
