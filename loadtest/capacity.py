"""The highest rate that a service sustains."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from loadtest.measurement import Measurement


@dataclass(frozen=True)
class Grid:
    """Rates from `low` to about `high` requests per second, each `step` times the one before."""

    low: float = 10.0
    high: float = 10_000.0
    step: float = 1.1

    @property
    def rates(self) -> list[float]:
        """The rates, rising, to one decimal place."""
        count = math.floor(math.log(self.high / self.low, self.step) + 1e-9) + 1
        return [round(self.low * self.step**i, 1) for i in range(count)]


@dataclass(frozen=True)
class Capacity:
    """What was found.

    Attributes:
        rate: The highest rate within the bounds [requests/s]; none if even the lowest was not.
        limited_by: Why the next rate was not within them: `service`, or `driver` if that fell
            behind its schedule, so that the service may sustain more; `grid` if there was none.
    """

    rate: float | None
    limited_by: Literal["service", "driver", "grid"]


async def find_max(
    measure: Callable[[float], Awaitable[Measurement]],
    grid: Grid,
    bound_ms: float,
    max_error_rate: float,
    attempts: int = 2,
) -> Capacity:
    """Finds the highest rate of a grid whose p99 and errors stay in their bounds.

    The rate is doubled from the lowest until it is too high, then bisected: a service is never
    given much more than twice what it sustains.

    Args:
        measure: Measures at a rate [requests/s].
        grid: The rates.
        bound_ms: Highest p99 [ms].
        max_error_rate: Highest share of requests not answered with 2xx.
        attempts: Measurements out of the bounds after which a rate is too high; more than one, so
            that a hiccup of the machine is not taken for the limit.
    """
    rates = grid.rates
    doubling = max(1, round(math.log(2, grid.step)))
    limited_by: Literal["service", "driver", "grid"] = "grid"

    async def sustained(place: int) -> bool:
        nonlocal limited_by
        failed: list[Measurement] = []
        while len(failed) < attempts:
            measurement = await measure(rates[place])
            if measurement.within(bound_ms, max_error_rate):
                return True
            failed.append(measurement)
        limited_by = "service" if any(m.kept_schedule for m in failed) else "driver"
        return False

    # rates[good] is sustained, rates[bad] is not; one is before the grid, the other behind it.
    good, bad = -1, len(rates)
    place = 0
    while await sustained(place):
        good = place
        if place == len(rates) - 1:
            break
        place = min(place + doubling, len(rates) - 1)
    else:
        bad = place
    while bad - good > 1:
        middle = (good + bad) // 2
        if await sustained(middle):
            good = middle
        else:
            bad = middle
    return Capacity(rates[good] if good >= 0 else None, limited_by)
