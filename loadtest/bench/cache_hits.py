"""Latency of hits in the cache of the process, one client."""

from typing import Any

from loadtest.bench.figures import at_most, medians
from loadtest.bench.options import BenchError, Options
from loadtest.bench.service import Server, run_service
from loadtest.bench.wrk import bodies, drive
from loadtest.queries import read_texts

GOAL_MS = 1.0
# As many as one measurement asks for many times over.
_QUERIES = 200


def run(options: Options) -> dict[str, Any]:
    """Asks the same questions again, once they are cached."""
    with run_service(options) as server:
        return measure_hits(server, options, "p50 of a hit in process", GOAL_MS)


def measure_hits(server: Server, options: Options, name: str, goal_ms: float) -> dict[str, Any]:
    """Asks questions until they are cached, then measures how fast they are answered.

    Args:
        server: A service with one cache.
        options: What the scenario was given.
        name: Of the figure.
        goal_ms: Highest median latency.

    Raises:
        BenchError: If a question that was asked before did not come from the cache.
    """
    texts = read_texts(options.queries)[:_QUERIES]
    questions = [{"query": text, "top_k": options.top_k} for text in texts]
    for question in questions:
        server.post("/search", question)
    missed = sum(not server.post("/search", question)["cached"] for question in questions)
    if missed:
        raise BenchError(f"{missed} of {len(questions)} questions asked again were not cached")
    rounds = []
    for number in range(options.rounds):
        load = drive(server.url, bodies(texts, options.top_k), 1, max(1, options.seconds // 2))
        rounds.append(load.as_json())
        print(f"  round {number + 1}: p50 {load.p50_ms:.2f} ms", flush=True)
    middle = medians(rounds)
    note = f"over HTTP; p99 {middle['p99_ms']:.2f} ms, {middle['qps']:.0f} queries/s"
    figure = at_most(name, middle["p50_ms"], goal_ms, unit="ms", note=note)
    return {"figures": [figure], "medians": middle, "rounds": rounds}
