"""The service beside another system with the same weights, index, questions and clients."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.documents import FILE_NAME, DocumentReader
from core.text import normalize_text
from core.types import Pair
from core.versions import VECTORS, current_version, index_folder
from loadtest.bench.figures import at_least, at_most, medians
from loadtest.bench.options import BenchError, Options
from loadtest.bench.service import Server, free_port, run_server, run_service
from loadtest.bench.wrk import bodies, drive
from loadtest.queries import read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

# How many clients: some, and enough to fill the service.
_SOME = 8
_WARM_UP_SECONDS = 2
_COMPARED = 20
_LEAST_COSINE = 0.99


@dataclass(frozen=True, slots=True)
class Other:
    """The system that the service is compared with.

    Attributes:
        name: What the report calls it.
        python: Of the environment that it is installed in.
        application: Module in `baselines/`.
        weights: Folder that holds its model.
        goal: Times its throughput that the service should reach.
    """

    name: str
    python: Path
    application: str
    weights: Path
    goal: float


def compare(options: Options, other: Other) -> dict[str, Any]:
    """Alternates both at two numbers of clients, the service's cache off.

    Raises:
        BenchError: If the other system is not installed or its vectors are not the same.
    """
    pair = load_pair(options.pair)
    texts = read_texts(options.queries)
    requests = bodies(texts, options.top_k)
    levels = [_SOME, options.connections]
    rounds: list[dict[str, Any]] = []
    with _run_other(options, other, pair) as theirs, run_service(options, CACHE_ENTRIES="0") as our:
        cosines = _cosines(theirs, pair, texts[:_COMPARED])
        if min(cosines) < _LEAST_COSINE:
            raise BenchError(f"{other.name} has other vectors: cosine {min(cosines):.3f}")
        for clients in levels:
            for server in (theirs, our):
                drive(server.url, requests, clients, _WARM_UP_SECONDS)
            for number in range(options.rounds):
                entry = _round(theirs, our, requests, clients, options.seconds)
                rounds.append(entry)
                print(
                    f"  {clients} clients, round {number + 1}: {other.name} "
                    f"{entry['their_qps']:.1f}/s, p99 {entry['their_p99_ms']:.0f} ms; service "
                    f"{entry['our_qps']:.1f}/s, p99 {entry['our_p99_ms']:.0f} ms",
                    flush=True,
                )
        memory = {"theirs": theirs.rss(), "ours": our.rss()}
    middles = [medians([r for r in rounds if r["clients"] == clients]) for clients in levels]
    worst_qps = min(middles, key=lambda middle: middle["qps_ratio"])
    worst_p99 = max(middles, key=lambda middle: middle["p99_ratio"])
    return {
        "figures": [
            at_least(
                f"throughput ÷ {other.name}",
                worst_qps["qps_ratio"],
                other.goal,
                note=_note(middles, "qps", "queries/s"),
            ),
            at_most(
                f"p99 ÷ {other.name}",
                worst_p99["p99_ratio"],
                1.0,
                note=_note(middles, "p99_ms", "ms"),
            ),
        ],
        "medians": middles,
        "rounds": rounds,
        "cosines": cosines,
        "rss_bytes": memory,
    }


def _round(
    theirs: Server, our: Server, requests: list[str], clients: int, seconds: int
) -> dict[str, Any]:
    their = drive(theirs.url, requests, clients, seconds)
    ours = drive(our.url, requests, clients, seconds)
    return {
        "clients": clients,
        "their_qps": their.qps,
        "our_qps": ours.qps,
        "qps_ratio": ours.qps / their.qps,
        "their_p99_ms": their.p99_ms,
        "our_p99_ms": ours.p99_ms,
        "p99_ratio": ours.p99_ms / their.p99_ms,
        "theirs": their.as_json(),
        "ours": ours.as_json(),
    }


def _note(middles: list[dict[str, float]], name: str, unit: str) -> str:
    parts = [
        f"{m['clients']:.0f} clients: {m[f'our_{name}']:.0f} to {m[f'their_{name}']:.0f} {unit}"
        for m in middles
    ]
    return "the worse of " + "; ".join(parts)


@contextmanager
def _run_other(options: Options, other: Other, pair: Pair) -> Iterator[Server]:
    if not other.python.exists():
        raise BenchError(f"{other.python} is missing: run `make bench`, which installs it")
    if not other.weights.is_dir():
        raise BenchError(f"{other.weights} is missing: run `make bench`, which writes it")
    folder = index_folder(options.indexes, options.index)
    version = folder / current_version(options.indexes, options.index)
    with tempfile.TemporaryDirectory() as temporary:
        documents = Path(temporary) / "documents.jsonl"
        _write_documents(version, documents)
        port = free_port()
        environment = os.environ | {
            "BENCH_MODEL": str(other.weights.resolve()),
            "BENCH_VECTORS": str((version / VECTORS).resolve()),
            "BENCH_DOCUMENTS": str(documents),
            "BENCH_PROMPT": pair.query.prompt,
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        applications = Path(__file__).with_name("baselines")
        command = [
            *(str(other.python.absolute()), "-m", "uvicorn", f"{other.application}:app"),
            *("--app-dir", str(applications), "--port", str(port)),
            *("--log-level", "warning", "--no-access-log"),
        ]
        with run_server(command, port, "/ready", environment, other.weights) as server:
            yield server


def _write_documents(version: Path, path: Path) -> None:
    with path.open("w", encoding="utf-8") as lines:
        for d in DocumentReader(version / FILE_NAME):
            fields = {"id": d.id, "title": d.title, "text": d.text, "metadata": d.metadata}
            lines.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _cosines(theirs: Server, pair: Pair, texts: list[str]) -> list[float]:
    """Cosines between their vectors and the service's of the same texts."""
    ours = OnnxEncoder(pair.query, pair.folder, 1).encode([normalize_text(t) for t in texts])
    vectors = np.array([theirs.post("/encode", {"query": text}) for text in texts])
    return [float(cosine) for cosine in (vectors * ours.vectors).sum(axis=1)]
