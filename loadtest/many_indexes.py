"""Measures a service of many indexes: its start, the first query to each, steady queries, memory.

    care index corpus.jsonl --index base
    python -m loadtest.many_indexes --queries queries.jsonl --count 500

The indexes are copies of one index; they stay beside it, as many-0000 and so on.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core.service_process import ServerProcess, start_service
from core.versions import IndexFolder
from loadtest.copies import Connection, copy_index, quantiles

_CONNECTIONS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.many_indexes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--indexes", type=Path, default=Path("indexes"), help="folder of indexes")
    parser.add_argument("--index", default="base", help="the index that is copied")
    parser.add_argument("--count", type=int, default=500, help="number of copies")
    parser.add_argument("--queries", type=Path, required=True, help="JSONL with text or query")
    parser.add_argument("--workers", default="1", help="workers of the service")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement")
    options = parser.parse_args(arguments)
    queries = [record.get("text") or record["query"] for record in _read(options.queries)]
    names = _copies(IndexFolder(options.indexes, options.index), options.count)
    started = time.perf_counter()
    settings = {"WORKERS": options.workers, "CACHE_ENTRIES": "0"}
    service = start_service(options.indexes, options.index, settings)
    try:
        print(f"start: {time.perf_counter() - started:.2f} s; {_memory(service)}")
        _measure(service, names, queries, options.seconds)
    finally:
        service.process.terminate()
        service.process.wait()
    return 0


def _measure(
    service: ServerProcess, names: Sequence[str], queries: Sequence[str], seconds: float
) -> None:
    first = [_ask(Connection(service.url), name, queries[0]) for name in names]
    print(f"first query to each: {quantiles(first)}; {_memory(service)}")
    # Until all workers have all indexes open.
    _load(service, names, queries, 2 * seconds)
    for _ in range(3):
        for label, some in ((names[0], names[:1]), (f"{len(names)} indexes", names)):
            times = _load(service, some, queries, seconds)
            print(f"{label}: {len(times) / seconds:,.0f} queries/s, {quantiles(times)}")
    print(f"at the end: {_memory(service)}")


def _read(path: Path) -> Iterable[dict[str, str]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _copies(base: IndexFolder, count: int) -> list[str]:
    """Returns the names of copies of an index, which are made if they do not exist."""
    names = [f"many-{i:04}" for i in range(count)]
    for name in names:
        copy_index(base, name)
    return names


def _ask(connection: Connection, index: str, query: str) -> float:
    """Returns the time of a search [ms]."""
    return connection.ask("POST", f"/indexes/{index}/search", {"query": query})[0]


def _load(
    service: ServerProcess,
    names: Sequence[str],
    queries: Sequence[str],
    seconds: float,
) -> list[float]:
    """Returns the times of searches over several connections at once [ms]."""
    end = time.perf_counter() + seconds

    def search(seed: int) -> list[float]:
        chosen, connection = random.Random(seed), Connection(service.url)
        times = []
        while time.perf_counter() < end:
            times.append(_ask(connection, chosen.choice(names), chosen.choice(queries)))
        return times

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return [one for times in pool.map(search, range(_CONNECTIONS)) for one in times]


def _memory(service: ServerProcess) -> str:
    """Describes the private memory of all processes, and the maps and files of the largest."""
    parent = service.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    folders = [Path(f"/proc/{process}") for process in (parent, *children)]
    kilobytes = sum(
        int(line.split()[1])
        for folder in folders
        for line in (folder / "smaps_rollup").read_text().splitlines()
        if line.startswith("Pss_Anon:")
    )
    maps = max(len((folder / "maps").read_text().splitlines()) for folder in folders)
    files = max(sum(1 for _ in (folder / "fd").iterdir()) for folder in folders)
    return f"{kilobytes / 1024:.0f} MB private, {maps:,} maps, {files:,} open files"


if __name__ == "__main__":
    sys.exit(main())
