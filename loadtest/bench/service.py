"""Scenarios of `make bench`: the modes of search, and overload."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from core.errors import CareError
from core.machine import available_cpus
from loadtest.bench.processes import WARM_UP_SECONDS, Server, bench_service, bodies, drive, sampled
from loadtest.bench.results import Scenario, ServiceOptions, figure, medians, repeat
from loadtest.measurement import Measurement, Target, measure
from loadtest.traffic import Traffic, read_texts

# Overload: multiple of the capacity, number of distinct questions, connections (more than the
# service admits at once, so that no request waits in the load generator), and time-out [s].
_OVERLOAD_FACTOR = 3
_OVERLOAD = f"{_OVERLOAD_FACTOR} × capacity"
_QUESTIONS = 20_000
_CONNECTIONS = 4000
_TIMEOUT = 30.0
# The pair whose query encoder is a lookup, for indexes of care-mini.
LOOKUP = "care-mini-lookup"


def modes(options: ServiceOptions) -> dict[str, Any]:
    """Compares hybrid and lexical search with dense search: throughput, and p50 of one client.

    If pair and index have token vectors, hits of a hybrid search are also ranked again. CareError
    if the index has no full text.
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
                drive(server.url, sent, options.connections, WARM_UP_SECONDS)
                full = drive(server.url, sent, options.connections, options.seconds)
                single = drive(server.url, sent, 1, options.seconds)
                found |= {f"{mode}_qps": full["qps"], f"{mode}_p50_ms": single["p50_ms"]}
                found |= {f"{mode}_full": full, f"{mode}_single": single}
            return found

        rounds = repeat(options.rounds, measure_round)
    typical = medians(rounds)
    added = typical["hybrid_p50_ms"] - typical["dense_p50_ms"]
    note = ", ".join(
        f"{mode} {typical[f'{mode}_p50_ms']:.2f} ms alone and {typical[f'{mode}_qps']:.0f} "
        "queries/s at full load"
        for mode in requests
    )
    name = "p50 that full text adds to a search, one client"
    return _result(rounds, figure(name, added, "<=", 2.0, "ms", note))


def workers(options: ServiceOptions) -> dict[str, Any]:
    """Compares several workers with one process that has as many threads as all of them."""
    texts = read_texts(options.queries)
    requests = {mode: bodies(texts, options.top_k, mode) for mode in ("dense", "hybrid", "lexical")}
    one = replace(options, workers=1)
    threads = str(available_cpus())
    with (
        bench_service(one, CACHE_ENTRIES="0", THREADS=threads) as alone,
        bench_service(options, CACHE_ENTRIES="0") as together,
    ):

        def measure_round() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for mode, sent in requests.items():
                rates = []
                for server in (alone, together):
                    drive(server.url, sent, options.connections, WARM_UP_SECONDS)
                    load = drive(server.url, sent, options.connections, options.seconds)
                    rates.append(load["qps"])
                found |= {f"{mode}_one_qps": rates[0], f"{mode}_qps": rates[1]}
                found[f"{mode}_ratio"] = rates[1] / rates[0]
            return found

        rounds = repeat(options.rounds, measure_round)
        memory = {"one": alone.rss(), "together": together.rss()}
    typical = medians(rounds)
    figures = []
    for mode, goal in (("dense", 1.0), ("hybrid", 1.3), ("lexical", 1.0)):
        note = f"{typical[f'{mode}_qps']:.0f} ÷ {typical[f'{mode}_one_qps']:.0f} queries/s"
        name = f"{mode}: {options.workers} workers ÷ one process"
        figures.append(figure(name, typical[f"{mode}_ratio"], ">=", goal, note=note))
    return _result(rounds, *figures) | {"memory_bytes": memory}


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


def _overload_rounds(
    server: Server, options: ServiceOptions
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Alternates full load and overload; returns the rounds, and resident memory [bytes]."""
    traffic = Traffic(read_texts(options.queries), seed=0)
    requests = bodies((traffic.new() for _ in range(_QUESTIONS)), options.top_k)
    load = drive(server.url, requests, options.connections, WARM_UP_SECONDS)
    # The first overload allocates memory that later ones reuse.
    _send(server.url, requests, _OVERLOAD_FACTOR * load["qps"], options.seconds)
    with sampled(server.rss, every=1.0) as samples:
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
    target = Target(url)
    sent = islice(cycle(requests), round(rate * seconds))
    messages = [target.message("POST", "/search", body.encode()) for body in sent]
    return measure(target, messages, rate, _CONNECTIONS, _TIMEOUT)


def _result(rounds: list[dict[str, Any]], *figures: dict[str, Any]) -> dict[str, Any]:
    return {"figures": list(figures), "medians": medians(rounds), "rounds": rounds}


SCENARIOS: Mapping[str, Scenario] = {
    "modes": modes,
    "workers": workers,
    "overload": overload,
    "overflow": overflow,
}
