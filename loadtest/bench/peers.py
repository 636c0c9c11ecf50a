"""Scenarios of `make bench-peers`: the service beside its bare loop and beside other systems.

All have the same index, questions and clients, and the weights of the query side.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import repeat as again
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np

from core.documents import FILE_NAME, DocumentReader
from core.encoders import Pair
from core.errors import CareError
from core.machine import available_cpus
from core.manifest import VECTORS_FILE
from core.records import write_jsonl
from core.text import normalize_text
from core.versions import IndexFolder, read_manifest
from loadtest.bench.processes import (
    WARM_UP_SECONDS,
    Server,
    bench_service,
    bodies,
    drive,
    peer_server,
    run_in_new_process,
)
from loadtest.bench.results import Scenario, ServiceOptions, figure, medians, repeat
from loadtest.traffic import read_texts
from models.encoders.onnx import OUTPUT, OnnxEncoder
from models.pairs import load_pair

# The Pythons of the environments of sentence-transformers and infinity.
PYTHONS = Path(".venv-bench/bin/python"), Path(".venv-bench-infinity/bin/python")

_BATCHES = (1, 4, 16, 64)
# Cached questions, which a measurement repeats many times, and numbers of clients.
_CACHED = 200
_CACHE_CLIENTS = (1, 32)
# Clients at light load; `options.connections` clients saturate the service.
_FEW_CLIENTS = 8
# Questions whose vectors are compared, and the minimum cosine between the two systems' vectors.
_COMPARED_QUESTIONS = 20
_MIN_COSINE = 0.99
# Operators that a layer can end with.
_NORMALISATIONS = ("SkipLayerNormalization", "LayerNormalization")
HIDDEN_STATES = "last_hidden_state"


def bare_loop(options: ServiceOptions) -> dict[str, Any]:
    """Compares with the service's own work without a server.

    That is throughput at full load, beside the fastest of some configurations of the loop, and the
    latency that HTTP adds for one client of an otherwise idle service.
    """
    requests, cpus = bodies(read_texts(options.queries), options.top_k), available_cpus()
    speed = {
        (batch, *shape): run_in_new_process(loop, options, batch, *shape, 1.0)["qps"]
        for shape in sorted({(1, cpus), (cpus, 1)})
        for batch in _BATCHES
    }
    best = batch, sessions, threads = max(speed, key=speed.__getitem__)
    with bench_service(options, CACHE_ENTRIES="0") as server:

        def measure_round() -> dict[str, Any]:
            alone = run_in_new_process(loop, options, *best, options.seconds)
            # As the service encodes one query: `CARE_ENCODE_THREADS` is 1.
            single = run_in_new_process(loop, options, 1, 1, 1, options.seconds)
            drive(server.url, requests, options.connections, WARM_UP_SECONDS)
            load = drive(server.url, requests, options.connections, options.seconds)
            one = drive(server.url, requests, 1, options.seconds)
            return {
                **{"bare_qps": alone["qps"], "http_qps": load["qps"]},
                **{"bare_p50_ms": single["p50_ms"], "http_p50_ms": one["p50_ms"]},
                "ratio": load["qps"] / alone["qps"],
                "added_ms": one["p50_ms"] - single["p50_ms"],
                **{"full_load": load, "one_client": one},
            }

        rounds = repeat(options.rounds, measure_round)
    typical = medians(rounds)
    rates = f"{typical['http_qps']:.0f} ÷ {typical['bare_qps']:.0f} queries/s (fastest loop: "
    rates += f"batches of {batch}, {sessions} × {threads} threads)"
    times = f"p50 {typical['http_p50_ms']:.2f} ms over HTTP, "
    times += f"{typical['bare_p50_ms']:.2f} ms in the bare loop"
    ratio, added = typical["ratio"], typical["added_ms"]
    figures = [
        figure("throughput over HTTP ÷ bare loop", ratio, ">=", 0.9, note=rates),
        figure("p50 added by HTTP, one client", added, "<=", 0.5, "ms", times),
    ]
    loops = [[*config, qps] for config, qps in speed.items()]
    return {"figures": figures, "medians": typical, "rounds": rounds, "loops": loops}


def loop(
    options: ServiceOptions, batch: int, sessions: int, threads: int, seconds: float
) -> dict[str, float]:
    """Tokenizes, encodes and searches all questions, in batches of `batch` of similar length.

    Run it in a new process, so that other threads do not affect it. Each of `sessions` threads has
    an encoder with `threads` threads. The last pass through the questions is completed after
    `seconds`. Returns `qps`, questions per second, and `p50_ms` of a batch.
    """
    pair, version = load_pair(options.pair), _version(options)
    index = faiss.read_index(str(version / VECTORS_FILE), faiss.IO_FLAG_MMAP_IFC)
    for name, value in read_manifest(version).search_parameters.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    texts = sorted(map(normalize_text, read_texts(options.queries)), key=len, reverse=True)
    work = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    encoders = [OnnxEncoder(pair.query, pair.folder, threads) for _ in range(sessions)]

    def search(encoder: OnnxEncoder, batches: Iterable[list[str]]) -> list[float]:
        faiss.omp_set_num_threads(threads)
        spent = []
        for questions in batches:  # threads share it; advancing a list iterator is atomic
            before = time.perf_counter()
            index.search(encoder.encode(questions).vectors, options.top_k)
            spent.append(time.perf_counter() - before)
        return spent

    for encoder in encoders:
        search(encoder, work[:3])
    spent: list[float] = []
    with ThreadPoolExecutor(sessions) as pool:
        started = time.perf_counter()
        while not spent or time.perf_counter() - started < seconds:
            for found in pool.map(search, encoders, again(iter(work))):
                spent += found
        total = time.perf_counter() - started
    passes = len(spent) // len(work)
    return {"qps": passes * len(texts) / total, "p50_ms": 1000 * median(spent)}


def fastapi(options: ServiceOptions) -> dict[str, Any]:
    """Compares hits in the in-process cache with an application that returns the same hits.

    It runs as many workers as the service.
    """
    texts = read_texts(options.queries)[:_CACHED]
    requests, seconds = bodies(texts, options.top_k), max(1, options.seconds // 2)
    with bench_service(options) as server, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hits.jsonl"
        write_jsonl(path, _fill_cache(server, requests, options.workers))
        given = {"BENCH_DOCUMENTS": str(path)}
        python = Path(sys.executable)
        with peer_server("fastapi", python, given, workers=options.workers) as plain:

            def measure_round(clients: int) -> dict[str, Any]:
                found = [drive(s.url, requests, clients, seconds) for s in (server, plain)]
                cached, theirs = (load["qps"] for load in found)
                ratio = {"cached_qps": cached, "plain_qps": theirs, "ratio": cached / theirs}
                return {"clients": clients, **ratio, "p50_ms": found[0]["p50_ms"], "loads": found}

            for each in (server, plain):
                drive(each.url, requests, 1, WARM_UP_SECONDS)
            rounds = {
                clients: repeat(options.rounds, partial(measure_round, clients))
                for clients in _CACHE_CLIENTS
            }
    figures = []
    for clients, found in rounds.items():
        typical = medians(found)
        note = f"{typical['cached_qps']:.0f} ÷ {typical['plain_qps']:.0f} requests/s; "
        note += f"p50 of a hit {typical['p50_ms']:.2f} ms"
        name = f"cached hits ÷ plain FastAPI, {clients} client{'s' if clients > 1 else ''}"
        figures.append(figure(name, typical["ratio"], ">=", 1.0, note=note))
    return {"figures": figures, "rounds": [entry for found in rounds.values() for entry in found]}


def _fill_cache(server: Server, requests: Sequence[str], workers: int) -> list[dict[str, Any]]:
    """Sends questions until they are cached; returns the hits of the first one."""
    # Each worker has a cache, and gets some of the requests.
    for _ in range(1 if workers == 1 else 8 * workers):
        for body in requests:
            server.post("/search", json.loads(body))
    answers = [server.post("/search", json.loads(body)) for body in requests]
    if missed := sum(not answer["cached"] for answer in answers):
        message = f"{missed} of {len(answers)} repeated questions were not served from the cache"
        raise CareError(message, code="not_cached", missed=missed)
    hits: list[dict[str, Any]] = answers[0]["hits"]
    return hits


def sentence_transformers(options: ServiceOptions) -> dict[str, Any]:
    """Compares with an application of FastAPI, sentence-transformers and FAISS."""
    name = "FastAPI + sentence-transformers"
    return compare(options, name, "sentence_transformers", PYTHONS[0], goal=6.0)


def infinity(options: ServiceOptions) -> dict[str, Any]:
    """Compares with infinity's engine and the service's own graph."""
    name = "infinity (the service's int8 graph)"
    return compare(options, name, "infinity", PYTHONS[1], goal=2.0)


def compare(
    options: ServiceOptions, name: str, application: str, python: Path, goal: float
) -> dict[str, Any]:
    """Measures the service and another system in turn, at two numbers of clients, without cache.

    `application` is the function of the other system in `baselines/app.py`, `python` that of its
    environment; `goal` is for the ratio of throughputs, the service to the other system. CareError
    if the systems compute different vectors, or the environment is missing.
    """
    if not python.exists():
        raise CareError.at(python, "is missing: `make bench-peers` creates it", "baseline_missing")
    pair, texts = load_pair(options.pair), read_texts(options.queries)
    requests = bodies(texts, options.top_k)
    levels = [_FEW_CLIENTS, options.connections]
    rounds: list[list[dict[str, Any]]] = []
    with (
        _run_other(options, application, python, pair) as theirs,
        bench_service(options, CACHE_ENTRIES="0") as ours,
    ):
        cosines = _cosines(theirs, pair, texts[:_COMPARED_QUESTIONS])
        if min(cosines) < _MIN_COSINE:
            message = f"{name} and the service compute different vectors: lowest cosine "
            message += f"{min(cosines):.3f}, at least {_MIN_COSINE} expected"
            raise CareError(message, code="other_vectors", cosine=min(cosines))

        def measure_round(clients: int) -> dict[str, Any]:
            their, our = (drive(s.url, requests, clients, options.seconds) for s in (theirs, ours))
            return {
                **{"clients": clients, "their_qps": their["qps"], "our_qps": our["qps"]},
                **{"their_p99_ms": their["p99_ms"], "our_p99_ms": our["p99_ms"]},
                "qps_ratio": our["qps"] / their["qps"],
                "p99_ratio": our["p99_ms"] / their["p99_ms"],
                **{"theirs": their, "ours": our},
            }

        for clients in levels:
            for server in (theirs, ours):
                drive(server.url, requests, clients, WARM_UP_SECONDS)
            rounds.append(repeat(options.rounds, partial(measure_round, clients)))
        memory = {"theirs": theirs.rss(), "ours": ours.rss()}
    by_clients = [medians(found) for found in rounds]
    slowest = min(found["qps_ratio"] for found in by_clients)
    latest = max(found["p99_ratio"] for found in by_clients)
    qps, p99 = _worst_of(by_clients, "qps", "queries/s"), _worst_of(by_clients, "p99_ms", "ms")
    return {
        "figures": [
            figure(f"throughput ÷ {name}", slowest, ">=", goal, note=qps),
            figure(f"p99 ÷ {name}", latest, "<=", 1.0, note=p99),
        ],
        "medians": by_clients,
        "rounds": [entry for found in rounds for entry in found],
        "cosines": cosines,
        "rss_bytes": memory,
    }


def _worst_of(by_clients: list[dict[str, float]], of: str, unit: str) -> str:
    return "worst case of " + "; ".join(
        f"{m['clients']:.0f} clients: {m[f'our_{of}']:.0f} ÷ {m[f'their_{of}']:.0f} {unit}"
        for m in by_clients
    )


@contextmanager
def _run_other(
    options: ServiceOptions, application: str, python: Path, pair: Pair
) -> Iterator[Server]:
    version = _version(options)
    with tempfile.TemporaryDirectory() as temporary:
        model, documents = Path(temporary) / "model", Path(temporary) / "documents.jsonl"
        write_model(pair, model)
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
        with peer_server(application, python, variables, model) as server:
            yield server


def _cosines(theirs: Server, pair: Pair, texts: list[str]) -> list[float]:
    """Returns the cosine between the two systems' vectors of each text."""
    ours = OnnxEncoder(pair.query, pair.folder, 1).encode([normalize_text(t) for t in texts])
    vectors = np.array([theirs.post("/encode", {"query": text}) for text in texts])
    return [float(cosine) for cosine in (vectors * ours.vectors).sum(axis=1)]


def _version(options: ServiceOptions) -> Path:
    folder = IndexFolder(options.indexes, options.index)
    return folder.path / folder.active()


def write_model(pair: Pair, folder: Path) -> None:
    """Writes a pair's query side as the other systems load it.

    sentence-transformers reads the dequantised weights, infinity the graph of the service without
    its pooling. Both use the same tokenizer, so that every system encodes the same tokens.
    """
    import onnx

    from training.export.checkpoint import write_checkpoint
    from training.export.onnx import save

    write_checkpoint(pair.query, pair.folder, folder)
    graph = onnx.load(pair.folder / pair.query.weights)
    save(without_pooling(graph, pair.query.native_dimension), folder / "model.onnx")


def without_pooling(model: Any, width: int) -> Any:
    """Cuts a sentence encoder's graph after its last layer.

    The input is an ONNX graph with the output `sentence_embedding` (else ValueError); the result
    has the output `last_hidden_state`, float32 [n, length, width].
    """
    from onnx import ModelProto, TensorProto, helper
    from onnx.utils import Extractor

    if [output.name for output in model.graph.output] != [OUTPUT]:
        raise ValueError(f"the graph must have {OUTPUT} as its only output")
    cut = ModelProto()
    cut.CopyFrom(model)
    last = max(i for i, node in enumerate(cut.graph.node) if node.op_type in _NORMALISATIONS)
    cut.graph.node[last].output[0] = HIDDEN_STATES
    shape: list[str | int | None] = ["n", "length", width]
    states = helper.make_tensor_value_info(HIDDEN_STATES, TensorProto.FLOAT, shape)
    cut.graph.value_info.append(states)
    inputs = [value.name for value in cut.graph.input]
    return Extractor(cut).extract_model(inputs, [HIDDEN_STATES])


SCENARIOS: Mapping[str, Scenario] = {
    "bare-loop": bare_loop,
    "fastapi": fastapi,
    "sentence-transformers": sentence_transformers,
    "infinity": infinity,
}
