import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.breaker import Breaker
from service.access.rate_limit import RateLimiter
from service.pipeline.redis_tier import RedisGuard
from tests.redis_server import RedisServer, free_port, run_redis

pytestmark = pytest.mark.anyio

PREFIX = "care:rate::"
# One query in 1,000 s: the duration of a test does not matter.
SLOW = 0.001


class Clock:
    """A clock [ns] that the test advances; it starts at an odd value."""

    def __init__(self) -> None:
        self.now = 1_234_567_000

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def make_guard(url: str) -> RedisGuard:
    return RedisGuard(url, 10, Breaker(), Breaker(), lambda _: None)


async def admit_all(limiter: RateLimiter, costs: list[int], name: str = "app") -> list[float]:
    return [await limiter.admit(name, cost) for cost in costs]


Steps = list[tuple[float, list[int], list[float]]]


@pytest.mark.parametrize(
    ("burst", "steps"),
    [
        pytest.param(
            3,
            [
                (0, [1, 1, 1, 1], [0, 0, 0, 0.1]),
                (0.099999, [1], [0.000001]),
                (0.000001, [1, 1], [0, 0.1]),
                (1000, [1, 1, 1, 1], [0, 0, 0, 0.1]),
            ],
            id="the burst, then one for each interval",
        ),
        pytest.param(
            5,
            [(0, [4, 2, 1, 1], [0, 0.1, 0, 0.1]), (0.3, [4, 3], [0.1, 0])],
            id="each query is charged",
        ),
        pytest.param(
            3,
            [
                (0, [1, 8], [0, 0.1]),
                (0.1, [8, 1, 3, 8], [0, 0.6, 0.8, 0.8]),
                (0.6, [1, 1], [0, 0.1]),
            ],
            id="above the burst: waits for a full bucket, delays the next",
        ),
        pytest.param(
            2,
            [(0, [2, *[1] * 50], [0, *[0.1] * 50]), (0.1, [1], [0])],
            id="rejected requests are not charged",
        ),
    ],
)
async def test_a_bucket_at_ten_queries_a_second(burst: int, steps: Steps) -> None:
    """Steps: seconds that pass, the costs of requests, and how long each has to wait [s]."""
    clock = Clock()
    limiter = RateLimiter(10, burst, None, clock)
    for seconds, costs, waits in steps:
        clock.advance(seconds)
        assert await admit_all(limiter, costs) == waits


@pytest.mark.parametrize("rate", [3, 7, 0.3, 999.9, 33_333])
async def test_queries_at_the_rate_are_admitted(rate: float) -> None:
    clock = Clock()
    limiter = RateLimiter(rate, 1, None, clock)
    for _ in range(2000):
        assert await limiter.admit("app", 1) == 0
        clock.now += round(1e6 / rate) * 1000


@given(
    rate=st.sampled_from([0.5, 10, 1000, 100_000]),
    burst=st.integers(1, 8),
    requests=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 8)), min_size=1, max_size=40),
)
def test_no_interval_admits_more_than_burst_plus_rate(
    rate: float, burst: int, requests: list[tuple[float, int]]
) -> None:
    """Arrivals are spaced by fractions of an interval, so that some are admitted and some not."""
    clock = Clock()
    limiter = RateLimiter(rate, burst, None, clock)
    interval = round(1e9 / rate)
    admitted: list[tuple[int, int]] = []
    for pause, cost in requests:
        clock.now += round(pause * interval) // 1000 * 1000
        cost = min(cost, burst)
        wait = asyncio.run(limiter.admit("app", cost))
        if wait == 0:
            admitted.append((clock.now, cost))
        else:
            start = clock.now
            clock.now = start + round(wait * 1e9) - 1000
            assert asyncio.run(limiter.admit("app", cost)) == 0.000001
            clock.now = start
    for first, (start, _) in enumerate(admitted):
        totals = accumulate(cost for _, cost in admitted[first:])
        for (end, _), total in zip(admitted[first:], totals, strict=True):
            assert total <= burst + (end - start) / interval


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path) as server:
        yield server


@pytest.fixture
async def guards(server: RedisServer) -> AsyncIterator[list[RedisGuard]]:
    """The guards of two processes."""
    guards = [make_guard(server.url) for _ in range(2)]
    yield guards
    for guard in guards:
        await guard.close()


@pytest.mark.e2e
async def test_redis_and_the_local_bucket_agree(guards: list[RedisGuard]) -> None:
    redis, local = RateLimiter(SLOW, 3, guards[0]), RateLimiter(SLOW, 3, None, Clock())
    for costs in ([1] * 5, [2, 2, 1, 1], [3, 1], [4, 1, 3, 9], [1, 9, 1, 1, 1], [9, 9, 1]):
        shared, alone = [await admit_all(each, costs, str(costs)) for each in (redis, local)]
        assert shared == pytest.approx(alone, abs=100), costs
        assert [wait == 0 for wait in shared] == [wait == 0 for wait in alone], costs


@pytest.mark.e2e
async def test_processes_share_a_bucket_and_services_on_one_redis_do_not(
    server: RedisServer, guards: list[RedisGuard]
) -> None:
    one, other = (RateLimiter(SLOW, 4, guard) for guard in guards)
    assert await admit_all(one, [1, 1]) == [0, 0]
    assert await admit_all(other, [1, 1]) == [0, 0]
    for limiter in (one, other):
        (wait,) = await admit_all(limiter, [1])
        assert 900 < wait <= 1000
    assert await admit_all(other, [4], "another") == [0]
    assert await admit_all(RateLimiter(SLOW, 4, guards[0], service="a"), [4]) == [0]
    assert (await admit_all(RateLimiter(SLOW, 4, guards[1], service="a"), [1]))[0] > 900
    # Only the names of services and keys are stored.
    with server.client() as client:
        assert set(client.keys()) == {b"care:rate::app", b"care:rate::another", b"care:rate:a:app"}


@pytest.mark.e2e
async def test_concurrent_requests_get_at_most_the_burst(guards: list[RedisGuard]) -> None:
    limiters = [RateLimiter(SLOW, 7, guard) for guard in guards]
    waits = await asyncio.gather(*(limiters[i % 2].admit("app", 1) for i in range(100)))
    assert waits.count(0) == 7


@pytest.mark.e2e
async def test_redis_refills_buckets_and_expires_full_ones(
    server: RedisServer, guards: list[RedisGuard]
) -> None:
    limiter = RateLimiter(10, 2, guards[0])
    assert await admit_all(limiter, [2]) == [0]
    with server.client() as client:
        assert 0 < client.pttl(PREFIX + "app") <= 200
        while client.exists(PREFIX + "app"):
            await asyncio.sleep(0.02)
    assert await admit_all(limiter, [2]) == [0]


async def test_rate_limits_work_without_any_redis() -> None:
    guard = make_guard(f"redis://127.0.0.1:{free_port()}/0")
    limiter = RateLimiter(SLOW, 2, guard, Clock())
    assert await admit_all(limiter, [1, 1, 1, 1, 1, 1]) == [0, 0, 1000, 1000, 1000, 1000]
    await guard.close()


@pytest.mark.e2e
async def test_unusable_values_in_redis(server: RedisServer, guards: list[RedisGuard]) -> None:
    limiter = RateLimiter(SLOW, 2, guards[0], Clock(), largest=5)
    numbers = b"nan", b"-nan", b"-inf", b"-1e300"
    with server.client() as client:
        # One that is no time is a full bucket.
        for garbage in (b"", b"\xff\x00", b"full", b"nan?", b"-5", b"12", *numbers):
            client.set(PREFIX + "app", garbage)
            *admitted, wait = await admit_all(limiter, [1, 1, 1])
            assert admitted == [0, 0], garbage
            assert 900 < wait <= 1000, garbage
        # One that is too late delays no longer than the largest request.
        for late in (b"1e300", b"inf", b"9223372036854775807", b"4e15"):
            client.set(PREFIX + "app", late)
            assert 3900 < await limiter.admit("app", 1) <= 4000, late
        # With one of another type the bucket is local.
        client.delete(PREFIX + "app")
        client.rpush(PREFIX + "app", "x")
    assert await admit_all(limiter, [1, 1, 1]) == [0, 0, 1000]


@pytest.mark.parametrize("answer", [-(2**63), 2**63 - 1])
async def test_an_impossible_answer_of_redis_falls_back_to_the_local_bucket(answer: int) -> None:
    errors: list[str] = []

    class Forged:
        on_error = staticmethod(errors.append)

        async def write(self, operation: object) -> int:
            return answer

    limiter = RateLimiter(SLOW, 2, Forged(), Clock())
    assert await admit_all(limiter, [1, 1, 1]) == [0, 0, 1000]
    assert errors == ["value"] * 3
