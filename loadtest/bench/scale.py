"""Search at scale: recall@10 against queries per second of index types and libraries.

Each engine is built in a separate process, its index is kept in the cache, and it is searched in
another process. An interrupted run resumes at the engine where it stopped. Single queries are
searched on one thread, as in the service, and measured in CPU time, which other processes on the
machine affect less. A batch of all queries is searched on all threads and measured in wall-clock
time.
"""

import json
import logging
import re
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import psutil

from core.types import FloatArray, RowArray
from loadtest.bench import results
from loadtest.bench.engines import Engine, K, Parameters, Search, engines, faiss_engine
from loadtest.bench.options import ScaleOptions
from loadtest.bench.processes import options_json, profiled, run_in_new_process
from loadtest.bench.vectors import SyntheticVectors, write_vectors
from stores.exact import exact_search

TARGETS = (0.9, 0.95, 0.99)

_COLUMNS = {"alone_per_second": "single queries, 1 thread", "batch_per_second": "batch"}
# Slow engines are measured with fewer single queries: until this time has passed [s].
_SECONDS_SINGLE = 3.0
_MIN_SINGLE = 20

_log = logging.getLogger(__name__)


def run(options: ScaleOptions) -> None:
    """Measures the engines; writes `scale-<vectors>.json` after each, and finally `scale.png`."""
    options.folder.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    _log.info("vectors and exact neighbours in %s", options.folder)
    run_in_new_process(_prepare, options)
    result: dict[str, Any] = {
        "benchmark": "scale",
        "environment": results.describe(),
        "options": options_json(options),
        "k": K,
        "engines": [],
    }
    for engine in _chosen(options):
        built = options.folder / f"{engine.file_name}.json"
        if not built.is_file():
            _log.info("build   %s", engine.name)
            built.write_text(json.dumps(run_in_new_process(profiled, _build, engine, options)))
        _log.info("search  %s", engine.name)
        found = run_in_new_process(_search, engine, options)
        result["engines"].append(found)
        result["defaults"] = defaults(result["engines"])
        results.write(result, options.out / f"scale-{options.vectors}.json")
        seconds = found["build"]["seconds"]
        _log.info("        built in %s s; last point %s", seconds, found["points"][-1])
    plot(results.scale_results(options.out), options.out / "scale.png")


def recall(found: RowArray, truth: RowArray) -> float:
    """Returns the share of true neighbours that were found; both are int64 [queries, k]."""
    return float((found[:, None] == truth[:, :, None]).any(axis=2).mean())


def frontier(points: Sequence[dict[str, Any]], speed: str) -> list[dict[str, Any]]:
    """Returns the Pareto-optimal points in recall and `speed`, by ascending recall."""
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["recall"], p[speed]), reverse=True):
        if not best or point[speed] > best[-1][speed]:
            best.append(point)
    return best[::-1]


def defaults(measured: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns for each target recall the engines that reach it, by descending single-query speed.

    Each entry holds the fastest parameters that reach the recall, with speed, size [bytes] and
    build time [s].
    """
    speed = itemgetter("alone_per_second")
    found = {}
    for target in TARGETS:
        reached = []
        for engine in measured:
            size = {"bytes": engine["bytes"], "build_seconds": engine["build"]["seconds"]}
            if points := [point for point in engine["points"] if point["recall"] >= target]:
                reached.append({"engine": engine["engine"], **max(points, key=speed), **size})
        found[str(target)] = sorted(reached, key=speed, reverse=True)
    return found


def plot(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots queries per second against recall: one row per size, single queries and batches."""
    from matplotlib.figure import Figure

    def kind(engine: dict[str, Any]) -> str:
        # The number of inverted lists depends on the size; the colour does not.
        return re.sub(r"IVF\d+", "IVF", engine["engine"])

    figure = Figure(figsize=(13, 5 * len(measured)), layout="constrained")
    axes = figure.subplots(len(measured), 2, squeeze=False)
    kinds = list(dict.fromkeys(kind(e) for result in measured for e in result["engines"]))
    for row, result in zip(axes, measured, strict=True):
        options = result["options"]
        for axis, (speed, title) in zip(row, _COLUMNS.items(), strict=True):
            for engine in result["engines"]:
                line = frontier(engine["points"], speed)
                x, y = [point["recall"] for point in line], [point[speed] for point in line]
                color = f"C{kinds.index(kind(engine))}"
                axis.plot(x, y, marker="o", markersize=3, color=color, label=engine["engine"])
            threads = f", {options['threads']} threads" if speed == "batch_per_second" else ""
            size = f"{options['vectors']:,} × {options['dimension']}"
            axis.set(title=f"{size}: {title}{threads}", yscale="log", xlim=(0.5, 1.005))
            axis.set(xlabel=f"recall@{result['k']}", ylabel="queries per second")
            axis.grid(visible=True, which="both", alpha=0.3)
        row[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)


def _chosen(options: ScaleOptions) -> list[Engine]:
    if options.factories:
        return [faiss_engine(factory, options.construction) for factory in options.factories]
    every = engines(options.vectors, options.dimension, options.links, options.construction)
    wanted = options.engines or [""]
    return [engine for engine in every if any(part in engine.name for part in wanted)]


def _prepare(options: ScaleOptions) -> None:
    documents, queries, truth = _files(options)
    synthetic = SyntheticVectors(options.vectors, options.dimension, options.seed)
    if not documents.is_file():
        write_vectors(synthetic, documents)
    if not (queries.is_file() and truth.is_file()):
        faiss.omp_set_num_threads(options.threads)
        np.save(queries, synthetic.queries(options.queries))
        vectors = np.load(documents, mmap_mode="r")
        np.save(truth, exact_search(np.load(queries), vectors, K)[1])


def _files(options: ScaleOptions) -> list[Path]:
    names = ("documents", f"queries-{options.queries}", f"truth-{options.queries}")
    return [options.folder / f"{name}.npy" for name in names]


def _build(engine: Engine, options: ScaleOptions) -> dict[str, Any]:
    vectors = np.load(_files(options)[0], mmap_mode="r")
    engine.build(vectors, options.threads, options.folder / engine.file_name)
    return {"threads": options.threads}


def _search(engine: Engine, options: ScaleOptions) -> dict[str, Any]:
    queries, truth = (np.load(path) for path in _files(options)[1:])
    file = options.folder / engine.file_name
    before = psutil.Process().memory_info().rss
    search = engine.open(file, options.dimension)
    return {
        "engine": engine.name,
        "library": engine.library,
        "bytes": file.stat().st_size,
        "resident_bytes": psutil.Process().memory_info().rss - before,
        "build": json.loads(file.with_name(f"{file.name}.json").read_text()),
        "points": [
            _measure(search, queries, truth, parameters, options.threads)
            for parameters in engine.sweep
        ],
    }


def _measure(
    search: Search, queries: FloatArray, truth: RowArray, parameters: Parameters, threads: int
) -> dict[str, Any]:
    started = time.perf_counter()
    found = search(queries, parameters, threads)
    batch = time.perf_counter() - started
    seconds: list[float] = []
    worked = time.process_time()
    for query in queries:
        if len(seconds) >= _MIN_SINGLE and sum(seconds) >= _SECONDS_SINGLE:
            break
        before = time.perf_counter()
        search(query[None], parameters, 1)
        seconds.append(time.perf_counter() - before)
    worked = time.process_time() - worked
    p50, p99 = 1e3 * np.percentile(seconds, [50, 99])
    return {
        "parameters": parameters,
        "recall": round(recall(found, truth), 5),
        "alone_per_second": round(len(seconds) / worked, 2),
        "alone_p50_ms": round(float(p50), 4),
        "alone_p99_ms": round(float(p99), 4),
        "batch_per_second": round(len(queries) / batch, 2),
    }
