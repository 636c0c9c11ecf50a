import pytest

from core.breaker import Breaker, BreakerState


class Clock:
    """Time that passes when it is told to."""

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
    for _ in range(times):
        breaker.failed()


def test_the_states_are_the_numbers_of_the_metric() -> None:
    assert [int(state) for state in BreakerState] == [0, 1, 2]
    assert [state.name for state in BreakerState] == ["CLOSED", "HALF_OPEN", "OPEN"]


def test_a_closed_breaker_lets_every_call_through(breaker: Breaker) -> None:
    assert all(breaker.allows() for _ in range(10))
    assert breaker.state is BreakerState.CLOSED


def test_it_opens_at_the_last_failure_in_a_row_and_not_before(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()


def test_a_success_starts_the_count_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_an_open_breaker_lets_one_probe_through_when_its_time_has_come(
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


def test_a_probe_that_succeeds_closes_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 5
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.allows()


def test_a_probe_that_fails_opens_it_for_as_long_again(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 5
    assert breaker.allows()
    fail(breaker, 1)
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.999
    assert not breaker.allows()
    clock.now += 0.001
    assert breaker.allows()


def test_failures_of_calls_that_began_before_do_not_put_off_the_probe(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 4
    fail(breaker, 5)
    clock.now += 1
    assert breaker.allows()


def test_when_the_probe_is_abandoned_the_next_call_is_the_probe(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    assert breaker.allows()
    breaker.abandoned()
    assert breaker.state is BreakerState.OPEN
    assert breaker.allows()
    assert not breaker.allows()


def test_an_abandoned_call_changes_nothing_else(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.abandoned()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 1)
    breaker.abandoned()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
