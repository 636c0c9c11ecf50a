import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from core.breaker import Breaker, BreakerState, UnavailableError


class FailureError(Exception):
    """A call failed."""


class AnswerError(FailureError):
    """A working server responded with an error."""


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


def fail(breaker: Breaker, times: int = 1) -> None:
    """Lets calls fail that began before the first of them ended."""
    with suppress(FailureError), ExitStack() as calls:
        for _ in range(times):
            calls.enter_context(breaker.call(FailureError))
        raise FailureError


def succeed(breaker: Breaker) -> None:
    with breaker.call(FailureError):
        pass


def answer(breaker: Breaker) -> None:
    with suppress(AnswerError), breaker.call(FailureError, answers=(AnswerError,)):
        raise AnswerError


def abandon(breaker: Breaker) -> None:
    with suppress(asyncio.CancelledError), breaker.call(FailureError):
        raise asyncio.CancelledError


def is_rejected(breaker: Breaker) -> bool:
    try:
        abandon(breaker)
    except UnavailableError:
        return True
    return False


def test_state_values_are_the_values_of_the_metric() -> None:
    assert [int(state) for state in BreakerState] == [0, 1, 2]
    assert [state.name for state in BreakerState] == ["CLOSED", "HALF_OPEN", "OPEN"]


def test_exceptions_of_the_block_are_raised(breaker: Breaker) -> None:
    for error in (FailureError(), KeyError()):
        with pytest.raises(type(error)) as caught, breaker.call(FailureError):
            raise error
        assert caught.value is error


def test_it_opens_after_the_given_number_of_consecutive_failures(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert not is_rejected(breaker)
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    assert is_rejected(breaker)


@pytest.mark.parametrize("end", [succeed, answer])
def test_a_success_resets_the_count(end: Callable[[Breaker], None], breaker: Breaker) -> None:
    fail(breaker, 2)
    end(breaker)
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_an_open_breaker_allows_one_probe_after_the_retry_time(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 4.999
    assert is_rejected(breaker)
    assert breaker.state is BreakerState.OPEN
    clock.now += 0.001
    with breaker.call():
        assert breaker.state is BreakerState.HALF_OPEN
        clock.now += 1000
        assert is_rejected(breaker)


@pytest.mark.parametrize("end", [succeed, answer])
def test_a_successful_probe_closes_the_breaker(
    end: Callable[[Breaker], None], breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    end(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert not is_rejected(breaker)


def test_a_failed_probe_opens_the_breaker_for_the_retry_time(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.999
    assert is_rejected(breaker)
    clock.now += 0.001
    assert not is_rejected(breaker)


@pytest.mark.parametrize("error", [None, FailureError, asyncio.CancelledError])
@pytest.mark.parametrize("elapsed", [4, 5])
def test_a_call_that_began_before_the_breaker_opened_changes_nothing(
    error: type[BaseException] | None, elapsed: int, breaker: Breaker, clock: Clock
) -> None:
    def end(stale: ExitStack) -> None:
        with suppress(FailureError, asyncio.CancelledError), stale:
            if error:
                raise error

    early, late = ExitStack(), ExitStack()
    for stale in [early, late]:
        stale.enter_context(breaker.call(FailureError))
    fail(breaker, 3)
    clock.now += elapsed
    with ExitStack() as probe:
        if elapsed == 5:
            probe.enter_context(breaker.call())
        before = breaker.state
        end(early)
        assert breaker.state is before
        assert is_rejected(breaker)
    clock.now += 5 - elapsed
    succeed(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    end(late)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN


def test_the_log_has_a_line_when_it_opens_and_one_when_it_closes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    breaker = Breaker("a server", failures=3, retry_after=5.0, clock=clock)
    fail(breaker, 5)
    for _ in range(3):
        clock.now += 5
        fail(breaker)
    clock.now += 5
    for end in (abandon, succeed, succeed):
        end(breaker)
    failed = {"reason": "FailureError"}
    assert [(record.levelname, record.__dict__["fields"]) for record in caplog.records] == [
        ("WARNING", failed),  # the first failure
        ("WARNING", failed),
        ("INFO", {}),
    ]


def test_failures_that_do_not_open_it_leave_a_line_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = Breaker("a server", failures=3, retry_after=5.0, clock=clock)
    for _ in range(240):
        with suppress(FailureError), breaker.call(FailureError, reason=lambda _: "status 400"):
            raise FailureError
        succeed(breaker)
        clock.now += 0.5
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"reason": "status 400"}
    ] * 2
    assert breaker.state is BreakerState.CLOSED


def test_a_breaker_without_a_name_logs_nothing(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fail(breaker, 3)
    assert caplog.records == []


def test_after_an_abandoned_probe_the_next_call_is_the_probe(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 5
    abandon(breaker)
    assert breaker.state is BreakerState.OPEN
    with breaker.call():
        assert is_rejected(breaker)


def test_an_abandoned_call_does_not_change_a_closed_breaker(breaker: Breaker) -> None:
    fail(breaker, 2)
    abandon(breaker)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    assert is_rejected(breaker)
