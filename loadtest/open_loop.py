"""Measures latency at constant arrival rates, or finds the highest rate within a bound.

    python -m loadtest.open_loop --url http://127.0.0.1:8000 --rates 50,100,200
    python -m loadtest.open_loop --url http://127.0.0.1:8000 --find-max --bound-ms 100

Writes `open_loop.json` and `open_loop.png`. `CARE_LOAD_KEY` holds the API key, if one is needed.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import uvloop
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from core.cli import positive_float, positive_int, run
from core.errors import CareError
from core.files import sha256_file
from core.provenance import environment
from core.records import write_json
from loadtest.measurement import Client, Measurement, measure
from loadtest.traffic import Mix, Traffic, departments_of, read_texts

_LIMITS = {
    "service": "the next rate was too high for the service",
    "driver": "at the next rate the driver fell behind; the service may sustain more",
    "grid": "no higher rate was tried",
}


@dataclass(frozen=True)
class Capacity:
    """The highest rate that a service sustains [requests/s]; None if not even the lowest.

    `limited_by` says why it is not the next: `service`, or `driver` if that fell behind its
    schedule, so that the service may sustain more; `grid` if there was none.
    """

    rate: float | None
    limited_by: Literal["service", "driver", "grid"]


def grid(lowest: float, highest: float, step: float) -> list[float]:
    """Returns rates from `lowest` to about `highest`, each `step` times the one before."""
    count = math.floor(math.log(highest / lowest, step) + 1e-9) + 1
    return [round(lowest * step**i, 1) for i in range(count)]


async def find_max(
    measure: Callable[[float], Awaitable[Measurement]],
    rates: Sequence[float],
    bound_ms: float,
    max_error_rate: float,
    attempts: int = 2,
) -> Capacity:
    """Finds the highest rate whose p99 and errors are within their bounds.

    The rate is doubled from the lowest until it is too high, then bisected: a service is never
    sent much more than twice what it sustains. The rates [requests/s] ascend.

    One is too high after so many attempts out of the bounds; more than one, so that a hiccup of
    the machine is not taken for the limit.
    """
    doubling = max(1, sum(rate < 2 * rates[0] for rate in rates))
    limited_by: Literal["service", "driver", "grid"] = "grid"
    # rates[good] is sustained, rates[bad] is not; one is before the grid, the other behind it.
    good, bad, place = -1, len(rates), 0
    while bad - good > 1:
        failed: list[Measurement] = []
        while len(failed) < attempts:
            measurement = await measure(rates[place])
            if measurement.within(bound_ms, max_error_rate):
                good = place
                break
            failed.append(measurement)
        else:
            bad = place
            limited_by = "service" if any(m.kept_schedule for m in failed) else "driver"
        unbounded = bad == len(rates)
        place = min(good + doubling, len(rates) - 1) if unbounded else (good + bad) // 2
    return Capacity(rates[good] if good >= 0 else None, limited_by)


def plot_latency(
    measurements: Sequence[Measurement], path: Path, bound_ms: float | None, capacity: float | None
) -> None:
    """Draws latency against arrival rate as a PNG, with the bound on p99 and the rate within it.

    Each measurement is a dot, hollow where the driver fell behind; the lines join the last full
    dot of each rate.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    answered = sorted((m for m in measurements if m.latency_ms), key=lambda m: m.rate)
    for color, name in (("C0", "p50"), ("C1", "p90"), ("C2", "p99")):
        line = {m.rate: m.latency_ms[name] for m in answered if m.kept_schedule}
        axes.plot(list(line), list(line.values()), color=color, label=name)
        for m in answered:
            fill = color if m.kept_schedule else "none"
            axes.plot(m.rate, m.latency_ms[name], "o", color=color, markerfacecolor=fill)
    if not all(m.kept_schedule for m in answered):
        axes.plot([], [], "o", color="grey", markerfacecolor="none", label="driver behind")
    if bound_ms is not None:
        axes.axhline(bound_ms, color="grey", linestyle=":", label=f"bound {bound_ms:g} ms")
    if capacity is not None:
        axes.axvline(capacity, color="grey", linestyle="--", label=f"highest {capacity:g} /s")
    axes.set(xlabel="requests per second, due", ylabel="latency [ms]")
    if answered:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    else:
        axes.set_title("no request was answered")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 if not even the lowest rate was sustained."""
    options = _parser().parse_args(arguments)
    return run(lambda: uvloop.run(_measure(options)))


async def _measure(options: argparse.Namespace) -> None:
    seed = random.randrange(2**32) if options.seed is None else options.seed
    mix = Mix.of(options)
    key = os.environ.get("CARE_LOAD_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = datetime.now(UTC)
    measurements: list[Measurement] = []
    capacity = None
    async with Client(options.url, headers, options.connections, options.timeout) as client:
        index = await _index(client, options.url)
        traffic = Traffic(read_texts(options.queries), seed, mix, departments_of(index))

        async def send(rate: float, seconds: float, pause: float = 0) -> Measurement:
            requests = [traffic.draw() for _ in range(max(1, round(rate * seconds)))]
            due = [
                client.message("POST", path, json.dumps(body, ensure_ascii=False).encode())
                for _, path, body in requests
            ]
            await asyncio.sleep(pause)
            return await measure(client.send, due, rate)

        async def at(rate: float) -> Measurement:
            measurements.append(await send(rate, options.seconds, options.pause))
            print(_line(measurements[-1]), flush=True)
            return measurements[-1]

        if options.warm_up > 0:
            await send(options.lowest if options.find_max else options.rates[0], options.warm_up)
        for rate in options.rates or []:
            await at(rate)
        if options.find_max:
            rates = grid(options.lowest, options.highest, options.step)
            limits = options.bound_ms, options.max_error_rate, options.attempts
            capacity = await find_max(at, rates, *limits)
    result = {
        "started": started.isoformat(timespec="seconds"),
        "url": options.url,
        "index": {name: index[name] for name in ("name", "version", "pair") if name in index},
        "seed": seed,
        "mix": asdict(mix),
        "queries": {"file": str(options.queries), "sha256": sha256_file(options.queries)},
        **{name: getattr(options, name) for name in ("seconds", "connections", "timeout")},
        "environment": environment(),
        "measurements": [m.as_json() for m in measurements],
    }
    if capacity:
        names = ("bound_ms", "max_error_rate", "attempts", "lowest", "highest", "step")
        result["find_max"] = {n: getattr(options, n) for n in names} | asdict(capacity)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "open_loop.json"
    write_json(path, result)
    bound, highest = (options.bound_ms, capacity.rate) if capacity else (None, None)
    plot_latency(measurements, path.with_suffix(".png"), bound, highest)
    print(path)
    if capacity and capacity.rate is None:
        message = f"not even the lowest rate was sustained within {options.bound_ms:g} ms"
        raise CareError(message, code="no_capacity")
    if capacity:
        limit = _LIMITS[capacity.limited_by]
        print(f"{capacity.rate:g} requests/s within p99 {options.bound_ms:g} ms: {limit}")


async def _index(client: Client, url: str) -> dict[str, Any]:
    """Returns the response of `GET /index`."""
    try:
        status, body = await client.send(client.message("GET", "/index"))
    except OSError as error:
        raise CareError(f"{url} does not answer: {error}", code="no_answer", url=url) from error
    if status != 200:
        message = f"GET {url}/index: status {status}; CARE_LOAD_KEY holds the key, if one is needed"
        raise CareError(message, code="unexpected_status", url=url, status=status)
    index: dict[str, Any] = json.loads(body)
    return index


def _line(m: Measurement) -> str:
    latency = " ".join(f"{name} {ms:.1f}" for name, ms in m.latency_ms.items()) or "-"
    statuses = " ".join(f"{status}:{count}" for status, count in m.statuses.items())
    note = "" if m.kept_schedule else "; driver behind: not the service's"
    return (
        f"{m.rate:8.1f}/s due, {m.goodput:8.1f}/s answered; {latency} ms; {statuses}; "
        f"driver: lag p99 {m.lag_ms['p99']:.1f} ms, {m.late} late, cpu {m.driver_cpu:.0%}{note}"
    )


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
    what.add_argument("--find-max", action="store_true", help="find the highest rate within bounds")
    add("--bound-ms", type=positive_float, default=100, help="highest p99, for --find-max")
    add("--max-error-rate", type=float, default=0.001, help="share of requests, for --find-max")
    add("--lowest", type=positive_float, default=10, help="first rate of --find-max")
    add("--highest", type=positive_float, default=10_000, help="last rate of --find-max")
    add("--step", type=positive_float, default=1.1, help="ratio of rates of --find-max")
    add("--attempts", type=positive_int, default=2, help="failures that make a rate too high")
    add("--seconds", type=positive_float, default=10, help="length of each measurement")
    add("--warm-up", type=float, default=2, help="seconds before the first, not counted")
    add("--pause", type=float, default=1, help="seconds of rest before each measurement")
    add("--timeout", type=positive_float, default=10, help="seconds until a request fails")
    add("--connections", type=positive_int, default=1000, help="most connections at once")
    Mix.add_options(parser)
    add("--seed", type=int, help="of the traffic (default: another each time)")
    add("--out", type=Path, default=Path("loadtest/results/open_loop"), help="folder of the result")
    return parser


def _rates(text: str) -> list[float]:
    return [positive_float(rate) for rate in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
