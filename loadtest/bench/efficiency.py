"""What of the bare loop's throughput is left over HTTP, from wrk on the same processors."""

from typing import Any

from core.cpus import available_cpus
from loadtest.bench.bare import Way
from loadtest.bench.bare_process import run_bare
from loadtest.bench.figures import at_least, medians
from loadtest.bench.options import Options
from loadtest.bench.service import run_service
from loadtest.bench.wrk import bodies, drive
from loadtest.queries import read_texts

GOAL = 0.88
_EXPLORE_SECONDS = 1.0
_WARM_UP_SECONDS = 2


def run(options: Options) -> dict[str, Any]:
    """Alternates the bare loop with the service under full load, its cache off."""
    requests = bodies(read_texts(options.queries), options.top_k)
    tried = run_bare(options, "explore", _EXPLORE_SECONDS)
    best = {name: value for name, value in tried[0].items() if name != "qps"}
    way = Way(**best)
    rounds = []
    with run_service(options, CACHE_ENTRIES="0") as server:
        for number in range(options.rounds):
            bare = run_bare(options, "sustain", options.seconds, way)["qps"]
            drive(server.url, requests, options.connections, _WARM_UP_SECONDS)
            cpu = server.cpu()
            load = drive(server.url, requests, options.connections, options.seconds)
            busy = (server.cpu() - cpu) / load.seconds / available_cpus()
            rounds.append(
                {
                    "bare_qps": bare,
                    "http_qps": load.qps,
                    "ratio": load.qps / bare,
                    "wrk_share": load.wrk_share,
                    "service_share": busy,
                    "http": load.as_json(),
                }
            )
            print(f"  round {number + 1}: bare {bare:.1f}/s, HTTP {load.qps:.1f}/s", flush=True)
    middle = medians(rounds)
    note = (
        f"{middle['http_qps']:.0f} of {middle['bare_qps']:.0f} queries/s (best of bare: batches "
        f"of {way.batch}, {way.sessions} × {way.threads} threads"
        f"{', spinning' if way.spinning else ''}); wrk takes {middle['wrk_share']:.1%} of the "
        f"processors, the service {middle['service_share']:.1%}"
    )
    ratio = middle["http_qps"] / middle["bare_qps"]
    return {
        "figures": [at_least("throughput over HTTP ÷ bare loop", ratio, GOAL, note=note)],
        "medians": middle,
        "rounds": rounds,
        "best_way": best,
        "ways": tried,
    }
