"""Search at scale: recall@10 against queries per second of index types and libraries.

python -m loadtest.bench.scale --vectors 1000000 --dimension 768 --threads 2 --out FOLDER

Each engine is built in a process of its own, its index kept in the cache, and searched in
a fresh process; an interrupted run goes on with the engine that it was at. A query is
searched alone on one thread, as the service does, and its speed is counted in processor
time, so that other work on the machine disturbs less. All queries at once are searched on
all threads and counted in wall-clock time.
"""

import argparse
import json
import logging
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.bench import environment, report
from loadtest.bench.curves import defaults, plot, read_results
from loadtest.bench.engines import Engine, K, engines, exact_neighbours
from loadtest.bench.vectors import SyntheticVectors, write_vectors

FloatArray = NDArray[np.float32]
RowArray = NDArray[np.int64]

# A slow point is measured with as many queries as fit.
_SECONDS_ALONE = 3.0
_MIN_ALONE = 20
_LOG_FORMAT = "%(message)s"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        vectors: Number of documents.
        dimension: Dimensions of a vector.
        queries: Number of queries.
        threads: Threads of a build and of a batch search.
        links: M of each graph; its lowest level has twice as many.
        construction: efConstruction of each graph.
        seed: Seed of the vectors.
        engines: Only engines whose name holds one of these, or all.
        cache: Where vectors and indexes are kept.
        out: Where the results go.
    """

    vectors: int = 100_000
    dimension: int = 768
    queries: int = 1000
    threads: int = 2
    links: int = 32
    construction: int = 200
    seed: int = 0
    engines: tuple[str, ...] = ()
    cache: Path = Path("builds/bench")
    out: Path = Path("loadtest/results")

    @property
    def folder(self) -> Path:
        """The cache of these vectors and of the indexes over them."""
        return self.cache / (
            f"{self.vectors}x{self.dimension}-seed{self.seed}-M{self.links}-{self.construction}"
        )


def run(options: Options) -> dict[str, Any]:
    """Measures the engines, writes `scale-<vectors>.json` and `scale.png`, returns the former.

    The file is written after each engine, so that an interrupted run leaves what it has.
    """
    started = time.perf_counter()

    def progress(message: str, *arguments: object) -> None:
        _log.info(f"%7.1f s  {message}", time.perf_counter() - started, *arguments)

    options.folder.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    progress("vectors and exact neighbours in %s", options.folder)
    _in_process(_prepare, options)
    result: dict[str, Any] = {
        "benchmark": "scale",
        "environment": environment.describe([]),
        "options": {
            **asdict(options),
            "engines": list(options.engines),
            "cache": str(options.cache),
            "out": str(options.out),
        },
        "k": K,
        "engines": [],
    }
    path = options.out / f"scale-{options.vectors}.json"
    for engine in _chosen(options):
        file = options.folder / engine.name.replace(" ", "-").replace(",", "-")
        if not file.with_name(f"{file.name}.json").is_file():
            progress("build   %s", engine.name)
            build = _in_process(_build, engine, options, file)
            file.with_name(f"{file.name}.json").write_text(json.dumps(build))
        progress("search  %s", engine.name)
        found = _in_process(_search, engine, options, file)
        result["engines"].append(found)
        result["defaults"] = defaults(result["engines"])
        tables = report.write(result, path)
        best = found["points"][-1]
        progress(
            "        built in %.0f s, %.0f MB; recall %.4f at %s: %.0f queries/s alone, %.0f batch",
            found["build"]["seconds"],
            found["bytes"] / 1e6,
            best["recall"],
            best["parameters"],
            best["alone_per_second"],
            best["batch_per_second"],
        )
    plot(read_results(options.out), options.out / "scale.png")
    progress("written %s", tables)
    return result


def recall(found: RowArray, truth: RowArray) -> float:
    """Returns the share of the true neighbours, int64 [queries, k], that were found."""
    hits = sum(len(np.intersect1d(one, other)) for one, other in zip(found, truth, strict=True))
    return hits / truth.size


def _in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs in a fresh process: its memory is its own, and all given back."""
    log = partial(logging.basicConfig, level=_log.getEffectiveLevel(), format=_LOG_FORMAT)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=log) as pool:
        return pool.submit(work, *arguments).result()


def _chosen(options: Options) -> list[Engine]:
    return [
        engine
        for engine in engines(
            options.vectors, options.dimension, options.links, options.construction
        )
        if not options.engines or any(part in engine.name for part in options.engines)
    ]


def _prepare(options: Options) -> None:
    documents, queries, truth = _files(options)
    synthetic = SyntheticVectors(options.vectors, options.dimension, options.seed)
    if not documents.is_file():
        write_vectors(synthetic, documents)
    if not (queries.is_file() and truth.is_file()):
        np.save(queries, synthetic.queries(options.queries))
        rows = exact_neighbours(
            np.load(documents, mmap_mode="r"), np.load(queries), options.threads
        )
        np.save(truth, rows)


def _files(options: Options) -> tuple[Path, Path, Path]:
    folder = options.folder
    return (
        folder / "documents.npy",
        folder / f"queries-{options.queries}.npy",
        folder / f"truth-{options.queries}.npy",
    )


def _build(engine: Engine, options: Options, file: Path) -> dict[str, Any]:
    vectors = np.load(_files(options)[0], mmap_mode="r")
    started, worked = time.perf_counter(), time.process_time()
    shared = engine.build(vectors, options.threads, file)
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds + shared, 2),
        "of_which_shared_seconds": round(shared, 2),
        "processor_seconds": round(time.process_time() - worked, 2),
        "threads": options.threads,
        # Includes the pages of the mapped vectors that were in memory.
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _search(engine: Engine, options: Options, file: Path) -> dict[str, Any]:
    _, queries_file, truth_file = _files(options)
    queries, truth = np.load(queries_file), np.load(truth_file)
    before = _resident_bytes()
    engine.load(file)
    resident = _resident_bytes() - before
    return {
        "engine": engine.name,
        "library": engine.library,
        "bytes": file.stat().st_size,
        "resident_bytes": resident,
        "build": json.loads(file.with_name(f"{file.name}.json").read_text()),
        "points": [
            _measure(engine, queries, truth, parameters, options.threads)
            for parameters in engine.sweep
        ],
    }


def _measure(
    engine: Engine,
    queries: FloatArray,
    truth: RowArray,
    parameters: dict[str, int],
    threads: int,
) -> dict[str, Any]:
    started = time.perf_counter()
    found = engine.search(queries, parameters, threads)
    batch = time.perf_counter() - started
    seconds: list[float] = []
    worked = time.process_time()
    while len(seconds) < len(queries) and (
        len(seconds) < _MIN_ALONE or sum(seconds) < _SECONDS_ALONE
    ):
        query = queries[len(seconds)][None]
        before = time.perf_counter()
        engine.search(query, parameters, 1)
        seconds.append(time.perf_counter() - before)
    worked = time.process_time() - worked
    return {
        "parameters": parameters,
        "recall": round(recall(found, truth), 5),
        "alone_per_second": round(len(seconds) / worked, 2),
        "alone_p50_ms": round(float(np.quantile(seconds, 0.5)) * 1e3, 4),
        "alone_p99_ms": round(float(np.quantile(seconds, 0.99)) * 1e3, 4),
        "batch_per_second": round(len(queries) / batch, 2),
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    chosen = Options()
    for name in ("vectors", "dimension", "queries", "threads", "links", "construction", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(chosen, name))
    parser.add_argument(
        "--engines", nargs="*", default=(), help="parts of names; without them all engines"
    )
    parser.add_argument("--cache", type=Path, default=chosen.cache)
    parser.add_argument("--out", type=Path, default=chosen.out)
    arguments = vars(parser.parse_args())
    arguments["engines"] = tuple(arguments["engines"])
    return Options(**arguments)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    run(_options())
