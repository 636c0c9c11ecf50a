"""Measures writes to a service while it is searched: time to be found, rates, bytes on disk.

    care index corpus.jsonl --index base
    python -m loadtest.live_writes --index base --documents more.jsonl --queries queries.jsonl

Documents are put into a copy of the index, which stays beside it as `base-live`. Searches come at
half of the rate that the service sustains without writes, whether earlier ones are answered or not.
Of each figure the median of the rounds is printed, with its range.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request

import numpy as np

from core.loopback import open_local
from core.provenance import environment, hardware
from core.service_process import ServerProcess, start_service
from core.versions import IndexFolder, read_manifest, write_manifest
from loadtest.measurement import Measurement, Target, measure
from loadtest.open_loop import find_max, rate_grid
from loadtest.traffic import Mix, Traffic, read_texts

# The p99 of searches at the highest rate that the service sustains.
_BOUND_MS = 100.0
_CONNECTIONS = 16
# Rounds in which other processes may take more than `--others`.
_MOST_DISTURBED = 20
_BATCH = 100
# Delays each flush to a disk of the processes into which it is loaded; not to files in memory.
_SLOW_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <unistd.h>
static int slow(const char *name, int file) {
    struct statfs where;
    if (fstatfs(file, &where) || where.f_type != TMPFS_MAGIC)
        usleep(1000 * atoi(getenv("FSYNC_MS")));
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(file);
}
int fsync(int file) { return slow("fsync", file); }
int fdatasync(int file) { return slow("fdatasync", file); }
"""
# A service of one process whose cache of query vectors finds nothing.
_WITHOUT_VECTORS = """
import sys
from care.cli.main import main
from service.pipeline.cache import VectorCache
VectorCache.get = lambda *_: None
sys.exit(main(["serve"]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.live_writes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--indexes", type=Path, default=Path("indexes"), help="folder of indexes")
    add("--index", default="base", help="the index that is copied")
    add("--documents", type=Path, required=True, help="JSONL of new documents")
    add("--queries", type=Path, required=True, help="JSONL with text or query")
    add("--workers", default="2", help="workers of the service")
    add("--seconds", type=float, default=10.0, help="time of each measurement")
    add("--rounds", type=int, default=3, help="rounds of each measurement")
    add("--rate", type=float, help="searches a second, in place of half of the highest rate")
    add("--writes", type=float, help="writes a second; by default one follows the other")
    add("--flush-ms", type=int, default=0, help="time that each flush to disk takes longer")
    add("--others", type=float, default=0.2, help="processors that others may take in a round")
    add("--parts", default="single,bulk", help="of single, caches and bulk")
    options = parser.parse_args(arguments)
    queries = read_texts(options.queries)
    lines = options.documents.read_text(encoding="utf-8").splitlines()
    # New ids, and texts that are not known, as often as they are needed.
    new = (
        document | {"_id": f"live-{at}", "title": f"{document.get('title', '')} {at}"}
        for at, document in enumerate(cycle(map(json.loads, lines)))
    )
    base = IndexFolder(options.indexes, options.index)
    name = f"{options.index}-live"
    shutil.rmtree(base.root / name, ignore_errors=True)
    copy_index(base, name)
    print(hardware(), environment())
    with tempfile.TemporaryDirectory() as folder:
        slow = _slow_disk(Path(folder), options.flush_ms) if options.flush_ms else {}
        variables = dict(os.environ) | slow

        def start(settings: dict[str, str], *code: str) -> ServerProcess:
            # The first write waits for the writer process and its encoder.
            settings |= {"TIMEOUT_MS": "60000"}
            launcher = ("-c", *code) if code else ("-m", "care", "serve")
            return start_service(options.indexes, name, settings, variables, launcher=launcher)

        if "caches" in options.parts:
            _measure_caches(start, new, queries, options)
        with start({"WORKERS": options.workers, "CACHE_ENTRIES": "0"}) as service:
            Connection(service.url).ask("PUT", "/documents", next(new))  # starts the writer process
            if "single" in options.parts:
                _measure_single(service.url, new, queries, options, options.indexes / name)
            if "bulk" in options.parts:
                bulk = list(islice(new, min(len(lines), 6 * _BATCH)))
                _measure_bulk(service.url, bulk, options.indexes / name)
    return 0


def _measure_single(
    url: str,
    new: Iterator[dict[str, Any]],
    queries: Sequence[str],
    options: argparse.Namespace,
    folder: Path,
) -> None:
    seconds, target = options.seconds, Target(url)
    bodies = (json.dumps({"query": query}, ensure_ascii=False) for query in cycle(queries))

    def search(rate: float, seconds: float) -> Measurement:
        some = islice(bodies, max(1, round(rate * seconds)))
        messages = [target.message("POST", "/search", body.encode()) for body in some]
        return measure(target, messages, rate)

    if not (rate := options.rate):
        capacity = find_max(partial(search, seconds=3), rate_grid(20, 2000, 1.2), _BOUND_MS, 0).rate
        assert capacity, "the service does not sustain 20 searches a second"
        print(f"highest rate of searches with p99 within {_BOUND_MS:.0f} ms: {capacity:.0f}/s")
        rate = capacity / 2
    print(f"searches at {rate:.0f}/s:")
    times: list[float] = []
    rounds: dict[str, list[float]] = {}
    done = disturbed = 0
    while done < options.rounds:
        others, started = _cpu_of_others(), time.perf_counter()
        alone = search(rate, seconds)
        before = _bytes(folder)
        with _beside(partial(_put_singly, url, new, seconds, options.writes)) as result:
            beside = search(rate, seconds)
        assert not (alone.error_rate or beside.error_rate), beside
        own, size = result()
        taken = (_cpu_of_others() - others) / (time.perf_counter() - started)
        facts = (
            f"{alone.latency_ms['p99']:.1f} and {beside.latency_ms['p99']:.1f} ms, {quantiles(own)}"
        )
        print(f"{facts}; others took {taken:.2f} processors", flush=True)
        if taken > options.others:
            disturbed += 1
            assert disturbed < _MOST_DISTURBED, "the machine has other work"
            continue
        done, times = done + 1, times + own
        for figure, value in {
            "searches without writes, p50 [ms]": alone.latency_ms["p50"],
            "searches without writes, p99 [ms]": alone.latency_ms["p99"],
            "searches beside single documents, p50 [ms]": beside.latency_ms["p50"],
            "searches beside single documents, p99 [ms]": beside.latency_ms["p99"],
            "ratio of p99": beside.latency_ms["p99"] / alone.latency_ms["p99"],
            "single documents per second": len(own) / seconds,
            "bytes on disk, as multiples": (_bytes(folder) - before) / max(size, 1),
        }.items():
            rounds.setdefault(figure, []).append(value)
    _print(rounds)
    print(f"one document, until all searches find it: {quantiles(times)} ({len(times)})")


def _measure_bulk(url: str, bulk: Sequence[dict[str, Any]], folder: Path) -> None:
    size = len(json.dumps(bulk, ensure_ascii=False).encode())
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in bulk).encode()
    before, started = _bytes(folder), time.perf_counter()
    headers = {"Content-Type": "application/x-ndjson"}
    request = Request(f"{url}/documents", lines, headers, method="PUT")
    with open_local(request, timeout=600) as response:
        assert json.load(response)["added"] == len(bulk)
    passed = time.perf_counter() - started
    print(
        f"{len(bulk)} documents as lines: {len(bulk) / passed:.1f}/s, "
        f"{(_bytes(folder) - before) / max(size, 1):.1f} × their bytes on disk"
    )


def _measure_caches(
    start: Callable[..., ServerProcess],
    new: Iterator[dict[str, Any]],
    queries: Sequence[str],
    options: argparse.Namespace,
) -> None:
    """Searches as fast as they are answered, half of them repeated, beside writes at a rate."""
    traffic = Traffic(queries, 1, Mix(filtered=0, batches=0))
    asked = [traffic.draw()[2]["query"] for _ in range(100_000)]
    half = len(asked) // 2
    rounds: dict[str, list[float]] = {}
    ways = {"with the cache of vectors": (), "without it": (_WITHOUT_VECTORS,)}
    for _ in range(options.rounds):
        for way, code in ways.items():
            with start({"WORKERS": "1"}, *code) as service:
                url = service.url
                Connection(url).ask("PUT", "/documents", next(new))
                _search(url, asked[:half], options.seconds)
                before = _lookups(url)
                with _beside(partial(_put_singly, url, new, options.seconds, options.writes)):
                    done = len(_search(url, asked[half:], options.seconds))
                after = _lookups(url)
            rounds.setdefault(f"queries per second {way}", []).append(done / options.seconds)
            for tier in ("memory", "vectors"):
                hits, misses = (after[tier, r] - before[tier, r] for r in ("hit", "miss"))
                figure = f"share of hits in {tier} {way}"
                rounds.setdefault(figure, []).append(hits / max(1, hits + misses))
    _print(rounds)


def _lookups(url: str) -> Mapping[tuple[str, str], float]:
    """Returns the numbers of lookups in caches, by tier and result."""
    with open_local(Request(f"{url}/metrics"), timeout=10) as response:
        text = response.read().decode()
    pattern = r'care_cache_lookups_total{result="(\w+)",tier="(\w+)"} (\S+)'
    return {(tier, result): float(n) for result, tier, n in re.findall(pattern, text)}


def _slow_disk(folder: Path, milliseconds: int) -> dict[str, str]:
    """Returns variables of processes whose flushes to disk take longer."""
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(_SLOW_DISK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "FSYNC_MS": str(milliseconds)}


def _put_singly(
    url: str, documents: Iterator[dict[str, Any]], seconds: float, rate: float | None
) -> tuple[list[float], int]:
    """Puts one document after another, or at a rate [1/s].

    Returns the times [ms], from when each was due, and the bytes of all.
    """
    connection, started, size = Connection(url), time.perf_counter(), 0
    times: list[float] = []
    while True:
        due = started + len(times) / rate if rate else time.perf_counter()
        if due >= started + seconds:
            return times, size
        time.sleep(max(0.0, due - time.perf_counter()))
        document = next(documents)
        connection.ask("PUT", "/documents", document)
        times.append((time.perf_counter() - due) * 1000)
        size += len(json.dumps(document, ensure_ascii=False).encode())


def _search(url: str, queries: Sequence[str], seconds: float) -> list[float]:
    """Returns the times of searches [ms], each of which follows another."""
    end = time.perf_counter() + seconds

    def ask(first: int) -> list[float]:
        connection, times = Connection(url), list[float]()
        for query in islice(cycle(queries), first, None, _CONNECTIONS):
            if time.perf_counter() > end:
                break
            times.append(connection.ask("POST", "/search", {"query": query})[0])
        return times

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return [one for times in pool.map(ask, range(_CONNECTIONS)) for one in times]


def _print(rounds: Mapping[str, Sequence[float]]) -> None:
    for figure, values in rounds.items():
        print(f"{figure}: {np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


@contextmanager
def _beside(work: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Runs work in a thread during the block; yields what returns its result."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work).result


def _cpu_of_others() -> float:
    """Returns the time that processes besides this one and those below it have computed [s]."""
    busy = sum(map(int, Path("/proc/stat").read_text().split()[1:4]))
    parents, own = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            own[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    for process in list(own):
        ancestor = process
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        busy -= own[process] if ancestor else 0
    return busy / os.sysconf("SC_CLK_TCK")


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
