"""Measures latency at constant arrival rates, or finds the highest rate within bounds.

    python -m loadtest.open_loop --url http://127.0.0.1:8000 --rates 50,100,200
    python -m loadtest.open_loop --url http://127.0.0.1:8000 --find-max --bound-ms 100

Writes `open_loop.json`. If the service needs an API key, set CARE_LOAD_KEY.
"""

import argparse
import json
import math
import os
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from core.errors import CareError
from core.files import sha256_file
from core.loopback import open_local
from core.provenance import environment
from core.records import write_json
from core.terminal import run, shown
from loadtest.measurement import Measurement, Target, measure
from loadtest.traffic import Mix, Traffic, departments_of, read_texts

_LIMITS = {
    "service": "at the next rate the service exceeded the bounds",
    "driver": "at the next rate the load generator fell behind; the service may sustain more",
    "grid": "this is the highest rate that was tried; raise --highest",
}


@dataclass(frozen=True)
class Capacity:
    """The highest rate that a service sustains."""

    rate: float | None  # requests per second; None if the service does not sustain the lowest rate
    # Why the next rate failed: `service`, or `driver` if the load generator fell behind its
    # schedule; `grid` if there was no higher rate to try.
    limited_by: Literal["service", "driver", "grid"]


def rate_grid(lowest: float, highest: float, step: float) -> list[float]:
    """Returns a geometric sequence of rates from `lowest` to about `highest`, with ratio `step`."""
    count = math.floor(math.log(highest / lowest, step) + 1e-9) + 1
    return [round(lowest * step**i, 1) for i in range(count)]


def find_max(
    measure: Callable[[float], Measurement],
    rates: Sequence[float],
    bound_ms: float,
    max_error_rate: float,
    attempts: int = 2,
) -> Capacity:
    """Finds the highest rate whose p99 latency and error rate are within bounds.

    The rate is doubled until it is too high, then bisected, so that the service never gets much
    more than twice the rate that it sustains. `rates` [requests/s] ascend. After `attempts` failed
    measurements a rate is too high: more than one, because a measurement can fail by a short
    disturbance of the machine.
    """
    doubling = max(1, sum(rate < 2 * rates[0] for rate in rates))
    limited_by: Literal["service", "driver", "grid"] = "grid"
    # rates[passed] is sustained, rates[failed] is not; both start outside of the grid.
    passed, failed, current = -1, len(rates), 0
    while failed - passed > 1:
        failures: list[Measurement] = []
        while len(failures) < attempts:
            measurement = measure(rates[current])
            if measurement.within(bound_ms, max_error_rate):
                passed = current
                break
            failures.append(measurement)
        else:
            failed = current
            limited_by = "service" if any(m.kept_schedule for m in failures) else "driver"
        unbounded = failed == len(rates)
        current = min(passed + doubling, len(rates) - 1) if unbounded else (passed + failed) // 2
    return Capacity(rates[passed] if passed >= 0 else None, limited_by)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status, 1 if the lowest rate was not sustained."""
    return run(lambda: _measure(_parser().parse_args(arguments)))


def _measure(options: argparse.Namespace) -> None:
    seed = random.randrange(2**32) if options.seed is None else options.seed
    mix = Mix.of(options)
    key = os.environ.get("CARE_LOAD_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    started = datetime.now(UTC)
    measurements: list[Measurement] = []
    capacity = None
    target = Target(options.url, headers)
    index = _index(options.url, headers, options.timeout)
    traffic = Traffic(read_texts(options.queries), seed, mix, departments_of(index))

    def send(rate: float, seconds: float, pause: float = 0) -> Measurement:
        requests = [traffic.draw() for _ in range(max(1, round(rate * seconds)))]
        due = [
            target.message("POST", path, json.dumps(body, ensure_ascii=False).encode())
            for _, path, body in requests
        ]
        time.sleep(pause)
        return measure(target, due, rate, options.connections, options.timeout)

    def at(rate: float) -> Measurement:
        measurements.append(send(rate, options.seconds, options.pause))
        print(_line(measurements[-1]), flush=True)
        return measurements[-1]

    if options.warm_up > 0:
        send(options.lowest if options.find_max else options.rates[0], options.warm_up)
    for rate in options.rates or []:
        at(rate)
    if options.find_max:
        rates = rate_grid(options.lowest, options.highest, options.step)
        limits = options.bound_ms, options.max_error_rate, options.attempts
        capacity = find_max(at, rates, *limits)
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
    print(shown(str(path)))
    if capacity and capacity.rate is None:
        message = f"the service does not sustain the lowest rate, {options.lowest:g} requests/s, "
        message += f"with p99 within {options.bound_ms:g} ms: lower --lowest or raise --bound-ms"
        raise CareError(message, code="no_capacity")
    if capacity:
        limit = _LIMITS[capacity.limited_by]
        print(f"{capacity.rate:g} requests/s with p99 within {options.bound_ms:g} ms: {limit}")


def _index(url: str, headers: Mapping[str, str], timeout: float) -> dict[str, Any]:
    request = urllib.request.Request(f"{url.rstrip('/')}/index", headers=dict(headers))
    try:
        with open_local(request, timeout) as response:
            index: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        message = f"GET {url}/index returned status {error.code}"
        if error.code in (401, 403):
            message += "; set CARE_LOAD_KEY to an API key of the service"
        raise CareError(message, code="unexpected_status", url=url, status=error.code) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        message = f"{url} does not respond: {reason}; check that the service runs"
        raise CareError(message, code="no_answer", url=url) from error
    return index


def _line(m: Measurement) -> str:
    latency = " ".join(f"{name} {ms:.1f}" for name, ms in m.latency_ms.items()) or "-"
    statuses = " ".join(f"{status}:{count}" for status, count in m.statuses.items())
    note = "" if m.kept_schedule else "; generator fell behind, latencies are not the service's"
    return (
        f"{m.rate:8.1f}/s sent, {m.goodput:8.1f}/s succeeded; {latency} ms; {statuses}; "
        f"generator: lag p99 {m.lag_ms['p99']:.1f} ms, {m.late} late, CPU {m.driver_cpu:.0%}{note}"
    )


def _positive_int(text: str) -> int:
    """Parses an argument that is an integer above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer above 0")
    return int(text)


def _positive_float(text: str) -> float:
    """Parses an argument that is a number above 0."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.open_loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="address of the service, http://host:port")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--rates", type=_rates, help="requests per second, separated by commas")
    mode.add_argument("--find-max", action="store_true", help="find the highest rate within bounds")
    add("--bound-ms", type=_positive_float, default=100, help="maximum p99 of --find-max")
    add("--max-error-rate", type=float, default=0.001, help="maximum error rate of --find-max")
    add("--lowest", type=_positive_float, default=10, help="first rate of --find-max")
    add("--highest", type=_positive_float, default=10_000, help="last rate of --find-max")
    add("--step", type=_positive_float, default=1.1, help="ratio of successive rates of --find-max")
    add("--attempts", type=_positive_int, default=2, help="failures after which a rate is too high")
    add("--seconds", type=_positive_float, default=10, help="length of each measurement")
    add("--warm-up", type=float, default=2, help="seconds of warm-up before the first measurement")
    add("--pause", type=float, default=1, help="seconds of pause before each measurement")
    add("--timeout", type=_positive_float, default=10, help="time-out of a request [s]")
    add("--connections", type=_positive_int, default=1000, help="maximum number of connections")
    Mix.add_options(parser)
    add("--seed", type=int, help="seed of the traffic (default: random)")
    add("--out", type=Path, default=Path("loadtest/results/open_loop"), help="output folder")
    return parser


def _rates(text: str) -> list[float]:
    return [_positive_float(rate) for rate in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
