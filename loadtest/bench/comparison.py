"""Comparison of the service with other systems: same weights, index, questions and clients."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from core.documents import FILE_NAME, DocumentReader
from core.encoders import Pair
from core.errors import CareError
from core.manifest import VECTORS_FILE
from core.records import write_jsonl
from core.text import normalize_text
from core.versions import IndexFolder
from loadtest.bench.options import ServiceOptions
from loadtest.bench.processes import Server, baseline_server, bench_service
from loadtest.bench.results import figure, medians, repeat
from loadtest.bench.wrk import bodies, drive
from loadtest.traffic import read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

# The folders that `loadtest/bench/weights.py` writes.
TORCH, ONNX_FP32, ONNX_INT8 = "sentence-transformers", "onnx-fp32", "onnx-int8"

# Clients at light load; `options.connections` clients saturate the service.
_FEW_CLIENTS = 8
_WARM_UP_SECONDS = 2
# Questions whose vectors are compared, and the minimum cosine between the two systems' vectors.
_COMPARED_QUESTIONS = 20
_MIN_COSINE = 0.99


def sentence_transformers(options: ServiceOptions) -> dict[str, Any]:
    """Compares with an application of FastAPI, sentence-transformers and FAISS."""
    name, application = "FastAPI + sentence-transformers", "sentence_transformers_app"
    python, weights = options.sentence_transformers, options.weights / TORCH
    return compare(options, name, application, python, weights, goal=6.0)


def infinity(options: ServiceOptions) -> dict[str, Any]:
    """Compares with infinity, with the unquantised graph and with the service's int8 graph."""
    found = {}
    for graph, kind in ((ONNX_FP32, "float32"), (ONNX_INT8, "the service's int8 graph")):
        name, python, weights = f"infinity ({kind})", options.infinity, options.weights / graph
        found[name] = compare(options, name, "infinity_app", python, weights, goal=2.0)
    return {"figures": [f for result in found.values() for f in result.pop("figures")], **found}


def compare(
    options: ServiceOptions, name: str, application: str, python: Path, weights: Path, goal: float
) -> dict[str, Any]:
    """Measures the service and another system in turn, at two numbers of clients, without cache.

    Args:
        options: Options of the benchmark.
        name: Name of the other system.
        application: Its module in `baselines/`.
        python: The Python of its environment.
        weights: Folder of its model, in which it runs.
        goal: Goal for the ratio of throughputs, the service to the other system.

    Raises:
        CareError: If the systems compute different vectors, or environment or weights are missing.
    """
    pair = load_pair(options.pair)
    texts = read_texts(options.queries)
    requests = bodies(texts, options.top_k)
    levels = [_FEW_CLIENTS, options.connections]
    rounds: list[dict[str, Any]] = []
    with (
        _run_other(options, application, python, weights, pair) as theirs,
        bench_service(options, CACHE_ENTRIES="0") as our,
    ):
        cosines = _cosines(theirs, pair, texts[:_COMPARED_QUESTIONS])
        if min(cosines) < _MIN_COSINE:
            message = f"{name} and the service compute different vectors: lowest cosine "
            message += f"{min(cosines):.3f}, at least {_MIN_COSINE} expected"
            raise CareError(message, code="other_vectors", cosine=min(cosines))
        for clients in levels:
            for server in (theirs, our):
                drive(server.url, requests, clients, _WARM_UP_SECONDS)
            once = partial(_round, theirs, our, requests, clients, options.seconds)
            rounds += repeat(options.rounds, once)
        memory = {"theirs": theirs.rss(), "ours": our.rss()}
    by_clients = [medians([r for r in rounds if r["clients"] == clients]) for clients in levels]
    slowest = min(found["qps_ratio"] for found in by_clients)
    latest = max(found["p99_ratio"] for found in by_clients)
    qps, p99 = _worst_of(by_clients, "qps", "queries/s"), _worst_of(by_clients, "p99_ms", "ms")
    return {
        "figures": [
            figure(f"throughput ÷ {name}", slowest, ">=", goal, note=qps),
            figure(f"p99 ÷ {name}", latest, "<=", 1.0, note=p99),
        ],
        "medians": by_clients,
        "rounds": rounds,
        "cosines": cosines,
        "rss_bytes": memory,
    }


def _round(
    theirs: Server, our: Server, requests: list[str], clients: int, seconds: int
) -> dict[str, Any]:
    their, ours = (drive(server.url, requests, clients, seconds) for server in (theirs, our))
    return {
        **{"clients": clients, "their_qps": their["qps"], "our_qps": ours["qps"]},
        **{"their_p99_ms": their["p99_ms"], "our_p99_ms": ours["p99_ms"]},
        "qps_ratio": ours["qps"] / their["qps"],
        "p99_ratio": ours["p99_ms"] / their["p99_ms"],
        **{"theirs": their, "ours": ours},
    }


def _worst_of(by_clients: list[dict[str, float]], of: str, unit: str) -> str:
    return "worst case of " + "; ".join(
        f"{m['clients']:.0f} clients: {m[f'our_{of}']:.0f} ÷ {m[f'their_{of}']:.0f} {unit}"
        for m in by_clients
    )


@contextmanager
def _run_other(
    options: ServiceOptions, application: str, python: Path, weights: Path, pair: Pair
) -> Iterator[Server]:
    for path in (python, weights):
        if not path.exists():
            raise CareError.at(path, "is missing: `make bench` creates it", "baseline_missing")
    folder = IndexFolder(options.indexes, options.index).path
    version = folder / IndexFolder(options.indexes, options.index).active()
    with tempfile.TemporaryDirectory() as temporary:
        documents = Path(temporary) / "documents.jsonl"
        fields = ("id", "title", "text", "metadata")
        reader = DocumentReader(version / FILE_NAME)
        write_jsonl(documents, ({name: getattr(d, name) for name in fields} for d in reader))
        variables = {
            "BENCH_VECTORS": str((version / VECTORS_FILE).resolve()),
            "BENCH_DOCUMENTS": str(documents),
            "BENCH_PROMPT": pair.query.prompt,
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        with baseline_server(application, python, variables, weights) as server:
            yield server


def _cosines(theirs: Server, pair: Pair, texts: list[str]) -> list[float]:
    """Returns the cosine between the two systems' vectors of each text."""
    ours = OnnxEncoder(pair.query, pair.folder, 1).encode([normalize_text(t) for t in texts])
    vectors = np.array([theirs.post("/encode", {"query": text}) for text in texts])
    return [float(cosine) for cosine in (vectors * ours.vectors).sum(axis=1)]
