import logging
from collections.abc import Callable

import pytest

from core.breaker import Breaker, BreakerState


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures=3, retry_after=5.0, clock=clock)


def fail(breaker: Breaker, times: int) -> None:
    """Lets calls fail that began before the first of them ended."""
    permits = [breaker.allows() for _ in range(times)]
    for permit in permits:
        breaker.failed(permit)


def test_state_values_are_the_values_of_the_metric() -> None:
    assert [int(state) for state in BreakerState] == [0, 1, 2]
    assert [state.name for state in BreakerState] == ["CLOSED", "HALF_OPEN", "OPEN"]


def test_a_closed_breaker_allows_every_call(breaker: Breaker) -> None:
    assert all(breaker.allows() for _ in range(10))
    assert breaker.state is BreakerState.CLOSED


def test_it_opens_after_the_given_number_of_consecutive_failures(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()


def test_a_success_resets_the_count(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded(breaker.allows())
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_an_open_breaker_allows_one_probe_after_the_retry_time(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 4.999
    assert not breaker.allows()
    assert breaker.state is BreakerState.OPEN
    clock.now += 0.001
    assert breaker.allows()
    assert breaker.state is BreakerState.HALF_OPEN
    clock.now += 1000
    assert not breaker.allows()


def test_a_successful_probe_closes_the_breaker(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 5
    breaker.succeeded(breaker.allows())
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.allows()


def test_a_failed_probe_opens_the_breaker_for_the_retry_time(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    breaker.failed(breaker.allows())
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.999
    assert not breaker.allows()
    clock.now += 0.001
    assert breaker.allows()


@pytest.mark.parametrize("end", [Breaker.succeeded, Breaker.failed, Breaker.abandoned])
@pytest.mark.parametrize("elapsed", [4, 5])
def test_a_call_that_began_before_the_breaker_opened_changes_nothing(
    end: Callable[[Breaker, int], None], elapsed: int, breaker: Breaker, clock: Clock
) -> None:
    stale = breaker.allows()
    fail(breaker, 3)
    clock.now += elapsed
    probe = breaker.allows()
    before = breaker.state
    end(breaker, stale)
    assert breaker.state is before
    assert not breaker.allows()
    clock.now += 5 - elapsed
    breaker.succeeded(probe or breaker.allows())
    assert breaker.state is BreakerState.CLOSED
    for _ in range(3):
        end(breaker, stale)
    assert breaker.state is BreakerState.CLOSED


def test_the_log_has_a_line_when_it_opens_and_one_when_it_closes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = Breaker("a server", failures=3, retry_after=5.0, clock=clock)
    fail(breaker, 5)
    for _ in range(3):
        clock.now += 5
        breaker.failed(breaker.allows())
    clock.now += 5
    breaker.abandoned(breaker.allows())
    breaker.succeeded(breaker.allows())
    breaker.succeeded(breaker.allows())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_after_an_abandoned_probe_the_next_call_is_the_probe(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    breaker.abandoned(breaker.allows())
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows()
    assert not breaker.allows()


def test_an_abandoned_call_does_not_change_a_closed_breaker(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.abandoned(breaker.allows())
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
