"""Latency at a fixed arrival rate."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# asyncio's timers have a grain of 1 ms; a request that is taken up later than this was held up.
_LATE_MS = 5.0
# Above it, and above this share of the p99 latency, the p99 lag is too much of what was measured.
_MAX_LAG_SHARE = 0.1

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True)
class Measurement:
    """What came of requests that were due at a constant rate.

    Attributes:
        rate: Requests that were due per second.
        seconds: From when the first was due to the last answer.
        sent: Requests in all.
        statuses: Requests by status, "timeout" and "connection" among them.
        latency_ms: p50, p90, p99 and max of the requests answered with 2xx, each counted from
            when it was due, not from when it left; empty without such answers.
        lag_ms: p50, p99 and max of how long after they were due the driver took requests up.
        late: Requests that were taken up more than 5 ms after they were due.
        driver_cpu: Processor seconds of this process per second.
    """

    rate: float
    seconds: float
    sent: int
    statuses: dict[str, int]
    latency_ms: dict[str, float]
    lag_ms: dict[str, float]
    late: int
    driver_cpu: float

    @property
    def good(self) -> int:
        """Requests that were answered with 2xx."""
        return sum(count for status, count in self.statuses.items() if status.startswith("2"))

    @property
    def goodput(self) -> float:
        """Requests answered with 2xx per second."""
        return self.good / self.seconds

    @property
    def error_rate(self) -> float:
        """Share of requests that were not answered with 2xx."""
        return 1 - self.good / self.sent

    @property
    def kept_schedule(self) -> bool:
        """Whether the latencies are the service's, and not those of a driver that fell behind.

        They hold the driver's lag. Its p99 may be 5 ms, or a tenth of the p99 latency.
        """
        allowed = max(_LATE_MS, _MAX_LAG_SHARE * self.latency_ms.get("p99", 0.0))
        return self.lag_ms["p99"] <= allowed

    def within(self, bound_ms: float, max_error_rate: float) -> bool:
        """Whether the driver kept its schedule and p99 and errors stayed in their bounds."""
        return (
            self.kept_schedule
            and self.error_rate <= max_error_rate
            and self.latency_ms.get("p99", float("inf")) <= bound_ms
        )

    def as_json(self) -> dict[str, Any]:
        """The attributes and what is computed from them."""
        return asdict(self) | {
            "goodput": self.goodput,
            "error_rate": self.error_rate,
            "kept_schedule": self.kept_schedule,
        }


async def measure(send: Send, messages: Sequence[bytes], rate: float) -> Measurement:
    """Sends message i at i / rate seconds, whether or not those before it are answered.

    The schedule is fixed before the first leaves. Latency counts from it, so that a stall is felt
    by every request that was due in it, also by those that could not leave: without this, a
    driver that waits with the service would leave them out ("coordinated omission").

    Args:
        send: Sends one message and returns status and body.
        messages: What to send, at least one.
        rate: Messages per second.

    Returns:
        The counts and latencies, after the last answer.
    """
    statuses: Counter[str] = Counter()
    latencies: list[float] = []
    lags: list[float] = []

    async def run(message: bytes, due: float) -> None:
        lags.append(time.perf_counter() - due)
        try:
            status = str((await send(message))[0])
        except TimeoutError:
            status = "timeout"
        except OSError:
            status = "connection"
        statuses[status] += 1
        if status.startswith("2"):
            latencies.append(time.perf_counter() - due)

    cpu = time.process_time()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i, message in enumerate(messages):
            due = start + i / rate
            await _sleep_until(due)
            group.create_task(run(message, due))
    seconds = time.perf_counter() - start
    return Measurement(
        rate=rate,
        seconds=seconds,
        sent=len(messages),
        statuses=dict(sorted(statuses.items())),
        latency_ms=_quantiles_ms(latencies, 50, 90, 99),
        lag_ms=_quantiles_ms(lags, 50, 99),
        late=sum(1000 * lag > _LATE_MS for lag in lags),
        driver_cpu=(time.process_time() - cpu) / seconds,
    )


async def _sleep_until(due: float) -> None:
    """Lets others run until then, and once if it is past: answers come in even when behind."""
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    # Timers are rounded to their grain, so they may fire early.
    if time.perf_counter() < due:
        await _sleep_until(due)


def _quantiles_ms(seconds: Sequence[float], *percents: int) -> dict[str, float]:
    """Nearest-rank quantiles and the maximum [ms]; empty of nothing."""
    if not seconds:
        return {}
    found = 1000 * np.quantile(seconds, [p / 100 for p in (*percents, 100)], method="inverted_cdf")
    return {
        name: round(float(value), 3)
        for name, value in zip([*(f"p{p}" for p in percents), "max"], found, strict=True)
    }
