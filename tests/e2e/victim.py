"""A service under attack: processor time of its event loop, delays, memory, liveness.

The service is the real one with the loop of `tests/e2e/probe.py`. While an attack runs,
another thread asks `GET /health/live` ten times a second.
"""

import asyncio
import http.client
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from core.choices import DEFAULT_PAIR
from core.records import read_jsonl, write_jsonl
from core.service_process import ServerProcess, start_service
from indexer.build import BuildOptions, build
from loadtest.bench.processes import Server, sampled
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.e2e.attacks import FIELDS, VALUES, Attack, Target, batch, send
from tests.e2e.probe import ProbeLog

_SAMPLE = Path("data/sample/corpus.jsonl")
_INDEX = "hostile"
_TEXTS = 32
_PROBE_SECONDS = 0.1
# As in deploy/kubernetes.
_PROBE_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one attack did to the service.

    Attributes:
        outcomes: Number of requests or connections by outcome.
        search: The outcome of an ordinary search afterwards.
        callback_ms: Processor time of the longest callback of the event loop [ms].
        callback: The function or coroutine that it called.
        lag_ms: Largest delay of a timer in the event loop [ms].
        measured: Processor time of the measured callbacks, as a share of the loop's thread.
        probes: Requests to /health/live while the attack ran.
        probes_failed: Those without status 200 within 5 s.
        probe_ms: The longest time of one [ms].
        rss_bytes: Resident memory before, at its peak, and after the attack [bytes].
        processor_seconds: Processor time of the service [s].
        seconds: Duration of the attack [s].
    """

    outcomes: dict[str, int]
    search: str
    callback_ms: float
    callback: str
    lag_ms: float
    measured: float
    probes: int
    probes_failed: int
    probe_ms: float
    rss_bytes: dict[str, int]
    processor_seconds: float
    seconds: float


class Victim:
    """A running service under attack."""

    def __init__(self, process: ServerProcess, log: ProbeLog) -> None:
        self.server = Server(process)
        self._log = log

    def target(self, hold: float) -> Target:
        """Returns its address for attacks that hold connections for `hold` seconds."""
        parts = urlsplit(self.server.url)
        return Target(str(parts.hostname), parts.port or 80, hold)

    def suffer(self, attack: Attack, hold: float) -> Finding:
        """Runs an attack to its end, then an ordinary search."""
        target = self.target(hold)
        self._log.summary()
        before, worked, started = self.server.rss(), self.server.cpu(), time.perf_counter()
        with sampled(self.server.rss, every=0.02) as rss, _probed(target) as probes:
            outcomes = asyncio.run(attack(target))
        seconds = time.perf_counter() - started
        (search,) = asyncio.run(send(target, batch(1, top_k=3)))
        loop, after = self._log.summary(), self.server.rss()
        return Finding(
            outcomes=dict(sorted(outcomes.items())),
            search=search,
            callback_ms=loop.callback_ms,
            callback=loop.callback,
            lag_ms=loop.lag_ms,
            measured=round(loop.measured, 3),
            probes=len(probes),
            probes_failed=probes.count(None),
            probe_ms=round(max((ms for ms in probes if ms is not None), default=0.0), 1),
            rss_bytes={"before": before, "peak": max(*rss, after), "after": after},
            processor_seconds=round(self.server.cpu() - worked, 2),
            seconds=round(seconds, 1),
        )


@contextmanager
def victim(
    indexes: Path, pair: str = DEFAULT_PAIR, open_files: int | None = None, **settings: str
) -> Iterator[Victim]:
    """Runs the service with the index of `build_index` and a probed event loop."""
    with TemporaryDirectory(prefix="probe-") as folder:
        log = Path(folder) / "log"
        limit = ["--open-files", str(open_files)] if open_files else []
        launcher = ["-m", "tests.e2e.probe", str(log), *limit]
        defaults = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        environment = defaults | dict(os.environ)
        given = {"PAIR": pair, "LOG_LEVEL": "error", "CACHE_ENTRIES": "0", **settings}
        with start_service(indexes, _INDEX, given, environment, launcher=launcher) as process:
            yield Victim(process, ProbeLog(log))


def build_index(folder: Path, documents: int, pair: str = DEFAULT_PAIR) -> Path:
    """Builds an index with 16 metadata fields of 100 values; returns the folder of indexes.

    The documents repeat 32 texts of the sample corpus, so that only these are encoded. An index
    that exists is kept.
    """
    indexes = folder / "indexes"
    if (indexes / _INDEX / "CURRENT").is_file():
        return indexes
    folder.mkdir(parents=True, exist_ok=True)
    sample = [record for _, record in islice(read_jsonl(_SAMPLE), _TEXTS)]
    corpus = folder / "hostile.jsonl"
    records = (
        {
            **sample[i % len(sample)],
            "_id": f"d{i}",
            "metadata": {field: VALUES[(i + n) % len(VALUES)] for n, field in enumerate(FIELDS)},
        }
        for i in range(documents)
    )
    write_jsonl(corpus, records)
    loaded = load_pair(pair)
    options = BuildOptions(
        str(corpus),
        _INDEX,
        indexes=indexes,
        builds=folder / "builds",
        factory="Flat",
        progress=False,
    )
    document, query = (OnnxEncoder(s, loaded.folder, 1) for s in (loaded.document, loaded.query))
    build(options, document, query)
    return indexes


@contextmanager
def _probed(target: Target) -> Iterator[list[float | None]]:
    """Yields the times of requests to /health/live [ms]; None if one fails."""
    times: list[float | None] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            try:
                connection = http.client.HTTPConnection(
                    target.host, target.port, timeout=_PROBE_TIMEOUT
                )
                connection.request("GET", "/health/live")
                live = connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                live = False
            finally:
                connection.close()
            times.append(1000 * (time.perf_counter() - started) if live else None)
            stop.wait(_PROBE_SECONDS)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()
