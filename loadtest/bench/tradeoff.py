"""Speed of a pair, of a lookup encoder and of BM25 on the same index, and its plot with accuracy.

Each system is measured with single queries and at full load: over HTTP with one client and with
`connections`, and in the bare loop with one query at a time and in batches on all processors.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from core.cpus import available_cpus
from core.documents import FILE_NAME, DocumentReader
from core.text import normalize_text
from core.versions import IndexFolder, read_manifest
from evaluation.bm25 import SYSTEMS, Analyzer, Bm25Index
from loadtest.bench import bare
from loadtest.bench.options import ServiceOptions
from loadtest.bench.processes import Server, bench_service, run_in_new_process
from loadtest.bench.results import (
    BENCH_NAME,
    PLOT_NAME,
    WAYS,
    accuracy,
    figure,
    medians,
    repeat,
)
from loadtest.bench.scenarios import LOOKUP
from loadtest.bench.wrk import bodies, drive
from loadtest.traffic import read_texts

_WARM_UP_SECONDS = 2
# Batches of the bare loop; the fastest counts. A transformer is fastest with small ones, and a
# lookup encoder and BM25 with large ones.
_BATCHES = (4, 32)
_MARKERS = dict(zip(WAYS, "os^D", strict=True))


def measure(options: ServiceOptions) -> dict[str, Any]:
    """Measures queries per second of each system; see the module."""
    requests = bodies(read_texts(options.queries), options.top_k)
    pairs = {name: replace(options, pair=name) for name in (options.pair, LOOKUP)}
    folder = IndexFolder(options.indexes, options.index).path
    version = folder / IndexFolder(options.indexes, options.index).active()
    with (
        bench_service(pairs[options.pair], CACHE_ENTRIES="0") as server,
        bench_service(pairs[LOOKUP], CACHE_ENTRIES="0") as by_lookup,
    ):
        servers = {options.pair: server, LOOKUP: by_lookup}
        for each in servers.values():
            drive(each.url, requests, options.connections, _WARM_UP_SECONDS)
        once = partial(_round, servers, pairs, requests)
        rounds = repeat(options.rounds, once)
    bm25 = {
        name: run_in_new_process(_bm25, options, version / FILE_NAME, analyzer, passive=True)
        for name, analyzer in SYSTEMS.items()
    }
    typical = medians(rounds)
    speeds = {name: {way: typical[f"{name} {way}"] for way in WAYS} for name in pairs}
    fast, slow = (speeds[name]["http_full"] for name in (LOOKUP, options.pair))
    note = f"{fast:.0f} ÷ {slow:.0f} queries/s, index {read_manifest(version).factory}"
    reached = figure(f"throughput of {LOOKUP} ÷ {options.pair}", fast / slow, ">=", 6.0, note=note)
    return {"figures": [reached], "speeds": speeds | bm25, "rounds": rounds}


def _round(
    servers: Mapping[str, Server], pairs: Mapping[str, ServiceOptions], requests: Sequence[str]
) -> dict[str, float]:
    found = {}
    for name, options in pairs.items():
        for way, clients in (("http_single", 1), ("http_full", options.connections)):
            load = drive(servers[name].url, requests, clients, options.seconds)
            found[f"{name} {way}"] = load["qps"]
        found[f"{name} bare_single"] = _bare(options, 1, sessions=1)
        found[f"{name} bare_full"] = max(
            _bare(options, batch, sessions=available_cpus()) for batch in _BATCHES
        )
    return found


def _bare(options: ServiceOptions, batch: int, sessions: int) -> float:
    threads = available_cpus() // sessions
    config = bare.LoopConfig(batch, sessions, threads, spinning=False)
    rate: float = run_in_new_process(bare.sustain, options, config, options.seconds, passive=True)
    return rate


def _bm25(options: ServiceOptions, documents: Path, analyzer: Analyzer) -> dict[str, float]:
    """Measures BM25 in one thread, by the baselines of evaluations."""
    index = Bm25Index(DocumentReader(documents), analyzer)
    texts = [normalize_text(text) for text in read_texts(options.queries)]
    speeds = {}
    for way, size in (("bare_single", 1), ("bare_full", _BATCHES[-1])):
        batches = [texts[i : i + size] for i in range(0, len(texts), size)]
        index.search(batches[0], options.top_k)
        started, searched = time.perf_counter(), 0
        while time.perf_counter() - started < options.seconds:
            for batch in batches:
                index.search(batch, options.top_k)
                searched += len(batch)
        speeds[way] = searched / (time.perf_counter() - started)
    return speeds


def draw(folder: Path) -> None:
    """Draws the plot of a folder of results, if it has what is measured here."""
    path = folder / BENCH_NAME
    scenarios = json.loads(path.read_text("utf-8"))["scenarios"] if path.is_file() else {}
    speeds, scores = scenarios.get("tradeoff", {}).get("speeds"), accuracy()
    if speeds and scores:
        plot(speeds, scores, folder / PLOT_NAME)


def plot(
    speeds: Mapping[str, Mapping[str, float]], scores: Mapping[str, float], path: Path
) -> None:
    """Plots nDCG@10 against queries per second as a PNG.

    Args:
        speeds: Queries per second of systems by the names of `WAYS`.
        scores: nDCG@10 of systems; others are left out.
        path: Path of the file.
    """
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 5), layout="constrained")
    axes = drawing.subplots()
    for i, name in enumerate(name for name in speeds if name in scores):
        rates, score, color = speeds[name], scores[name], f"C{i}"
        axes.plot(list(rates.values()), [score] * len(rates), color=color, alpha=0.4)
        for way, rate in rates.items():
            axes.plot(rate, score, _MARKERS[way], color=color)
        place = min(rates.values()), score
        axes.annotate(name, place, (0, 8), textcoords="offset points", color=color)
    for way, title in WAYS.items():
        axes.plot([], [], _MARKERS[way], color="grey", label=title)
    axes.set(xscale="log", xlabel="queries per second", ylabel="nDCG@10")
    axes.margins(x=0.1, y=0.2)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    drawing.savefig(path, dpi=120)
