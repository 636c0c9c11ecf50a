"""Histories of requests to the real service of two workers, while its processes are killed.

`python -m tests.e2e.histories --histories 50 --operations 200 --seed 1` prints their numbers.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Self
from urllib.parse import urlsplit

from care.cli.main import main as care
from core.service_process import ServerProcess, start_service
from tests.histories import History

_WRITER, _WORKER, _SERVICE = "writer", "worker", "service"
_MODULES = {_WRITER: "care.writer", _WORKER: "service.workers.worker"}
# Connections without requests stay open.
_PATIENT = {"CLIENT_TIMEOUT_SECONDS": "600", "KEEP_ALIVE_SECONDS": "600"}
# How long the service may take until it serves again [s].
_AGAIN = 120.0


class LiveService:
    """A service of two workers with one index, whose processes can be killed.

    Args:
        folder: Where the index is made.
        kinds: Weights of the kinds of processes to kill; of a service all are killed at once.
    """

    def __init__(self, folder: Path, kinds: dict[str, float]) -> None:
        self.kills: list[tuple[float, str]] = []
        self._kinds, self._indexes = kinds, folder / "indexes"
        self._lock, self._numbers = Lock(), count()
        records = [
            {
                "_id": f"base{i}",
                "text": f"第{i}段：发热两天，建议多饮水。",
                "metadata": {"document": f"base{i}", "group": "base", "write": 0},
            }
            for i in range(20)
        ]
        corpus = folder / "corpus.jsonl"
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        corpus.write_text("".join(lines), encoding="utf-8")
        folders = ["--indexes", str(self._indexes), "--builds", str(folder / "builds")]
        assert care(["index", str(corpus), "--index", "live", *folders]) == 0
        self._process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def connect(self) -> "HttpConnection":
        end = time.monotonic() + _AGAIN
        while True:
            try:
                return HttpConnection(self._process.url, next(self._numbers))
            except OSError as error:
                status = None if self._lock.locked() else self._process.process.poll()
                if status is not None or time.monotonic() > end:
                    raise RuntimeError(f"the service ended with status {status}") from error
                time.sleep(0.05)

    def kill(self, random: Random) -> None:
        """Kills the writer process, if it runs, a worker, or all processes, which start again.

        A worker is killed only while two serve: a service ends if its workers end at each start.
        """
        (kind,) = random.choices(list(self._kinds), list(self._kinds.values()))
        with self._lock:
            if not (found := self._wait_for(kind)):
                kind = _WORKER
                found = self._wait_for(kind)
            self.kills.append((inf, kind))
            os.kill(random.choice(found), signal.SIGKILL)
            if kind == _SERVICE:
                self._process.process.wait()
                self._process = self._start()
            else:
                time.sleep(0.1)  # what connects meanwhile may reach the process that ends
            self.kills[-1] = time.monotonic(), kind

    def _start(self) -> ServerProcess:
        settings = {"WORKERS": "2", "PAIR": "care-mini", "TIMEOUT_MS": "60000", **_PATIENT}
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        return start_service(self._indexes, "live", settings, environment | dict(os.environ))

    def _wait_for(self, kind: str) -> list[int]:
        """Returns the processes of a kind, when all of them serve; none if no writer runs."""
        if kind == _SERVICE:
            return [self._process.process.pid]
        end = time.monotonic() + _AGAIN
        while time.monotonic() < end:
            found = self._processes(kind)
            if kind == _WRITER or (len(found) == 2 and self._workers() == 2):
                return found
            time.sleep(0.05)
        raise TimeoutError("no two workers serve")

    def _processes(self, kind: str) -> list[int]:
        parent = self._process.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [
            int(child)
            for child in children
            if _MODULES[kind] in Path(f"/proc/{child}/cmdline").read_text().split("\0")
        ]

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

    def __init__(self, url: str, number: int) -> None:
        self.number, self.opened = number, time.monotonic()
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._connection.connect()
        # A lost connection is not to be opened again unseen.
        self._connection.auto_open = 0

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, str, Any]:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        self._connection.request(method, path, content, headers)
        response = self._connection.getresponse()
        return response.status, response.headers.get("ETag", ""), json.loads(response.read())

    def close(self) -> None:
        self._connection.close()


def run(
    histories: int, operations: int, seed: int, kills: int, kinds: dict[str, float]
) -> tuple[dict[str, Any], list[str]]:
    """Runs histories one after another; returns numbers for people, and what is wrong."""
    wrong: list[str] = []
    outcomes: Counter[str] = Counter()
    with (
        TemporaryDirectory(prefix="histories-") as folder,
        LiveService(Path(folder), kinds) as service,
    ):
        for number in range(seed, seed + histories):
            history = History(service, f"h{number}", number, operations, kills=kills)
            found = history.run()
            wrong += [f"seed {number}: {one}" for one in found]
            for event in (one for events in history.events.values() for one in events):
                outcomes[event.kind] += 1
            connection = service.connect()
            connection.ask("POST", "/documents/delete", {"ids": history.ids}, {})
            connection.close()
            done = f"seed {number}: {len(found)} violations, {len(service.kills)} kills so far"
            print(done, file=sys.stderr, flush=True)
        numbers = {
            "seeds": [seed, seed + histories - 1],
            "histories": histories,
            "operations": histories * operations,
            "events": dict(outcomes),
            "kills": dict(Counter(kind for _, kind in service.kills)),
            "violations": len(wrong),
        }
    return numbers, wrong


def main() -> int:
    """Runs histories as the command line says; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("histories", 50), ("operations", 200), ("seed", 1), ("kills", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the service too
    kinds = {_WRITER: 5.0, _WORKER: 4.0, _SERVICE: 1.0}
    numbers, wrong = run(given.histories, given.operations, given.seed, given.kills, kinds)
    print("\n".join(wrong))
    print(json.dumps(numbers))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
