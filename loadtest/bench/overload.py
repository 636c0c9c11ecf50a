"""Three times the load that the service can carry: what it still answers, and how late."""

from itertools import cycle
from typing import Any

import uvloop

from loadtest.bench.figures import at_least, at_most, medians
from loadtest.bench.options import Options
from loadtest.bench.service import Server, run_service, watch_memory
from loadtest.bench.wrk import bodies, drive
from loadtest.connections import Client
from loadtest.measurement import Measurement, measure
from loadtest.queries import Questions, read_texts

TIMES = 3
GOODPUT_GOAL, LATENCY_GOAL, MEMORY_GOAL = 0.9, 2.0, 1.05
_SEED = 0
_QUESTIONS = 20_000
_WARM_UP_SECONDS = 2
_TIMEOUT = 30.0
# More than can wait at once, so that none waits in the driver.
_CONNECTIONS = 4000


def run(options: Options) -> dict[str, Any]:
    """Alternates full load, from wrk, with three times that rate, from an open loop."""
    questions = Questions(read_texts(options.queries), _SEED)
    requests = bodies((questions.fresh() for _ in range(_QUESTIONS)), options.top_k)
    rounds = []
    with run_service(options, CACHE_ENTRIES="0") as server:
        load = drive(server.url, requests, options.connections, _WARM_UP_SECONDS)
        # Memory grows to what overload needs once; from then on it should stay.
        _overload(server.url, requests, TIMES * load.qps, options.seconds)
        with watch_memory(server) as memory:
            for number in range(options.rounds):
                entry = _round(server, requests, options)
                rounds.append(entry)
                print(
                    f"  round {number + 1}: capacity {entry['capacity_qps']:.1f}/s, "
                    f"of {TIMES} × that {entry['goodput_qps']:.1f}/s answered, "
                    f"p99 {entry['p99_ms']:.0f} ms",
                    flush=True,
                )
    middle = medians(rounds)
    rss = memory.as_json()
    spread = (
        f"{middle['goodput_qps']:.0f} of {middle['capacity_qps']:.0f} queries/s; the driver takes "
        f"{middle['driver_cpu']:.2f} processors from the service"
    )
    late = (
        f"p99 {middle['p99_ms']:.0f} ms of those answered; the queue holds "
        f"{middle['queue_bound_s']:.2f} s of work"
    )
    grown = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in rss.items())
    return {
        "figures": [
            at_least(
                f"answered at {TIMES} × capacity ÷ capacity",
                middle["goodput_ratio"],
                GOODPUT_GOAL,
                note=spread,
            ),
            at_most(
                f"p99 at {TIMES} × capacity ÷ queue bound",
                middle["latency_ratio"],
                LATENCY_GOAL,
                note=late,
            ),
            at_most(
                "memory after overload ÷ before",
                rss["after"] / rss["before"],
                MEMORY_GOAL,
                note=grown,
            ),
        ],
        "medians": middle,
        "rounds": rounds,
        "rss_bytes": rss,
    }


def _round(server: Server, requests: list[str], options: Options) -> dict[str, Any]:
    tokens = server.metric("care_admitted_tokens_total")
    load = drive(server.url, requests, options.connections, options.seconds)
    tokens_per_second = (server.metric("care_admitted_tokens_total") - tokens) / load.seconds
    bound = server.metric("care_queue_tokens_limit") / tokens_per_second
    found = _overload(server.url, requests, TIMES * load.qps, options.seconds)
    return {
        "capacity_qps": load.qps,
        "tokens_per_second": tokens_per_second,
        "queue_bound_s": bound,
        "goodput_qps": found.goodput,
        "goodput_ratio": found.goodput / load.qps,
        "p99_ms": found.latency_ms["p99"],
        "latency_ratio": found.latency_ms["p99"] / 1000 / bound,
        "driver_cpu": found.driver_cpu,
        "capacity": load.as_json(),
        "overload": found.as_json(),
    }


def _overload(url: str, requests: list[str], rate: float, seconds: int) -> Measurement:
    async def send() -> Measurement:
        async with Client(url, limit=_CONNECTIONS, timeout=_TIMEOUT) as client:
            wanted = cycle(requests)
            messages = [
                client.message("POST", "/search", next(wanted).encode())
                for _ in range(round(rate * seconds))
            ]
            return await measure(client.send, messages, rate)

    return uvloop.run(send())
