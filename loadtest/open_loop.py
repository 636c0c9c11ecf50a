"""Measures latency at constant arrival rates, or finds the highest rate within a bound.

    python -m loadtest.open_loop --url http://127.0.0.1:8000 --rates 50,100,200
    python -m loadtest.open_loop --url http://127.0.0.1:8000 --find-max --bound-ms 100

Writes `open_loop.json` and `open_loop.png`. `CARE_LOAD_KEY` holds the API key, if one is needed.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from loadtest.capacity import Capacity, Grid, find_max
from loadtest.connections import Client
from loadtest.measurement import Measurement, measure
from loadtest.plots import plot_latency
from loadtest.queries import SAMPLE, Questions, read_texts
from loadtest.traffic import Mix, Traffic, departments_of


class Driver:
    """Measures one service at one rate after another.

    Args:
        client: Sends the requests.
        traffic: Composes them.
        seconds: Length of each measurement.
        pause: Rest before each, for what is left of the one before [s].
    """

    def __init__(self, client: Client, traffic: Traffic, seconds: float, pause: float) -> None:
        self._client = client
        self._traffic = traffic
        self._seconds = seconds
        self._pause = pause
        self.measurements: list[Measurement] = []

    async def warm_up(self, rate: float, seconds: float) -> None:
        """Sends requests that no measurement counts."""
        if seconds > 0:
            await measure(self._client.send, self._messages(rate, seconds), rate)

    async def measure(self, rate: float) -> Measurement:
        """Measures at a rate [requests/s], keeps and prints the result."""
        messages = self._messages(rate, self._seconds)
        await asyncio.sleep(self._pause)
        measurement = await measure(self._client.send, messages, rate)
        self.measurements.append(measurement)
        print(_row(measurement), flush=True)
        return measurement

    def _messages(self, rate: float, seconds: float) -> list[bytes]:
        requests = (self._traffic.draw() for _ in range(max(1, round(rate * seconds))))
        return [
            self._client.message("POST", r.path, json.dumps(r.body, ensure_ascii=False).encode())
            for r in requests
        ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 if not even the lowest rate was sustained."""
    options = _parser().parse_args(arguments)
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    seed = random.randrange(2**32) if options.seed is None else options.seed
    mix = Mix(options.repeated, options.filtered, options.batches)
    grid = Grid(options.lowest, options.highest, options.step)
    key = os.environ.get("CARE_LOAD_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = datetime.now(UTC)
    async with Client(options.url, headers, options.connections, options.timeout) as client:
        try:
            status, body = await client.send(client.message("GET", "/index"))
        except OSError as error:
            print(f"{options.url} does not answer: {error}", file=sys.stderr)
            return 2
        if status != 200:
            print(f"GET /index was answered with {status}", file=sys.stderr)
            return 2
        index = json.loads(body)
        questions = Questions(read_texts(options.queries), seed)
        traffic = Traffic(questions, mix, departments_of(index), seed)
        driver = Driver(client, traffic, options.seconds, options.pause)
        await driver.warm_up(
            options.lowest if options.find_max else options.rates[0], options.warm_up
        )
        print(_HEAD, flush=True)
        capacity = None
        if options.find_max:
            capacity = await find_max(
                driver.measure, grid, options.bound_ms, options.max_error_rate, options.attempts
            )
        else:
            for rate in options.rates:
                await driver.measure(rate)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "started": started.isoformat(timespec="seconds"),
        "url": options.url,
        "index": {name: index[name] for name in ("name", "version", "pair") if name in index},
        "seed": seed,
        "mix": asdict(mix),
        "queries": {
            "file": str(options.queries),
            "sha256": hashlib.sha256(options.queries.read_bytes()).hexdigest(),
        },
        "seconds": options.seconds,
        "connections": options.connections,
        "timeout": options.timeout,
        "versions": {"python": platform.python_version(), "httptools": version("httptools")},
        "measurements": [m.as_json() for m in driver.measurements],
    }
    if capacity:
        result["find_max"] = {
            "bound_ms": options.bound_ms,
            "max_error_rate": options.max_error_rate,
            "attempts": options.attempts,
            "grid": asdict(grid),
            **asdict(capacity),
        }
        print(_verdict(capacity, options.bound_ms))
    path = options.out / "open_loop.json"
    path.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    plot_latency(
        driver.measurements,
        path.with_suffix(".png"),
        options.bound_ms if capacity else None,
        capacity.rate if capacity else None,
    )
    print(path)
    return 1 if capacity and capacity.rate is None else 0


_COLUMNS = ("rate", "good/s", "p50", "p90", "p99", "max ms", "lag p99", "late", "driver cpu")
_HEAD = "".join(f"{column:>11}" for column in _COLUMNS) + "  statuses"


def _row(m: Measurement) -> str:
    numbers = [
        f"{m.rate:.1f}",
        f"{m.goodput:.1f}",
        *(f"{m.latency_ms[q]:.1f}" if m.latency_ms else "-" for q in ("p50", "p90", "p99", "max")),
        f"{m.lag_ms['p99']:.1f}",
        f"{m.late}",
        f"{m.driver_cpu:.0%}",
    ]
    statuses = " ".join(f"{status}:{count}" for status, count in m.statuses.items())
    note = "" if m.kept_schedule else "  driver behind: not the service's"
    return "".join(f"{number:>11}" for number in numbers) + f"  {statuses}{note}"


def _verdict(capacity: Capacity, bound_ms: float) -> str:
    if capacity.rate is None:
        return f"Not even the lowest rate was sustained within {bound_ms:g} ms."
    reason = {
        "service": "the next rate was too high for the service",
        "driver": "at the next rate the driver fell behind; the service may sustain more",
        "grid": "no higher rate was tried",
    }[capacity.limited_by]
    return f"{capacity.rate:g} requests per second within p99 {bound_ms:g} ms: {reason}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.open_loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="http://host:port of the service")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rates", type=_rates, help="requests per second, joined by commas")
    what.add_argument("--find-max", action="store_true", help="seek the highest rate within bounds")
    add("--bound-ms", type=_positive, default=100, help="highest p99, for --find-max")
    add("--max-error-rate", type=float, default=0.001, help="share of requests, for --find-max")
    add("--lowest", type=_positive, default=Grid.low, help="first rate of --find-max")
    add("--highest", type=_positive, default=Grid.high, help="last rate of --find-max")
    add("--step", type=_positive, default=Grid.step, help="from a rate of --find-max to the next")
    add("--attempts", type=int, default=2, help="failed measurements that make a rate too high")
    add("--seconds", type=_positive, default=10, help="length of each measurement")
    add("--warm-up", type=float, default=2, help="seconds before the first, not counted")
    add("--pause", type=float, default=1, help="seconds of rest before each measurement")
    add("--timeout", type=_positive, default=10, help="seconds until a request is given up")
    add("--connections", type=int, default=1000, help="most connections at once")
    add("--queries", type=Path, default=SAMPLE, help="JSONL with `text`")
    add("--repeated", type=float, default=Mix.repeated, help="share of questions asked before")
    add("--filtered", type=float, default=Mix.filtered, help="share of questions with a filter")
    add("--batches", type=float, default=Mix.batches, help="share of requests that are batches")
    add("--seed", type=int, help="of the traffic; another each time if none is given")
    add("--out", type=Path, default=Path("loadtest/results/open_loop"), help="folder of the result")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _rates(text: str) -> list[float]:
    return [_positive(rate) for rate in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
