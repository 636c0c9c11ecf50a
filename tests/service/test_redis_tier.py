import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from core.breaker import Breaker, BreakerState, UnavailableError
from core.errors import CareError
from search.hits import CacheEntry
from service.access.rate_limit import RateLimiter
from service.pipeline.redis_tier import RedisCache, RedisGuard
from tests.errors import raises
from tests.redis_server import RedisServer, free_port, run_fake, run_redis

pytestmark = pytest.mark.anyio

# Longer than a healthy server takes on a loaded machine.
PATIENT = 20.0
# For servers that never respond.
IMPATIENT = 0.05
SECRET = b"secret"
PREFIX = "care:query:"
TTL = 1000
COUNT = 100


@pytest.fixture
def anyio_backend() -> str:
    """Tests count connections, which a server on uvloop accepts later."""
    return "asyncio"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path) as server:
        yield server


class Guarded:
    """A guard with a clock that the test advances, and the errors that it reported."""

    def __init__(self, url: str, timeout: float = PATIENT, connections: int = 16) -> None:
        self.now = 0.0
        self.errors: Counter[str] = Counter()
        self.calls = 0
        self.breaker = Breaker(failures=3, retry_after=5, clock=lambda: self.now)
        self.writes = Breaker(failures=3, retry_after=5, clock=lambda: self.now)
        self.guard = RedisGuard(url, timeout, self.breaker, self.writes, self._count, connections)

    def _count(self, kind: str) -> None:
        self.errors[kind] += 1

    async def get(self, name: str = "name") -> Any:
        def call(redis: Redis) -> Awaitable[Any]:
            self.calls += 1
            return redis.get(name)

        return await self.guard.read(call)

    async def fails(self) -> None:
        """A call fails, within a time far beyond the time-out."""
        async with asyncio.timeout(10):
            with pytest.raises(UnavailableError):
                await self.get()

    def cache(self, secret: bytes = SECRET) -> RedisCache:
        return RedisCache(self.guard, secret, TTL)

    async def __aenter__(self) -> "Guarded":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.guard.close()


def key(number: int) -> bytes:
    return bytes([number]) * 32


def found(*rows: int, answerable: float | None = None) -> CacheEntry:
    scores = np.linspace(1, 0.1, len(rows), dtype=np.float32)
    return CacheEntry((scores, np.array(rows, np.int64)), answerable)


def same(one: CacheEntry | None, other: CacheEntry) -> bool:
    return (
        one is not None
        and one.rows[0].dtype == np.float32
        and one.rows[1].dtype == np.int64
        and np.array_equal(one.rows[0], other.rows[0])
        and np.array_equal(one.rows[1], other.rows[1])
        and one.answerable == other.answerable
    )


async def see_what_was_closed() -> None:
    """Lets the event loop notice closed connections."""
    await asyncio.sleep(0.05)


# The guard


@pytest.mark.e2e
async def test_run_returns_the_result_of_the_operation(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        assert await guarded.get() is None
        await guarded.guard.write(lambda redis: redis.set("name", b"\xff"))
        assert await guarded.get() == b"\xff"
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_a_redis_that_restarts_is_used_again(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        await guarded.guard.write(lambda redis: redis.set("name", "old"))
        # Several connections, all of which break.
        await asyncio.gather(*(guarded.get() for _ in range(16)))
        server.kill()
        for _ in range(5):
            await guarded.fails()
        assert guarded.errors == {"connection": 3}
        assert guarded.breaker.state is BreakerState.OPEN
        guarded.now += 5
        await guarded.fails()
        assert guarded.breaker.state is BreakerState.OPEN
        server.start()
        guarded.now += 5
        assert await guarded.get() is None
        assert guarded.breaker.state is BreakerState.CLOSED
        assert await asyncio.gather(*(guarded.get() for _ in range(16))) == [None] * 16
        assert guarded.errors == {"connection": 4}


@pytest.mark.e2e
async def test_a_restart_between_calls_is_not_noticed(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        await asyncio.gather(*(guarded.get() for _ in range(16)))
        server.kill()
        server.start()
        await see_what_was_closed()
        assert await asyncio.gather(*(guarded.get() for _ in range(16))) == [None] * 16
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_a_hanging_redis_costs_its_time_out_until_the_breaker_opens(
    server: RedisServer,
) -> None:
    with server.client() as client:
        client.set("name", "value")
    async with Guarded(server.url, IMPATIENT) as guarded:
        server.hang()
        for _ in range(5):
            await guarded.fails()
        assert guarded.errors == {"timeout": 3}
        assert guarded.calls == 3
        server.resume()
        guarded.now += 5
        # If the connection of a late call were reused, its response would arrive here.
        for _ in range(100):
            try:
                assert await guarded.get() == b"value"
                break
            except UnavailableError:
                guarded.now += 5
        assert guarded.breaker.state is BreakerState.CLOSED


async def test_an_open_breaker_stops_calls_to_a_silent_server() -> None:
    async with run_fake(None) as fake, Guarded(fake.url, IMPATIENT, connections=4) as guarded:
        async with asyncio.timeout(30):
            results = await asyncio.gather(
                *(guarded.get() for _ in range(500)), return_exceptions=True
            )
        assert {type(result) for result in results} == {UnavailableError}
        assert guarded.breaker.state is BreakerState.OPEN
        # Until the third failure opens the breaker, each call that ends lets another one start.
        assert fake.connections <= 4 + 2
        assert guarded.calls <= 4 + 2
        connections, calls = fake.connections, guarded.calls
        await asyncio.gather(*(guarded.get() for _ in range(500)), return_exceptions=True)
        assert (fake.connections, guarded.calls) == (connections, calls)
        guarded.now += 5
        await asyncio.gather(*(guarded.get() for _ in range(500)), return_exceptions=True)
        assert (fake.connections, guarded.calls) == (connections + 1, calls + 1)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", "connection"),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "connection"),
        (bytes(100), "connection"),
        (b"$100\r\nshort", "connection"),
        (b"$-9\r\n", "connection"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "connection"),
        (b"-NOAUTH Authentication required.\r\n", "connection"),
        (b"-\xff\xfe\r\n", "response"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "response"),
    ],
)
async def test_every_failure_raises_unavailable_error(reply: bytes, kind: str) -> None:
    async with run_fake(reply) as fake, Guarded(fake.url) as guarded:
        for _ in range(4):
            await guarded.fails()
            await see_what_was_closed()
        refused = kind == "response"
        assert guarded.errors == {kind: 4 if refused else 3}
        expected = BreakerState.CLOSED if refused else BreakerState.OPEN
        assert guarded.breaker.state is expected


async def test_a_name_that_does_not_resolve_is_a_failed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    async with Guarded("redis://redis.invalid:6379/0") as guarded:
        await guarded.fails()
        assert guarded.errors == {"connection": 1}


REFUSALS = {
    "out of memory": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "read-only replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "no permission": ("ACL SETUSER default -@write", "ACL SETUSER default +@write"),
}


@pytest.mark.e2e
@pytest.mark.parametrize(("refuse", "accept"), REFUSALS.values(), ids=list(REFUSALS))
async def test_refused_writes_open_their_breaker_and_reads_go_on(
    server: RedisServer, refuse: str, accept: str
) -> None:
    async with Guarded(server.url) as guarded:
        cache = guarded.cache()
        limiter = RateLimiter(0.1, 1, guarded.guard)
        await cache.put(key(1), found(1, 2))
        with server.client() as client:
            client.execute_command(*refuse.split())
        for _ in range(3):
            assert guarded.writes.state is BreakerState.CLOSED
            await cache.put(key(2), found(3))
        for _ in range(10):
            await cache.put(key(2), found(3))
            assert same((await cache.get_many([key(1)], COUNT))[0], found(1, 2))
        assert guarded.writes.state is BreakerState.OPEN
        assert guarded.breaker.state is BreakerState.CLOSED
        assert guarded.errors == {"response": 3}
        # The rate limit is local meanwhile.
        assert await limiter.admit("app", 1) == 0
        assert await limiter.admit("app", 1) > 0
        guarded.now += 5
        await cache.put(key(2), found(3))
        assert guarded.writes.state is BreakerState.OPEN
        assert guarded.errors == {"response": 4}
        with server.client() as client:
            client.execute_command(*accept.split())
        guarded.now += 5
        await cache.put(key(2), found(3))
        assert guarded.writes.state is BreakerState.CLOSED
        assert same((await cache.get_many([key(2)], COUNT))[0], found(3))
        assert await limiter.admit("app", 1) == 0
        assert guarded.errors == {"response": 4}


@pytest.mark.e2e
async def test_a_refused_rate_limit_opens_the_breaker_of_writes(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        with server.client() as client:
            client.execute_command("CONFIG", "SET", "maxmemory", "1")
        limiter = RateLimiter(0.1, 5, guarded.guard)
        for _ in range(5):
            assert await limiter.admit("app", 1) == 0
        assert guarded.writes.state is BreakerState.OPEN
        assert guarded.errors == {"response": 3}
        assert await limiter.admit("app", 1) > 0


@pytest.mark.e2e
async def test_an_error_of_the_operation_itself_is_not_hidden(server: RedisServer) -> None:
    async def wrong(_: Redis) -> None:
        raise KeyError("wrong")

    async with Guarded(server.url) as guarded:
        server.kill()
        for _ in range(3):
            await guarded.fails()
        guarded.now += 5
        with pytest.raises(KeyError):
            await guarded.guard.read(wrong)
        # The call says nothing about Redis; the next call is the probe.
        assert guarded.breaker.state is BreakerState.OPEN
        with guarded.breaker.call():
            pass


@pytest.mark.e2e
async def test_many_calls_at_once_share_few_connections(server: RedisServer) -> None:
    names = [f"name{i}" for i in range(500)]
    with server.client() as client:
        client.mset({name: name for name in names})
        before = client.info("stats")["total_connections_received"]
        async with Guarded(server.url, connections=4) as guarded:
            values = await asyncio.gather(*(guarded.get(name) for name in names))
            after = client.info("stats")["total_connections_received"]
        assert [value.decode() for value in values] == names
        assert 1 <= after - before <= 4
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_waiting_for_a_connection_does_not_open_the_breaker(server: RedisServer) -> None:
    async with Guarded(server.url, 1, connections=1) as guarded:
        forever = asyncio.Event()
        holder = asyncio.create_task(guarded.guard.read(lambda _: forever.wait()))
        await asyncio.sleep(0)
        # They start later, but well within the time-out of the call that has the connection.
        results = await asyncio.gather(*(guarded.get() for _ in range(5)), return_exceptions=True)
        with pytest.raises(UnavailableError):
            await holder
        unavailable = [r for r in results if isinstance(r, UnavailableError)]
        assert guarded.errors == {"timeout": 1 + len(unavailable)}
        assert guarded.breaker.state is BreakerState.CLOSED
        assert await guarded.get() is None


async def start_and_cancel(server: RedisServer, work: Callable[[], Awaitable[Any]]) -> None:
    """Cancels a call after its command was written and before the response."""
    server.hang()
    task = asyncio.ensure_future(work())
    # Writing takes a few iterations of the loop; a hung server does not respond in them.
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.resume()


@pytest.mark.e2e
async def test_the_response_to_a_cancelled_call_reaches_no_other_call(server: RedisServer) -> None:
    with server.client() as client:
        client.mset({"one": "1", "two": "2"})
        client.set("other", "3")
    async with Guarded(server.url, connections=1) as guarded:
        assert await guarded.get("other") == b"3"
        await start_and_cancel(server, lambda: guarded.get("one"))
        assert await guarded.get("two") == b"2"
        assert await guarded.get("other") == b"3"
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_the_response_to_a_cancelled_write_reaches_no_other_call(server: RedisServer) -> None:
    async with Guarded(server.url, connections=1) as guarded:
        cache = guarded.cache()
        await cache.put(key(1), found(1))
        await start_and_cancel(server, lambda: cache.put(key(2), found(*range(50))))
        (one,) = await cache.get_many([key(1)], COUNT)
        assert same(one, found(1))
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_calls_cancelled_at_any_moment_mix_no_responses_and_leak_no_connections(
    server: RedisServer,
) -> None:
    """Calls are cancelled as they wait, connect, write and read, beside others that are not."""
    rng = random.Random(0)
    names = [f"name{i}" for i in range(600)]
    with server.client() as client:
        client.mset({name: name for name in names})
        async with Guarded(server.url, connections=4) as guarded:

            async def get(name: str, turns: int) -> None:
                task = asyncio.create_task(guarded.get(name))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    assert (await task).decode() == name
                    ended["answered"] += 1
                except asyncio.CancelledError:
                    ended["cancelled"] += 1

            ended: Counter[str] = Counter()
            for start in range(0, len(names), 20):
                batch = names[start : start + 20]
                await asyncio.gather(*(get(name, rng.randrange(60)) for name in batch))
            assert min(ended["answered"], ended["cancelled"]) > 50
            assert sum(ended.values()) == len(names)
            values = await asyncio.gather(*(guarded.get(name) for name in names))
            assert [value.decode() for value in values] == names
            # Our connections, and closed ones of cancelled calls that Redis has not noticed yet.
            async with asyncio.timeout(20):
                while client.info("clients")["connected_clients"] > 4 + 1:
                    await asyncio.sleep(0.02)
        assert guarded.errors == {}
        assert guarded.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:hunter2@localhost",
        "redis://:hunter2@localhost:port",
        "redis://:hunter2@localhost?hunter2=1",
        "redis://:hunter2@localhost?socket_timeout=hunter2",
    ],
)
def test_an_invalid_address_is_rejected_at_start_and_not_quoted(url: str) -> None:
    with raises(CareError, "invalid_setting", name="CARE_REDIS_URL") as caught:
        Guarded(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.e2e
async def test_options_in_the_address_do_not_override_those_of_the_guard(
    server: RedisServer,
) -> None:
    url = f"{server.url}?decode_responses=true&protocol=3&socket_timeout=0.000001"
    async with Guarded(url) as guarded:
        await guarded.guard.write(lambda redis: redis.set("name", b"\xff"))
        assert await guarded.get() == b"\xff"


@pytest.mark.e2e
async def test_closing_ends_all_connections(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        await asyncio.gather(*(guarded.get() for _ in range(8)))
    with server.client() as client:
        async with asyncio.timeout(20):
            while client.info("clients")["connected_clients"] > 1:
                await asyncio.sleep(0.02)


# The cache


@pytest.mark.e2e
async def test_get_returns_what_was_put(server: RedisServer) -> None:
    items = {
        key(1): found(0, 99, 5),
        key(2): found(),
        key(3): found(7),
        key(4): CacheEntry((np.array([0.1, -1, 1e-30], np.float32), np.array([1, 2, 3]))),
        key(5): found(1, 2, answerable=0.1),
    }
    async with Guarded(server.url) as guarded, Guarded(server.url) as other:
        for name, value in items.items():
            await guarded.cache().put(name, value)
        values = await other.cache().get_many([*items, key(9), key(1)], COUNT)
        assert len(values) == 7
        for value, expected in zip(values, [*items.values(), None, found(0, 99, 5)], strict=True):
            assert value is None if expected is None else same(value, expected)
        assert values[0] is not None
        assert all(array.flags.writeable and array.flags.aligned for array in values[0].rows)
        assert other.errors == {}


@pytest.mark.e2e
async def test_a_lookup_is_one_command_and_none_for_no_keys(server: RedisServer) -> None:
    with server.client() as client:
        async with Guarded(server.url) as guarded:
            cache = guarded.cache()
            client.config_resetstat()
            assert await cache.get_many([], COUNT) == []
            await cache.get_many([key(i) for i in range(50)], COUNT)
        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    assert {name: calls.get(f"cmdstat_{name}") for name in ("mget", "get", "set")} == {
        "mget": 1,
        "get": None,
        "set": None,
    }


@pytest.mark.e2e
async def test_entries_have_the_prefix_and_the_time_to_live(
    server: RedisServer,
) -> None:
    async with Guarded(server.url) as guarded:
        await guarded.cache().put(key(10), found(1))
        await guarded.cache().put(key(11), found(2))
    with server.client() as client:
        names = client.keys()
        assert sorted(names) == [f"{PREFIX}{'0a' * 32}".encode(), f"{PREFIX}{'0b' * 32}".encode()]
        assert all(0 < client.ttl(name) <= TTL for name in names)


def name_of(number: int) -> str:
    return PREFIX + key(number).hex()


@pytest.mark.e2e
async def test_an_invalid_value_is_a_miss_and_reported(server: RedisServer) -> None:
    rng = random.Random(0)
    async with Guarded(server.url) as guarded:
        cache = guarded.cache()
        await cache.put(key(1), found(1, 2, 3))
        await cache.put(key(2), found(4, 5))
        with server.client() as client:
            good = client.get(name_of(1))
            assert isinstance(good, bytes)
            flipped = bytearray(good)
            flipped[7] ^= 1
            garbage = [
                b"",
                b"\x01",
                *(rng.randbytes(size) for size in (5, 15, 16, 17, 21, 57, 1000)),
                *(good[:size] for size in range(len(good))),
                *(good[size:] for size in range(1, len(good))),
                good + b"\x00",
                bytes(flipped),
                client.get(name_of(2)),
                struct.pack("<BId", 2, 2**32 - 1, 0.5) + bytes(16),
            ]
            for value in garbage:
                client.set(name_of(1), value)
                values = await cache.get_many([key(1), key(2)], COUNT)
                assert values[0] is None
                assert same(values[1], found(4, 5))
            assert guarded.errors == {"value": len(garbage)}
            client.set(name_of(1), good)
            (value,) = await cache.get_many([key(1)], COUNT)
            assert same(value, found(1, 2, 3))
        assert guarded.breaker.state is BreakerState.CLOSED


@pytest.mark.e2e
async def test_a_value_of_another_type_is_a_miss_until_it_is_put(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        cache = guarded.cache()
        await cache.put(key(2), found(4, 5))
        with server.client() as client:
            client.rpush(name_of(1), "x")
        values = await cache.get_many([key(1), key(2)], COUNT)
        assert values[0] is None
        assert same(values[1], found(4, 5))
        await cache.put(key(1), found(1))
        (value,) = await cache.get_many([key(1)], COUNT)
        assert same(value, found(1))
        assert guarded.errors == {}


@pytest.mark.e2e
async def test_a_value_with_another_secret_is_a_miss(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        await guarded.cache(b"another").put(key(1), found(1))
        assert await guarded.cache().get_many([key(1)], COUNT) == [None]
        assert guarded.errors == {"value": 1}


@pytest.mark.e2e
async def test_a_value_of_another_format_is_a_miss(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Guarded(server.url) as guarded:
        with monkeypatch.context() as patch:
            patch.setattr("service.pipeline.cache.FORMAT", 1)
            await guarded.cache().put(key(1), found(1))
        assert await guarded.cache().get_many([key(1)], COUNT) == [None]
        assert guarded.errors == {"value": 1}


@pytest.mark.e2e
async def test_rows_outside_the_index_are_a_miss(server: RedisServer) -> None:
    async with Guarded(server.url) as guarded:
        cache = guarded.cache()
        await cache.put(key(1), found(0, 99))
        await cache.put(key(2), found(0, -1))
        values = await cache.get_many([key(1), key(2)], 100)
        assert same(values[0], found(0, 99))
        assert values[1] is None
        assert guarded.errors == {"value": 1}
        assert await cache.get_many([key(1)], 99) == [None]


async def test_without_redis_every_key_is_a_miss() -> None:
    async with Guarded(f"redis://127.0.0.1:{free_port()}/0") as guarded:
        cache = guarded.cache()
        for _ in range(3):
            await cache.put(key(1), found(1))
            assert await cache.get_many([key(1), key(2)], COUNT) == [None, None]
        assert guarded.errors == {"connection": 3}
        assert guarded.breaker.state is BreakerState.OPEN
        assert guarded.writes.state is BreakerState.CLOSED
