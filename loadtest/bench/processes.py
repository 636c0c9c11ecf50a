"""Servers and new processes of the benchmarks, their load by wrk, and their resources."""

import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from core.choices import Mode
from core.errors import CareError
from core.loopback import open_local
from core.service_process import ServerProcess, free_port, running_server, running_service
from loadtest.bench.results import ServiceOptions
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


WARM_UP_SECONDS = 2
_SCRIPT = Path(__file__).with_name("search.lua")


def bodies(
    texts: Iterable[str], top_k: int, mode: Mode = "dense", *, rerank: bool = False
) -> list[str]:
    """Returns JSON bodies of `POST /search`; other systems search by vectors alone."""
    fields = {"top_k": top_k, "mode": mode} | ({"rerank": True} if rerank else {})
    return [json.dumps({"query": text, **fields}, ensure_ascii=False) for text in texts]


def drive(url: str, requests: Iterable[str], connections: int, seconds: int) -> dict[str, Any]:
    """Sends JSON bodies, without line breaks, to `POST /search` in turn for some seconds, by wrk.

    The loop is closed: each connection sends the next request after the last response. wrk uses
    less than 1 % of the CPUs that it shares with the service; a Python client uses a quarter of a
    CPU at the rates of cached queries.

    Returns `qps`, requests with status 2xx or 3xx per second; the latencies `p50_ms`, `p90_ms`,
    `p99_ms` and `max_ms`; `requests`, `seconds` and `connections` of the run; and its `errors` by
    kind. CareError if wrk is missing or fails, or a request fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "bodies.jsonl"
        lines.write_text("\n".join(requests), encoding="utf-8")
        command = [
            *("wrk", "--threads", "1", "--connections", str(connections)),
            *("--duration", f"{seconds}s", "--timeout", "30s", "--script", str(_SCRIPT)),
            *(url, "--", "/search", str(lines)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            message = "wrk is missing; on Debian and Ubuntu: apt-get install wrk"
            raise CareError(message, code="wrk_missing") from error
    try:
        load: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError as error:
        message = f"wrk failed: {(done.stderr or done.stdout).strip()}"
        raise CareError(message, code="wrk_failed", status=done.returncode) from error
    if any(load["errors"].values()) or not load["requests"]:
        failed = ", ".join(f"{kind} {count}" for kind, count in load["errors"].items() if count)
        message = f"{load['requests']} requests to {url}, of which failed: {failed or 'none'}"
        raise CareError(message, code="requests_failed", **load["errors"])
    return load | {"connections": connections, "qps": load["requests"] / load["seconds"]}
