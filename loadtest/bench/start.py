"""From process start to ready, and the memory of a second process on the same index.

python -m loadtest.bench.start --vectors 1000000 --out FOLDER

Needs the HNSW,SQ8 graph that `python -m loadtest.bench.scale` leaves in the cache, and an
environment with the project and `onnx`.
"""

import argparse
import json
import logging
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from core.versions import current_version
from loadtest.bench import environment, report, scale
from loadtest.bench.figures import at_most
from loadtest.bench.start_index import SAMPLE, make_index, make_pair

READY_SECONDS = 2.0
PRIVATE_MB = 300
_POLL_SECONDS = 0.005
_TIME_LIMIT_SECONDS = 120.0
_SEARCHES = 200
_STAGES = Path(__file__).with_name("start_stages.py")
_IMPORTED_LINES = 12

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        vectors: Documents of the index, less the canaries.
        dimension: Dimensions of a vector.
        links: M of the graph.
        construction: efConstruction of the graph.
        seed: Seed of the vectors.
        starts: Warm starts to measure.
        threads: CARE_THREADS of the service.
        cache: Where `scale` left the graph; the index and the pair are put there too.
        out: Where the results go.
    """

    vectors: int = 1_000_000
    dimension: int = 768
    links: int = 32
    construction: int = 200
    seed: int = 0
    starts: int = 5
    threads: int = 2
    cache: Path = Path("builds/bench")
    out: Path = Path("loadtest/results")


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, ready to answer."""

    process: subprocess.Popen[bytes]
    port: int
    seconds_to_ready: float

    def search(self, text: str) -> list[str]:
        """Returns the ids of the ten hits.

        Raises:
            RuntimeError: If the answer is not 200.
        """
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        body = json.dumps({"query": text}).encode()
        connection.request("POST", "/search", body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"/search answered {response.status}")
        return [hit["id"] for hit in json.loads(content)["hits"]]

    def processor_seconds(self) -> float:
        """Returns the processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, int]:
        """Returns bytes: resident, private (USS), and private that no file backs."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text(encoding="ascii")
        found = {name: int(kb) * 1024 for name, kb in re.findall(r"(\w+): +(\d+) kB", text)}
        return {
            "resident_bytes": found["Rss"],
            "private_bytes": found["Private_Clean"] + found["Private_Dirty"],
            "anonymous_bytes": found["Anonymous"],
        }


def run(options: Options) -> dict[str, Any]:
    """Measures, writes `start-<vectors>.json` and returns what it says."""
    scale_options = scale.Options(
        vectors=options.vectors,
        dimension=options.dimension,
        links=options.links,
        construction=options.construction,
        seed=options.seed,
        cache=options.cache,
    )
    documents = scale_options.folder / "documents.npy"
    if not documents.is_file():
        sys.exit(f"error: {documents} is missing: make bench-scale VECTORS={options.vectors} first")
    vectors = np.load(documents, mmap_mode="r")
    mean = np.asarray(vectors[:10_000]).mean(axis=0)
    _log.info("pair and index of %d documents", options.vectors)
    pair = make_pair(options.cache / f"pair-{options.dimension}", mean, options.seed).resolve()
    indexes = (options.cache / "indexes").resolve()
    name = make_index(scale_options, pair, indexes)
    folder = indexes / name / current_version(indexes, name)
    variables = {
        **{key: value for key, value in os.environ.items() if not key.startswith("CARE_")},
        "CARE_INDEXES": str(indexes),
        "CARE_INDEX": name,
        "CARE_PAIR": str(pair),
        "CARE_THREADS": str(options.threads),
        "CARE_CACHE_ENTRIES": "0",
    }

    _log.info("starts")
    _drop_from_memory(folder)
    with _service(variables) as first:
        cold = first.seconds_to_ready
    warm, worked = [], []
    for _ in range(options.starts):
        with _service(variables) as service:
            warm.append(round(service.seconds_to_ready, 3))
            worked.append(service.processor_seconds())
    _log.info("cold %.2f s, warm %s s, processor %s s", cold, warm, worked)

    queries = _queries()
    with (
        _service(variables) as first,
        _service(variables) as second,
    ):
        at_ready = second.memory()
        before = [first.search(query) for query in queries]
        for query in queries:
            second.search(query)
        memory = {"second_at_ready": at_ready, "second": second.memory(), "first": first.memory()}
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with _service(variables) as again:
            after = [again.search(query) for query in queries]
            killed_ready = round(again.seconds_to_ready, 3)
            killed = {
                "same_hits": before == after,
                "memory": again.memory(),
            }

    result = {
        "benchmark": "start",
        "environment": environment.describe([]),
        "figures": [
            at_most(
                "process start to ready",
                statistics.median(warm),
                READY_SECONDS,
                unit="s",
                note=f"median of {len(warm)}, of which the processor works "
                f"{statistics.median(worked):.2f} s; {cold:.2f} s with the index's files not in "
                f"memory; {killed_ready:.2f} s after SIGKILL",
            ),
            at_most(
                "private memory of a second process",
                memory["second"]["private_bytes"] / 1e6,
                PRIVATE_MB,
                unit="MB",
                note=f"after {len(queries)} searches; resident "
                f"{memory['second']['resident_bytes'] / 1e6:.0f} MB",
            ),
        ],
        "options": {
            **asdict(options),
            **{key: str(getattr(options, key)) for key in ("cache", "out")},
        },
        "documents": options.vectors,
        "index_bytes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        "ready_seconds": {
            "warm": warm,
            "warm_median": round(statistics.median(warm), 3),
            # Of all threads; hardly changed by other work on the machine.
            "warm_processor": worked,
            "files_not_in_memory": round(cold, 3),
            "after_sigkill": killed_ready,
        },
        "memory_after_searches": {"searches": len(queries), **memory},
        "after_sigkill": killed,
        "stages_seconds": _stages(variables, pair, folder),
        "imports": _imports(variables),
    }
    tables = report.write(result, options.out / f"start-{options.vectors}.json")
    _log.info("written %s", tables)
    return result


@contextmanager
def _service(variables: dict[str, str]) -> Iterator[Service]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "service"],
        env={**variables, "CARE_PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"the service ended with status {process.returncode}")
            if time.perf_counter() - started > _TIME_LIMIT_SECONDS:
                raise RuntimeError("the service did not become ready")
            time.sleep(_POLL_SECONDS)
        yield Service(process, port, time.perf_counter() - started)
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=_TIME_LIMIT_SECONDS)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _queries() -> list[str]:
    texts = [
        json.loads(line)["text"][:40] for line in SAMPLE.read_text(encoding="utf-8").splitlines()
    ]
    return texts[:_SEARCHES]


def _drop_from_memory(folder: Path) -> None:
    """Asks the kernel to forget the pages of the index's files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _stages(variables: dict[str, str], pair: Path, folder: Path) -> dict[str, list[float]]:
    # -P: modules beside the script must not hide the service's.
    done = subprocess.run(
        [sys.executable, "-P", str(_STAGES.resolve()), str(pair), str(folder)],
        env=variables,
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def _imports(variables: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the modules that take longest to import, with all that they import, in ms."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import service.__main__"],
        env=variables,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = re.findall(r"import time: +(\d+) \| +(\d+) \| +(\S+)", done.stderr)
    slowest = sorted(lines, key=lambda line: -int(line[1]))[:_IMPORTED_LINES]
    return [{"module": name, "ms": round(int(total) / 1000, 1)} for _, total, name in slowest]


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    chosen = Options()
    for name, value in asdict(chosen).items():
        kind = Path if isinstance(value, Path) else int
        parser.add_argument(f"--{name}", type=kind, default=value)
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(_options())
