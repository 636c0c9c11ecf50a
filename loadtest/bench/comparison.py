"""The service beside other systems with the same weights, index, questions and clients."""

import os
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
from core.service_process import free_port, running_server
from core.text import normalize_text
from core.versions import current_version, index_folder
from loadtest.bench.processes import Options, Server
from loadtest.bench.results import figure, medians, repeat
from loadtest.bench.wrk import bodies, drive
from loadtest.traffic import read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

# The folders that `loadtest.bench.weights` writes.
TORCH, ONNX_FP32, ONNX_INT8 = "sentence-transformers", "onnx-fp32", "onnx-int8"

# A few clients; `options.connections` fill the service.
_SOME = 8
_WARM_UP_SECONDS = 2
# Questions whose vectors are compared, and the least cosine of two systems' vectors of one.
_COMPARED = 20
_LEAST_COSINE = 0.99


def sentence_transformers(options: Options) -> dict[str, Any]:
    """Compares with FastAPI, sentence-transformers and FAISS in one function."""
    name, application = "FastAPI + sentence-transformers", "sentence_transformers_app"
    python, weights = options.sentence_transformers, options.weights / TORCH
    return compare(options, name, application, python, weights, goal=3.0)


def infinity(options: Options) -> dict[str, Any]:
    """Compares with infinity twice: with the unquantised graph, and with the service's own."""
    found = {}
    for graph, kind in ((ONNX_FP32, "float32"), (ONNX_INT8, "the service's int8 graph")):
        name, python, weights = f"infinity ({kind})", options.infinity, options.weights / graph
        found[name] = compare(options, name, "infinity_app", python, weights, goal=1.5)
    return {"figures": [f for result in found.values() for f in result.pop("figures")], **found}


def compare(
    options: Options, name: str, application: str, python: Path, weights: Path, goal: float
) -> dict[str, Any]:
    """Alternates the service and another system at two numbers of clients, without a cache.

    The other is a module in `baselines/`, run by its own Python in the folder of its model. The
    goal is the ratio of throughputs.
    """
    pair = load_pair(options.pair)
    texts = read_texts(options.queries)
    requests = bodies(texts, options.top_k)
    levels = [_SOME, options.connections]
    rounds: list[dict[str, Any]] = []
    with (
        _run_other(options, application, python, weights, pair) as theirs,
        options.service(CACHE_ENTRIES="0") as our,
    ):
        cosines = _cosines(theirs, pair, texts[:_COMPARED])
        if min(cosines) < _LEAST_COSINE:
            message = f"{name} computes other vectors: cosine {min(cosines):.3f}"
            raise CareError(message, code="other_vectors", cosine=min(cosines))
        for clients in levels:
            for server in (theirs, our):
                drive(server.url, requests, clients, _WARM_UP_SECONDS)
            once = partial(_round, theirs, our, requests, clients, options.seconds)
            rounds += repeat(options.rounds, once)
        memory = {"theirs": theirs.rss(), "ours": our.rss()}
    middles = [medians([r for r in rounds if r["clients"] == clients]) for clients in levels]
    slowest = min(middle["qps_ratio"] for middle in middles)
    latest = max(middle["p99_ratio"] for middle in middles)
    qps, p99 = _worse_of(middles, "qps", "queries/s"), _worse_of(middles, "p99_ms", "ms")
    return {
        "figures": [
            figure(f"throughput ÷ {name}", slowest, ">=", goal, note=qps),
            figure(f"p99 ÷ {name}", latest, "<=", 1.0, note=p99),
        ],
        "medians": middles,
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


def _worse_of(middles: list[dict[str, float]], of: str, unit: str) -> str:
    return "the worse of " + "; ".join(
        f"{m['clients']:.0f} clients: {m[f'our_{of}']:.0f} to {m[f'their_{of}']:.0f} {unit}"
        for m in middles
    )


@contextmanager
def _run_other(
    options: Options, application: str, python: Path, weights: Path, pair: Pair
) -> Iterator[Server]:
    for path in (python, weights):
        if not path.exists():
            raise CareError.at(path, "is missing: `make bench` makes it", "baseline_missing")
    folder = index_folder(options.indexes, options.index)
    version = folder / current_version(options.indexes, options.index)
    with tempfile.TemporaryDirectory() as temporary:
        documents = Path(temporary) / "documents.jsonl"
        fields = ("id", "title", "text", "metadata")
        reader = DocumentReader(version / FILE_NAME)
        write_jsonl(documents, ({name: getattr(d, name) for name in fields} for d in reader))
        environment = os.environ | {
            "BENCH_VECTORS": str((version / VECTORS_FILE).resolve()),
            "BENCH_DOCUMENTS": str(documents),
            "BENCH_PROMPT": pair.query.prompt,
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        port = free_port()
        command = [
            *(str(python.absolute()), "-m", "uvicorn", f"{application}:app"),
            *("--app-dir", str(Path(__file__).with_name("baselines"))),
            *("--port", str(port), "--log-level", "warning", "--no-access-log"),
        ]
        url = f"http://127.0.0.1:{port}"
        with running_server(
            command, url, "/openapi.json", environment=environment, folder=weights
        ) as server:
            yield Server(server)


def _cosines(theirs: Server, pair: Pair, texts: list[str]) -> list[float]:
    """Returns cosines between their vectors and the service's of the same texts."""
    ours = OnnxEncoder(pair.query, pair.folder, 1).encode([normalize_text(t) for t in texts])
    vectors = np.array([theirs.post("/encode", {"query": text}) for text in texts])
    return [float(cosine) for cosine in (vectors * ours.vectors).sum(axis=1)]
