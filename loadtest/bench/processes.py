"""What is measured: the service and other servers, and phases of work in fresh processes."""

import argparse
import json
import logging
import os
import re
import resource
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints
from unittest.mock import patch

import psutil

from core.errors import CareError
from core.service_process import ServerProcess, running_service
from loadtest.traffic import SAMPLE
from models.pairs import DEFAULT_PAIR

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What the scenarios of `python -m loadtest.bench` are given."""

    indexes: Annotated[Path, "Folder of the indexes."] = Path("indexes")
    index: Annotated[str, "Name of the index that is searched."] = "medical-qa"
    pair: Annotated[str, "The pair that it was built with: registered, or a .toml."] = DEFAULT_PAIR
    queries: Annotated[Path, "JSONL with `text`."] = SAMPLE
    out: Annotated[Path, "Folder of the results."] = Path("loadtest/results")
    weights: Annotated[Path, "What `loadtest.bench.weights` wrote."] = Path("builds/bench/weights")
    sentence_transformers: Annotated[
        Path, "Python of the environment with sentence-transformers."
    ] = Path(".venv-bench/bin/python")
    infinity: Annotated[Path, "Python of the environment with infinity-emb."] = Path(
        ".venv-bench-infinity/bin/python"
    )
    seconds: Annotated[int, "Length of one measurement [s]."] = 8
    rounds: Annotated[int, "Measurements of each kind; kinds alternate."] = 3
    connections: Annotated[int, "Clients at once where the service should be full."] = 64
    top_k: Annotated[int, "Hits wanted of each question."] = 10
    only: Annotated[str, "The scenarios to run, joined by commas, or all."] = ""

    @contextmanager
    def service(self, **settings: str) -> Iterator["Server"]:
        """Runs the service over the index; `settings` are CARE_… without the prefix."""
        with running_service(self.indexes, self.index, self.pair, **settings) as server:
            yield Server(server)


def parse_options(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """Reads a command line into a dataclass and shows what is logged.

    Each field is an option, or several values if it is a tuple; its annotation holds the help.
    """
    parser = argparse.ArgumentParser()
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):  # type: ignore[arg-type]
        hint, about = get_args(hints[field.name])
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=get_args(hint)[0] if get_args(hint) else hint,
            nargs="*" if get_origin(hint) is tuple else None,
            default=field.default,
            help=about.replace("%", "%%"),
        )
    chosen = vars(parser.parse_args(arguments))
    _log()
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})


def options_json(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass; of an absolute path the last part, for others to read."""

    def written(value: Any) -> Any:
        if not isinstance(value, Path):
            return value
        return value.name if value.is_absolute() else str(value)

    return {name: written(value) for name, value in asdict(options).items()}


class Server:
    """A running server: requests to it, and what its process uses."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self.process = psutil.Process(server.process.pid)

    def rss(self) -> int:
        """Returns the resident memory [bytes]."""
        return int(self.process.memory_info().rss)

    def cpu(self) -> float:
        """Returns the processor seconds so far."""
        return float(sum(self.process.cpu_times()[:2]))

    def get(self, path: str) -> str:
        """Returns the body of the response to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Any) -> Any:
        """Returns the JSON that answers a POST of JSON."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's series in `GET /metrics`."""
        series = re.compile(rf"^{name}(?:\{{.*\}})? (\S+)$", re.MULTILINE)
        values = series.findall(self.get("/metrics"))
        if not values:
            message = f"{self.url}/metrics has no series {name}"
            raise CareError(message, code="metric_missing", metric=name)
        return sum(map(float, values))


@contextmanager
def sampled(read: Callable[[], int], every: float) -> Iterator[list[int]]:
    """Yields a list that a thread appends to: at the start, every so often [s], at the end."""
    samples = [read()]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(every):
            samples.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        samples.append(read())


def profiled(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Adds to what a function returns its seconds and the most memory of this process.

    Resident memory includes pages of mapped files.
    """
    started, worked = time.perf_counter(), time.process_time()
    with sampled(anonymous_bytes, every=0.05) as own:
        found = work(*arguments)
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "processor_seconds": round(time.process_time() - worked, 2),
        "peak_own_bytes": max(own),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **found,
    }


def anonymous_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process that no file backs [bytes].

    Pages of files count as resident while there is room, and are given back when there is none.
    """
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def in_process(work: Callable[..., Any], *arguments: Any, passive: bool = False) -> Any:
    """Runs a function in a fresh process: its memory is its own, and all given back.

    In a passive one, threads of OpenMP that wait do not spin.
    """
    variables = {"OMP_WAIT_POLICY": "PASSIVE"} if passive else {}
    with (
        patch.dict(os.environ, variables),
        ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_log) as pool,
    ):
        return pool.submit(work, *arguments).result()


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("faiss").setLevel(logging.WARNING)
