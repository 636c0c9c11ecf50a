"""Measures writes to a service while it is searched: time to be found, rates, bytes on disk.

    care index corpus.jsonl --index base
    python -m loadtest.live_writes --index base --documents more.jsonl --queries queries.jsonl

Documents are put into a copy of the index, which stays beside it as `base-live`. Searches come at
half of the rate that the service answers without writes.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from core.service_process import start_service
from core.versions import IndexFolder, read_manifest, write_manifest
from loadtest.traffic import read_texts

_CONNECTIONS = 16
_BATCH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.live_writes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of indexes")
    parser.add_argument("--index", default="base", help="the index that is copied")
    parser.add_argument("--documents", type=Path, required=True, help="JSONL of new documents")
    parser.add_argument("--queries", type=Path, required=True, help="JSONL with text or query")
    parser.add_argument("--workers", default="2", help="workers of the service")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each measurement")
    options = parser.parse_args(arguments)
    queries = read_texts(options.queries)
    lines = options.documents.read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    base = IndexFolder(options.indexes, options.index)
    name = f"{options.index}-live"
    shutil.rmtree(base.root / name, ignore_errors=True)
    copy_index(base, name)
    settings = {"WORKERS": options.workers, "CACHE_ENTRIES": "0"}
    service = start_service(options.indexes, name, settings)
    try:
        _measure(service.url, documents, queries, options.seconds, options.indexes / name)
    finally:
        service.process.terminate()
        service.process.wait()
    return 0


def _measure(
    url: str,
    documents: Sequence[dict[str, Any]],
    queries: Sequence[str],
    seconds: float,
    folder: Path,
) -> None:
    # New ids, and texts that are not known, as often as they are needed.
    new = (
        document | {"_id": f"live-{at}", "title": f"{document.get('title', '')} {at}"}
        for at, document in enumerate(cycle(documents))
    )
    Connection(url).ask("PUT", "/documents", next(new))  # starts the writer process
    rate = len(_search(url, queries, seconds, None)) / seconds
    print(f"searches as fast as they are answered: {rate:,.0f}/s")
    for _ in range(3):
        alone = _search(url, queries, seconds, rate / 2)
        print(f"searches at {rate / 2:,.0f}/s without writes: {quantiles(alone)}")
        before = _bytes(folder)
        with _beside(lambda: _put_singly(url, new, seconds)) as result:
            beside = _search(url, queries, seconds, rate / 2)
        times, size = result()
        written = _bytes(folder) - before
        print(f"searches beside single documents: {quantiles(beside)}")
        print(
            f"one document, until all searches find it: {quantiles(times)}; "
            f"{len(times) / seconds:.1f}/s, {written / max(size, 1):.0f} × its bytes on disk"
        )
    bulk = list(islice(new, min(len(documents), 4 * _BATCH)))
    before, started = _bytes(folder), time.perf_counter()
    for start in range(0, len(bulk), _BATCH):
        Connection(url).ask("PUT", "/documents", bulk[start : start + _BATCH])
    passed, size = time.perf_counter() - started, len(json.dumps(bulk, ensure_ascii=False).encode())
    print(
        f"{len(bulk)} documents in requests of {_BATCH}: {len(bulk) / passed:.0f}/s, "
        f"{(_bytes(folder) - before) / max(size, 1):.1f} × their bytes on disk"
    )


def _put_singly(
    url: str, documents: Iterator[dict[str, Any]], seconds: float
) -> tuple[list[float], int]:
    """Puts one document after another; returns the times [ms] and the bytes of all."""
    connection, end, size = Connection(url), time.perf_counter() + seconds, 0
    times: list[float] = []
    while time.perf_counter() < end:
        document = next(documents)
        times.append(connection.ask("PUT", "/documents", document)[0])
        size += len(json.dumps(document, ensure_ascii=False).encode())
    return times, size


def _search(url: str, queries: Sequence[str], seconds: float, rate: float | None) -> list[float]:
    """Returns the times of searches [ms]: at a rate [1/s], from when each was due, or at once."""
    started = time.perf_counter()

    def ask(first: int) -> list[float]:
        connection = Connection(url)
        times: list[float] = []
        for at, query in enumerate(islice(cycle(queries), first, None, _CONNECTIONS)):
            due = time.perf_counter()
            if rate:
                due = started + (at * _CONNECTIONS + first) / rate
                time.sleep(max(0.0, due - time.perf_counter()))
            if time.perf_counter() > started + seconds:
                return times
            connection.ask("POST", "/search", {"query": query})
            times.append((time.perf_counter() - due) * 1000)
        return times

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return [one for times in pool.map(ask, range(_CONNECTIONS)) for one in times]


@contextmanager
def _beside(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Runs work in a thread during the block; yields what returns its result."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work).result


def _bytes(folder: Path) -> int:
    """Returns the size of all files of an index, also of versions that will be deleted [bytes]."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Connection:
    """A keep-alive connection to a service."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = HTTPConnection(address.hostname or "", address.port, timeout=120)

    def ask(self, method: str, path: str, body: Any) -> tuple[float, dict[str, Any]]:
        """Returns the time of a request [ms] and its answer; AssertionError if it fails."""
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request(method, path, json.dumps(body), headers)
        response = self._connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return (time.perf_counter() - started) * 1000, json.loads(content)


def copy_index(base: IndexFolder, name: str) -> None:
    """Makes an index of another name that has a copy of the active version, unless it exists."""
    copy, version = IndexFolder(base.root, name), base.active()
    if copy.path.exists():
        return
    shutil.copytree(base.version(version), copy.version(version))
    manifest = read_manifest(base.version(version)).model_copy(update={"name": name})
    write_manifest(copy.version(version), manifest)
    copy.set_active(version)


def quantiles(times: Sequence[float]) -> str:
    """Describes times [ms]."""
    p50, p99 = np.percentile(times, [50, 99])
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
