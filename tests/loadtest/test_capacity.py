import asyncio

import pytest

from loadtest.capacity import Capacity, Grid, find_max
from loadtest.measurement import Measurement

GRID = Grid(low=10, high=1000, step=1.1)


class Service:
    """Sustains a rate, and no more."""

    def __init__(self, capacity: float, driver: float = float("inf"), hiccup: int = -1) -> None:
        self.capacity = capacity
        self.driver = driver
        self.hiccup = hiccup
        self.rates: list[float] = []

    async def measure(self, rate: float) -> Measurement:
        slow = rate > self.capacity or len(self.rates) == self.hiccup
        self.rates.append(rate)
        lag = 50.0 if rate > self.driver else 0.5
        latency = {"p50": 5.0, "p90": 9.0, "p99": 400.0 if slow else 20.0, "max": 400.0}
        return Measurement(rate, 1, 100, {"200": 100}, latency, {"p99": lag}, 0, 0.1)

    def find(self, attempts: int = 2) -> Capacity:
        return asyncio.run(find_max(self.measure, GRID, 100, 0.001, attempts))


def test_the_grid_is_geometric_and_holds_its_ends() -> None:
    assert Grid(10, 80, 2).rates == [10, 20, 40, 80]
    assert GRID.rates[0] == 10
    assert GRID.rates[-1] <= 1000 < GRID.rates[-1] * 1.1 + 0.1


@pytest.mark.parametrize("capacity", [10, 11.5, 19, 20.5, 137, 500, 940])
def test_the_highest_sustained_step_is_found(capacity: float) -> None:
    service = Service(capacity)
    expected = max(rate for rate in GRID.rates if rate <= capacity)
    assert service.find() == Capacity(expected, "service")
    assert max(service.rates) < 2.3 * max(capacity, 10)
    assert len(set(service.rates)) <= 7 + 4


def test_not_even_the_lowest() -> None:
    service = Service(5)
    assert service.find() == Capacity(None, "service")
    assert service.rates == [10, 10]


def test_more_than_the_grid() -> None:
    assert Service(1e6).find() == Capacity(GRID.rates[-1], "grid")


def test_a_driver_that_falls_behind_is_not_taken_for_the_service() -> None:
    found = Service(capacity=1e6, driver=100).find()
    assert found == Capacity(max(rate for rate in GRID.rates if rate <= 100), "driver")


def test_one_hiccup_is_not_taken_for_the_limit() -> None:
    assert Service(137, hiccup=1).find() == Service(137).find()
    assert Service(137, hiccup=1).find(attempts=1) != Service(137).find()


def test_quick_refusals_are_not_capacity() -> None:
    async def refuse(rate: float) -> Measurement:
        statuses = {"200": 90, "429": 10} if rate > 50 else {"200": 100}
        quick = {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
        return Measurement(rate, 1, 100, statuses, quick, {"p99": 0.5}, 0, 0.1)

    found = asyncio.run(find_max(refuse, GRID, 100, 0.001))
    assert found == Capacity(max(rate for rate in GRID.rates if rate <= 50), "service")
