import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.asyncio import Redis

from core.breaker import Breaker, UnavailableError
from core.errors import CareError
from search.hits import CacheEntry
from service.access.rate_limit import RateLimiter
from service.pipeline.redis_tier import RedisCache, RedisGuard
from tests.errors import raises
from tests.redis_server import RedisServer, run_fake, run_redis

pytestmark = pytest.mark.anyio

# Longer than a healthy server takes on a loaded machine.
PATIENT = 20.0
# For servers that never respond.
IMPATIENT = 0.05
SECRET = b"secret"
PREFIX = "care:query:"
TTL = 1000
COUNT = 100
# States of the breakers of all calls and of writes.
CLOSED, OPEN, REFUSED = ("CLOSED", "CLOSED"), ("OPEN", "CLOSED"), ("CLOSED", "OPEN")


@pytest.fixture
def anyio_backend() -> str:
    """Tests count connections, which a server on uvloop accepts later."""
    return "asyncio"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path) as server:
        yield server


class Guarded:
    """A guard with a clock that the test advances, the errors that it reported, and a cache."""

    def __init__(self, url: str, timeout: float = PATIENT, connections: int = 16) -> None:
        self.now = 0.0
        self.errors: list[str] = []
        self.calls = 0
        self.breaker, self.writes = (
            Breaker(failures=3, retry_after=5, clock=lambda: self.now) for _ in range(2)
        )
        self.guard = RedisGuard(
            url, timeout, self.breaker, self.writes, self.errors.append, connections
        )
        self.cache = RedisCache(self.guard, SECRET, TTL)

    @property
    def states(self) -> tuple[str, str]:
        """Of the breakers of all calls and of writes."""
        return self.breaker.state.name, self.writes.state.name

    async def get(self, name: str = "name") -> Any:
        def call(redis: Redis) -> Awaitable[Any]:
            self.calls += 1
            return redis.get(name)

        return await self.guard.read(call)

    async def get_at_once(self, count: int) -> list[Any]:
        return await asyncio.gather(*(self.get() for _ in range(count)), return_exceptions=True)

    async def fails(self, times: int = 1) -> None:
        """Calls fail, each within a time far beyond the time-out."""
        for _ in range(times):
            async with asyncio.timeout(10):
                with pytest.raises(UnavailableError):
                    await self.get()

    async def put(self, number: int, entry: CacheEntry) -> None:
        await self.cache.put(key(number), entry)

    async def read(self, *numbers: int, count: int = COUNT) -> list[Any]:
        """The facts of the entries of keys."""
        return [facts(each) for each in await self.cache.get_many([*map(key, numbers)], count)]

    async def __aenter__(self) -> "Guarded":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.guard.close()


@pytest.fixture
async def guarded(server: RedisServer) -> AsyncIterator[Guarded]:
    async with Guarded(server.url) as guarded:
        yield guarded


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A connection of the test itself."""
    with server.client() as client:
        yield client


def key(number: int) -> bytes:
    return bytes([number]) * 32


def found(*rows: int, answerable: float | None = None) -> CacheEntry:
    scores = np.linspace(1, 0.1, len(rows), dtype=np.float32)
    return CacheEntry((scores, np.array(rows, np.int64)), answerable)


def facts(entry: CacheEntry | None) -> Any:
    """What is compared of an entry."""
    return entry and (entry.answerable, *((each.dtype, each.tolist()) for each in entry.rows))


async def until_connected(client: redis.Redis, count: int) -> None:
    """Waits until Redis has noticed which connections are closed."""
    async with asyncio.timeout(20):
        while client.info("clients")["connected_clients"] > count:
            await asyncio.sleep(0.02)


# The guard


@pytest.mark.e2e
async def test_calls_return_results_whatever_options_the_address_has(server: RedisServer) -> None:
    url = f"{server.url}?decode_responses=true&protocol=3&socket_timeout=0.000001"
    async with Guarded(url) as guarded:
        assert await guarded.get() is None
        await guarded.guard.write(lambda redis: redis.set("name", b"\xff"))
        assert await guarded.get() == b"\xff"
        assert guarded.errors == []


@pytest.mark.e2e
async def test_a_redis_that_restarts_is_used_again(server: RedisServer, guarded: Guarded) -> None:
    await guarded.guard.write(lambda redis: redis.set("name", "old"))
    await guarded.get_at_once(16)  # several connections, all of which break
    server.kill()
    await guarded.fails(5)
    assert (guarded.errors, guarded.states) == (["connection"] * 3, OPEN)
    guarded.now += 5
    await guarded.fails()
    assert guarded.states == OPEN
    server.start()
    guarded.now += 5
    assert await guarded.get() is None
    assert guarded.states == CLOSED
    assert await guarded.get_at_once(16) == [None] * 16
    assert guarded.errors == ["connection"] * 4


@pytest.mark.e2e
async def test_a_restart_between_calls_is_not_noticed(
    server: RedisServer, guarded: Guarded
) -> None:
    await guarded.get_at_once(16)
    server.kill()
    server.start()
    await asyncio.sleep(0.05)  # closed connections are noticed
    assert await guarded.get_at_once(16) == [None] * 16
    assert guarded.errors == []


@pytest.mark.e2e
async def test_a_hanging_redis_costs_its_time_out_until_the_breaker_opens(
    server: RedisServer, client: redis.Redis
) -> None:
    client.set("name", "value")
    async with Guarded(server.url, IMPATIENT) as guarded:
        server.hang()
        await guarded.fails(5)
        assert (guarded.errors, guarded.calls) == (["timeout"] * 3, 3)
        server.resume()
        guarded.now += 5
        # If the connection of a late call were reused, its response would arrive here.
        for _ in range(100):
            try:
                assert await guarded.get() == b"value"
                break
            except UnavailableError:
                guarded.now += 5
        assert guarded.states == CLOSED


async def test_an_open_breaker_stops_calls_to_a_silent_server() -> None:
    async with run_fake(None) as fake, Guarded(fake.url, IMPATIENT, connections=4) as guarded:
        async with asyncio.timeout(30):
            results = await guarded.get_at_once(500)
        assert {type(result) for result in results} == {UnavailableError}
        assert guarded.states == OPEN
        # Until the third failure opens the breaker, each call that ends lets another one start.
        assert fake.connections <= 4 + 2
        assert guarded.calls <= 4 + 2
        connections, calls = fake.connections, guarded.calls
        for probes in (0, 1):
            guarded.now += 5 * probes
            await guarded.get_at_once(500)
            assert (fake.connections, guarded.calls) == (connections + probes, calls + probes)


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
            await asyncio.sleep(0.05)  # closed connections are noticed
        expected = ([kind] * 4, CLOSED) if kind == "response" else ([kind] * 3, OPEN)
        assert (guarded.errors, guarded.states) == expected


async def test_a_name_that_does_not_resolve_is_a_failed_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    async with Guarded("redis://redis.invalid:6379/0") as guarded:
        await guarded.fails()
        assert guarded.errors == ["connection"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("refuse", "accept"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("ACL SETUSER default -@write", "ACL SETUSER default +@write"),
    ],
)
async def test_refused_writes_open_their_breaker_and_reads_go_on(
    guarded: Guarded, client: redis.Redis, refuse: str, accept: str
) -> None:
    limiter = RateLimiter(0.1, 1, guarded.guard)
    await guarded.put(1, found(1, 2))
    client.execute_command(*refuse.split())
    for _ in range(3):
        assert guarded.states == CLOSED
        await guarded.put(2, found(3))
    for _ in range(10):
        await guarded.put(2, found(3))
        assert await guarded.read(1) == [facts(found(1, 2))]
    assert (guarded.errors, guarded.states) == (["response"] * 3, REFUSED)
    # The rate limit is local meanwhile.
    assert await limiter.admit("app", 1) == 0
    assert await limiter.admit("app", 1) > 0
    guarded.now += 5
    await guarded.put(2, found(3))
    assert (guarded.errors, guarded.states) == (["response"] * 4, REFUSED)
    client.execute_command(*accept.split())
    guarded.now += 5
    await guarded.put(2, found(3))
    assert await guarded.read(2) == [facts(found(3))]
    assert await limiter.admit("app", 1) == 0
    assert (guarded.errors, guarded.states) == (["response"] * 4, CLOSED)


@pytest.mark.e2e
async def test_an_error_of_the_operation_itself_is_not_hidden(
    server: RedisServer, guarded: Guarded
) -> None:
    async def wrong(_: Redis) -> None:
        raise KeyError("wrong")

    server.kill()
    await guarded.fails(3)
    guarded.now += 5
    with pytest.raises(KeyError):
        await guarded.guard.read(wrong)
    # The call says nothing about Redis; the next call is the probe.
    assert guarded.states == OPEN
    with guarded.breaker.call():
        pass


@pytest.mark.e2e
async def test_many_calls_at_once_share_few_connections(
    server: RedisServer, client: redis.Redis
) -> None:
    names = [f"name{i}" for i in range(500)]
    client.mset({name: name for name in names})
    before = client.info("stats")["total_connections_received"]
    async with Guarded(server.url, connections=4) as guarded:
        values = await asyncio.gather(*(guarded.get(name) for name in names))
        after = client.info("stats")["total_connections_received"]
    assert [value.decode() for value in values] == names
    assert 1 <= after - before <= 4
    assert guarded.errors == []
    await until_connected(client, 1)


@pytest.mark.e2e
async def test_waiting_for_a_connection_does_not_open_the_breaker(server: RedisServer) -> None:
    async with Guarded(server.url, 1, connections=1) as guarded:
        forever = asyncio.Event()
        holder = asyncio.create_task(guarded.guard.read(lambda _: forever.wait()))
        await asyncio.sleep(0)
        # They start later, but well within the time-out of the call that has the connection.
        results = await guarded.get_at_once(5)
        with pytest.raises(UnavailableError):
            await holder
        unavailable = [r for r in results if isinstance(r, UnavailableError)]
        assert guarded.errors == ["timeout"] * (1 + len(unavailable))
        assert guarded.states == CLOSED
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
async def test_the_response_to_a_cancelled_call_reaches_no_other_call(
    server: RedisServer, client: redis.Redis
) -> None:
    client.mset({"one": "1", "two": "2", "other": "3"})
    async with Guarded(server.url, connections=1) as guarded:
        assert await guarded.get("other") == b"3"
        await start_and_cancel(server, lambda: guarded.get("one"))
        assert await guarded.get("two") == b"2"
        assert await guarded.get("other") == b"3"
        await guarded.put(1, found(1))
        await start_and_cancel(server, lambda: guarded.put(2, found(*range(50))))
        assert await guarded.read(1) == [facts(found(1))]
        assert guarded.errors == []


@pytest.mark.e2e
async def test_calls_cancelled_at_any_moment_mix_no_responses_and_leak_no_connections(
    server: RedisServer, client: redis.Redis
) -> None:
    """Calls are cancelled as they wait, connect, write and read, beside others that are not."""
    rng = random.Random(0)
    names = [f"name{i}" for i in range(600)]
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
        await until_connected(client, 4 + 1)
    assert (guarded.errors, guarded.states) == ([], CLOSED)


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


# The cache


def name_of(number: int) -> str:
    return PREFIX + key(number).hex()


@pytest.mark.e2e
async def test_get_returns_what_was_put(
    server: RedisServer, guarded: Guarded, client: redis.Redis
) -> None:
    entries = [
        found(0, 99, 5),
        found(),
        found(7),
        CacheEntry((np.array([0.1, -1, 1e-30], np.float32), np.array([1, 2, 3]))),
        found(1, 2, answerable=0.1),
    ]
    for number, entry in enumerate(entries):
        await guarded.put(number, entry)
    assert set(client.keys()) == {name_of(number).encode() for number in range(5)}
    assert 0 < client.ttl(name_of(1)) <= TTL
    async with Guarded(server.url) as other:
        expected = [*map(facts, entries), None, facts(entries[0])]
        assert await other.read(0, 1, 2, 3, 4, 9, 0) == expected
        (first,) = await other.cache.get_many([key(0)], COUNT)
        assert all(array.flags.writeable and array.flags.aligned for array in first.rows)
        assert other.errors == []


@pytest.mark.e2e
async def test_an_invalid_value_is_a_miss_and_reported(
    guarded: Guarded, client: redis.Redis
) -> None:
    rng = random.Random(0)
    await guarded.put(1, found(1, 2, 3))
    await guarded.put(2, found(4, 5))
    good = client.get(name_of(1))
    assert isinstance(good, bytes)
    garbage = [
        b"",
        b"\x01",
        *(rng.randbytes(size) for size in (5, 15, 16, 17, 21, 57, 1000)),
        *(good[:size] for size in range(len(good))),
        *(good[size:] for size in range(1, len(good))),
        good + b"\x00",
        good[:7] + bytes([good[7] ^ 1]) + good[8:],
        client.get(name_of(2)),
        struct.pack("<BId", 2, 2**32 - 1, 0.5) + bytes(16),
    ]
    for value in garbage:
        client.set(name_of(1), value)
        assert await guarded.read(1, 2) == [None, facts(found(4, 5))]
    assert guarded.errors == ["value"] * len(garbage)
    client.set(name_of(1), good)
    assert await guarded.read(1) == [facts(found(1, 2, 3))]
    assert guarded.states == CLOSED


@pytest.mark.e2e
async def test_values_of_others_and_rows_outside_the_index_are_misses(
    guarded: Guarded, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await RedisCache(guarded.guard, b"another", TTL).put(key(1), found(1))
    with monkeypatch.context() as patch:
        patch.setattr("service.pipeline.cache.FORMAT", 1)
        await guarded.put(2, found(1))
    await guarded.put(3, found(0, -1))
    client.rpush(name_of(4), "of another type")
    await guarded.put(5, found(0, 99))
    assert await guarded.read(1, 2, 3, 4, 5) == [*[None] * 4, facts(found(0, 99))]
    assert guarded.errors == ["value"] * 3
    assert await guarded.read(5, count=99) == [None]
    await guarded.put(4, found(1))
    assert await guarded.read(4) == [facts(found(1))]
