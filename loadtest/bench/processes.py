"""What is measured: the service and other servers, and phases of work in fresh processes."""

import argparse
import json
import logging
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from unittest.mock import patch

import psutil

from core.errors import CareError
from core.service_process import ServerProcess, running_service
from loadtest.traffic import SAMPLE
from models.pairs import DEFAULT_PAIR

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What the scenarios of `python -m loadtest.bench` are given.

    Attributes:
        indexes: Folder of the indexes.
        index: Name of the index that is searched.
        pair: The pair that it was built with: a registered name or a .toml.
        queries: JSONL with `text`.
        out: Folder of the results.
        weights: Folder that `loadtest.bench.weights` wrote.
        sentence_transformers: Python of the environment with sentence-transformers.
        infinity: Python of the environment with infinity-emb.
        seconds: Length of one measurement [s].
        rounds: Measurements of each kind; kinds alternate.
        connections: Clients at once where the service should be full.
        top_k: Hits wanted of each question.
        only: The scenarios to run, joined by commas, or "" for all.
    """

    indexes: Path = Path("indexes")
    index: str = "medical-qa"
    pair: str = DEFAULT_PAIR
    queries: Path = SAMPLE
    out: Path = Path("loadtest/results")
    weights: Path = Path("builds/bench/weights")
    sentence_transformers: Path = Path(".venv-bench/bin/python")
    infinity: Path = Path(".venv-bench-infinity/bin/python")
    seconds: int = 8
    rounds: int = 3
    connections: int = 64
    top_k: int = 10
    only: str = ""

    @contextmanager
    def service(self, **settings: str) -> Iterator["Server"]:
        """Runs the service over the index; `settings` are CARE_… without the prefix."""
        with running_service(self.indexes, self.index, self.pair, **settings) as server:
            yield Server(server)


def parse_options(kind: type[T], arguments: Sequence[str] | None = None) -> T:
    """Reads a command line into a dataclass and shows what is logged.

    Args:
        kind: The dataclass. Each field is an option, or several values if it is a tuple; help
            texts are those of its docstring.
        arguments: The command line, or None for that of this process.
    """
    doc = re.sub(r"\s+", " ", " ".join(base.__doc__ or "" for base in kind.__mro__[:-1]))
    parser = argparse.ArgumentParser()
    for field, hint in zip(fields(kind), get_type_hints(kind).values(), strict=True):  # type: ignore[arg-type]
        about = re.search(rf" {field.name}: (.*?\.)(?: \w+: |\s*$)", doc)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=get_args(hint)[0] if get_args(hint) else hint,
            nargs="*" if get_origin(hint) is tuple else None,
            default=field.default,
            help=about and about[1].replace("%", "%%"),
        )
    chosen = vars(parser.parse_args(arguments))
    _log()
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})


def options_json(options: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, paths as text."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}


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
        times = self.process.cpu_times()
        return float(times.user + times.system)

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
        """Returns the sum of a metric's series in `GET /metrics`.

        Raises:
            CareError: If there is no such series.
        """
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


def anonymous_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process that no file backs [bytes].

    Pages of files count as resident while there is room, and are given back when there is none.
    """
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def in_process(work: Callable[..., Any], *arguments: Any, passive: bool = False) -> Any:
    """Runs a function in a fresh process: its memory is its own, and all given back.

    Args:
        work: The function.
        arguments: What it is called with.
        passive: Whether threads of OpenMP that wait must not spin.
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
