"""Histories of requests to the real service of two workers, while its processes meet faults.

`python -m tests.e2e.histories --histories 50 --operations 200 --seed 1` prints their numbers.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from http.client import HTTPConnection, HTTPException
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any, Self
from urllib.parse import urlsplit

from care.cli.main import main as care
from care.search import open_index
from core.service_process import ServerProcess, start_service
from core.types import Document
from models.pairs import write_pair
from tests.conftest import write_jsonl
from tests.encoders import make_pair
from tests.failpoints import (
    DISK_ERRORS,
    DISK_POINTS,
    KILL,
    POINTS,
    SERVICE,
    WORKER,
    WRITER,
    Failpoints,
    use_test_encoder,
)
from tests.histories import History

# The default index, and one that each worker loads by itself.
INDEXES = ("live", "other")
# In memory: files are flushed to disk several times in each commit.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Connections without requests stay open.
_PATIENT = {"CLIENT_TIMEOUT_SECONDS": "600", "KEEP_ALIVE_SECONDS": "600"}
# How long the service may take until it serves again, and until it reaches a point [s].
_AGAIN, _REACHED = 120.0, 5.0
# How often each kind of point is taken.
_SHARES = {WRITER: 6.0, WORKER: 3.0, SERVICE: 1.0, "disk": 2.0}


class LiveService:
    """A service of two workers with two indexes, whose processes can be killed.

    `folder` is where the indexes are made.
    """

    def __init__(self, folder: Path) -> None:
        self.kills: list[tuple[float, str]] = []
        self.failpoints = Failpoints(folder / "failpoints")
        self.indexes, self._pair = folder / "indexes", str(folder / "pair.toml")
        self._folder, self._failed = folder, Counter[str]()
        self._lock, self._numbers = Lock(), count()
        write_pair(make_pair(folder=folder), Path(self._pair))
        records = [
            {
                "_id": f"base{i}",
                "text": f"第{i}段：发热两天，建议多饮水。",
                "metadata": {"document": f"base{i}", "group": "base", "write": 0},
            }
            for i in range(20)
        ]
        for name in INDEXES:
            self.build(name, records)
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.stop()

    def build(self, name: str, records: list[dict[str, Any]]) -> None:
        """Builds an index with the test encoder."""
        corpus = write_jsonl(self._folder / "corpus.jsonl", records)
        self.command("index", str(corpus), "--index", name)

    def command(self, *arguments: str) -> None:
        """Runs a command on the indexes."""
        folders = ["--indexes", str(self.indexes), "--builds", str(self._folder / "builds")]
        with use_test_encoder(), redirect_stdout(sys.stderr):
            assert care([*arguments, "--pair", self._pair, *folders]) == 0

    def search(
        self, name: str, queries: list[str]
    ) -> tuple[list[list[tuple[str, float]]], list[Document]]:
        """Returns ids and scores of the hits of queries in all modes, and all documents."""
        with use_test_encoder(), open_index(name, indexes=self.indexes, pair=self._pair) as index:
            hits = [
                index.search(query, mode=mode, top_k=20)
                for query in queries
                for mode in index.modes
            ]
            return [[(hit.id, hit.score) for hit in one] for one in hits], [*index.documents()]

    def connect(self, index: str = INDEXES[0]) -> "HttpConnection":
        end = time.monotonic() + _AGAIN
        while True:
            try:
                return HttpConnection(self._process.url, next(self._numbers), index)
            except OSError as error:
                status = None if self._lock.locked() else self._process.process.poll()
                if status is not None or time.monotonic() > end:
                    raise RuntimeError(f"the service ended with status {status}") from error
                time.sleep(0.05)

    def fault(self, random: Random) -> None:
        """Lets a process die, or a file fail, at the point where that has happened least often.

        A worker is killed only while two serve: a service ends if its workers end at each start.
        """
        (kind,) = random.choices(list(_SHARES), list(_SHARES.values()))
        action = KILL if kind in POINTS else random.choice(DISK_ERRORS)
        points = POINTS.get(kind, DISK_POINTS)
        hits = self.failpoints.hits() + self._failed
        point = min(points, key=lambda one: (hits[f"{action} {one}"], random.random()))
        with self._lock:
            if kind == WORKER:
                self._wait_for_workers()
            self.kills.append((inf, kind))
            self.failpoints.arm(point, action)
            end = time.monotonic() + _REACHED
            while time.monotonic() < end and self.failpoints.is_armed(point):
                time.sleep(0.01)
            if self.failpoints.disarm(point):
                self._failed[f"{action} {point}"] += 1
                self.kills.pop()
                return
            if kind == SERVICE:
                self._process.process.wait()
                self._process = self._start()
            else:
                time.sleep(0.2)  # what connects meanwhile may reach the process that ends
            self.kills[-1] = time.monotonic(), kind

    @contextmanager
    def faults(self, seed: int) -> Iterator[None]:
        """Lets faults happen one after another while the block runs."""
        ends, random = Event(), Random(seed)

        def work() -> None:
            while not ends.wait(0.05):
                self.fault(random)

        thread = Thread(target=work, daemon=True)
        thread.start()
        yield
        ends.set()
        thread.join()

    def _start(self) -> ServerProcess:
        settings = {"WORKERS": "2", "PAIR": self._pair, "TIMEOUT_MS": "60000", **_PATIENT}
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        environment |= dict(os.environ) | self.failpoints.environment()
        return start_service(self.indexes, INDEXES[0], settings, environment)

    def _wait_for_workers(self) -> None:
        end = time.monotonic() + _AGAIN
        while self._workers() != 2:
            if time.monotonic() > end:
                raise TimeoutError("no two workers serve")
            time.sleep(0.05)

    def _workers(self) -> int:
        try:
            connection = HTTPConnection(urlsplit(self._process.url).netloc, timeout=10)
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
            connection.close()
        except (OSError, HTTPException):
            return 0
        return next((int(float(x.split()[1])) for x in lines if x.startswith("care_workers ")), 0)


class HttpConnection:
    """A connection that is kept open; see `tests.histories.Connection`."""

    def __init__(self, url: str, number: int, index: str) -> None:
        self.number, self.opened = number, time.monotonic()
        self._prefix = "" if index == INDEXES[0] else f"/indexes/{index}"
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._connection.connect()
        # A lost connection is not to be opened again unseen.
        self._connection.auto_open = 0

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, str, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        self._connection.request(method, self._prefix + path, content, headers)
        response = self._connection.getresponse()
        return response.status, response.headers.get("ETag", ""), json.loads(response.read())

    def close(self) -> None:
        self._connection.close()


class OfIndex:
    """An index of a service; see `tests.histories.Service`."""

    def __init__(self, service: LiveService, index: str) -> None:
        self.kills, self._service, self._index = service.kills, service, index

    def connect(self) -> HttpConnection:
        return self._service.connect(self._index)

    def kill(self, random: Random) -> None:
        self._service.fault(random)


class Runs:
    """Runs histories on the indexes of a service, some side by side.

    Attributes:
        wrong: What is wrong.
        done: Numbers of histories, and of events by kind.
    """

    def __init__(self, service: LiveService, operations: int, seeds: range, until: float) -> None:
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._service, self._operations, self._until = service, operations, until
        self._seeds, self._lock = iter(seeds), Lock()

    def work(self, lane: int) -> None:
        """Runs histories one after another; their documents are deleted before the next one."""
        service = OfIndex(self._service, INDEXES[lane % len(INDEXES)])
        ids: list[str] = []
        while time.monotonic() < self._until:
            with self._lock:
                seed = next(self._seeds, None)
            if seed is None:
                return
            if ids:
                with suppress(OSError, HTTPException):
                    connection = service.connect()
                    connection.ask("POST", "/documents/delete", {"ids": ids}, {})
                    connection.close()
            history = History(service, f"h{seed}", seed, self._operations)
            found, ids = history.run(), history.ids
            with self._lock:
                self.wrong += [f"seed {seed}: {one}" for one in found]
                self.done["histories"] += 1
                self.done.update(e.kind for events in history.events.values() for e in events)
                done = f"seed {seed}: {len(found)} violations, {len(service.kills)} faults so far"
            print(done, file=sys.stderr, flush=True)


def run(
    histories: int, operations: int, seed: int, side_by_side: int, seconds: float = inf
) -> tuple[dict[str, Any], list[str]]:
    """Runs histories, and compares the indexes with builds of the documents that are left.

    No history begins after some seconds. Returns numbers for people, and what is wrong.
    """
    with (
        TemporaryDirectory(prefix="histories-", dir=_FOLDER) as folder,
        LiveService(Path(folder)) as service,
    ):
        until = time.monotonic() + seconds
        runs = Runs(service, operations, range(seed, seed + histories), until)
        threads = [Thread(target=runs.work, args=[lane]) for lane in range(side_by_side)]
        with service.faults(seed):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        service.stop()
        for name in INDEXES:
            runs.wrong += compare(service, name)
        done = runs.done.pop("histories", 0)
        hits = service.failpoints.hits()
        numbers = {
            "seed": seed,
            "histories": done,
            "operations": done * operations,
            "events": dict(runs.done),
            "kills": {kind: sum(hits[f"{KILL} {p}"] for p in POINTS[kind]) for kind in POINTS},
            "errors": {name: n for name, n in sorted(hits.items()) if not name.startswith(KILL)},
            "points": {f"{k}: {p}": hits[f"{KILL} {p}"] for k in POINTS for p in POINTS[k]},
            "violations": len(runs.wrong),
        }
    return numbers, runs.wrong


def compare(service: LiveService, name: str) -> list[str]:
    """Merges an index; returns what differs from a build of the documents that it has."""
    queries = ["咳嗽三天", "发热两天，建议多饮水", "患者", "第7段"]
    _, documents = service.search(name, queries)
    service.command("merge", "--index", name)
    merged, order = service.search(name, queries)
    facts = [{"_id": d.id, "text": d.text, "metadata": dict(d.metadata)} for d in order]
    if sorted(d.id for d in documents) != sorted(d.id for d in order):
        return [f"care merge changes the documents of {name}"]
    service.build(f"{name}-built", facts)
    built, _ = service.search(f"{name}-built", queries)
    if merged != built:
        return [f"{name} differs from a build after care merge: {merged} {built}"]
    return []


def main() -> int:
    """Runs histories as the command line says; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    options = ("histories", 50), ("operations", 200), ("seed", 1), ("side-by-side", 8)
    for name, default in options:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minutes", type=float, default=inf)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the service too
    numbers, wrong = run(
        given.histories, given.operations, given.seed, given.side_by_side, given.minutes * 60
    )
    print("\n".join(wrong))
    print(json.dumps(numbers, ensure_ascii=False, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
