"""What HTTP adds to the latency of one client with an otherwise idle service."""

from typing import Any

from core.cpus import available_cpus
from loadtest.bench.bare import Way
from loadtest.bench.bare_process import run_bare
from loadtest.bench.figures import at_most, medians
from loadtest.bench.options import Options
from loadtest.bench.service import run_service
from loadtest.bench.wrk import bodies, drive
from loadtest.queries import read_texts

GOAL_MS = 1.0
_WARM_UP_SECONDS = 1


def run(options: Options) -> dict[str, Any]:
    """Alternates single queries in the bare loop with one client of the service."""
    requests = bodies(read_texts(options.queries), options.top_k)
    # The session that the service encodes with: all processors, no spinning.
    way = Way(batch=1, sessions=1, threads=available_cpus(), spinning=False)
    rounds = []
    with run_service(options, CACHE_ENTRIES="0") as server:
        for number in range(options.rounds):
            bare = run_bare(options, "latency", options.seconds, way)
            drive(server.url, requests, 1, _WARM_UP_SECONDS)
            load = drive(server.url, requests, 1, options.seconds)
            rounds.append(
                {
                    "bare_p50_ms": bare["p50_ms"],
                    "http_p50_ms": load.p50_ms,
                    "added_ms": load.p50_ms - bare["p50_ms"],
                    "bare": bare,
                    "http": load.as_json(),
                }
            )
            print(
                f"  round {number + 1}: bare {bare['p50_ms']:.2f} ms, HTTP {load.p50_ms:.2f} ms",
                flush=True,
            )
    middle = medians(rounds)
    note = f"p50 {middle['http_p50_ms']:.2f} ms over HTTP, {middle['bare_p50_ms']:.2f} ms bare"
    return {
        "figures": [
            at_most(
                "p50 that HTTP adds, one client", middle["added_ms"], GOAL_MS, unit="ms", note=note
            )
        ],
        "medians": middle,
        "rounds": rounds,
    }
