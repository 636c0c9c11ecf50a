import asyncio
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from core.retries import RetryPolicy, TransientError, is_rejection, is_transient, retry_after


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    yield waits


def failing(times: int, wait: float = 0.0) -> tuple[list[int], object]:
    calls: list[int] = []

    async def request() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise TransientError("status 503", wait)
        return "answer"

    return calls, request


def test_waits_double_with_jitter(slept: list[float]) -> None:
    calls, request = failing(3)
    assert asyncio.run(RetryPolicy(retries=3, backoff=2).run(request)) == "answer"  # type: ignore[arg-type]
    assert len(calls) == 4
    for wait, longest in zip(slept, (2, 4, 8), strict=True):
        assert longest / 2 <= wait <= longest


def test_the_last_error_is_raised_if_all_retries_fail(slept: list[float]) -> None:
    calls, request = failing(9)
    with pytest.raises(TransientError):
        asyncio.run(RetryPolicy(retries=2).run(request))  # type: ignore[arg-type]
    assert len(calls) == 3


def test_the_wait_of_the_server_is_respected_up_to_the_limit(slept: list[float]) -> None:
    _, request = failing(1, wait=120)
    asyncio.run(RetryPolicy().run(request))  # type: ignore[arg-type]
    assert slept == [120]
    calls, request = failing(1, wait=301)
    with pytest.raises(TransientError):
        asyncio.run(RetryPolicy().run(request))  # type: ignore[arg-type]
    assert len(calls) == 1


def test_each_wait_is_reported(slept: list[float]) -> None:
    _, request = failing(2, wait=90)
    seen: list[tuple[str, float]] = []
    policy = RetryPolicy()
    answer = policy.run(request, lambda error, delay: seen.append((error.reason, delay)))  # type: ignore[arg-type]
    assert asyncio.run(answer) == "answer"
    assert seen == [("status 503", 90)] * 2


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, 0), ("", 0), ("7", 7), (" 8 ", 8), ("soon", 0), ("-1", 0)]
)
def test_retry_after_is_a_number(header: str | None, seconds: float) -> None:
    assert retry_after(header) == seconds


def test_retry_after_is_a_date() -> None:
    assert 55 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after(formatdate(time.time() - 60, usegmt=True)) == 0


def test_which_statuses_are_transient_and_which_reject_a_request() -> None:
    statuses = (200, 400, 401, 404, 408, 409, 413, 422, 429, 500, 503)
    assert [*filter(is_transient, statuses)] == [408, 409, 429, 500, 503]
    assert [*filter(is_rejection, statuses)] == [400, 413, 422]
