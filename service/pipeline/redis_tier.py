"""Calls of Redis with a time-out and a circuit breaker, and the cache that replicas share."""

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from core.breaker import Breaker, UnavailableError
from core.errors import CareError
from search.hits import CacheEntry
from service.observe.metrics import RedisError as ErrorKind
from service.pipeline.cache import FORMAT, packed, unpacked

T = TypeVar("T")

_FAILURES = (RedisError, OSError)
_PREFIX = "care:query:"
_MAC_BYTES = 16


class RedisGuard:
    """Calls Redis so that a slow or failed Redis delays a request by one time-out at most.

    After repeated failures the circuit breaker opens, and calls fail at once. A second one opens
    for writes alone if Redis responds to them with errors: it is out of memory, a read-only
    replica, or forbids the command. Reads go on.

    `timeout` is that of a call, with connecting and waiting for a free connection [s]; `on_error`
    is called with the kind of each failed call or unusable value. The message of the CareError for
    an address that is not valid does not quote it.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        breaker: Breaker,
        writes: Breaker,
        on_error: Callable[[ErrorKind], None],
        connections: int = 16,
    ) -> None:
        self._timeout = timeout
        self._breaker = breaker
        self._writes = writes
        self.on_error = on_error
        # Time-outs are applied by `run`: those of the client would start a task for each write.
        # Version 2 of the protocol needs no handshake before the first command.
        options: dict[str, Any] = {
            "max_connections": connections,
            "socket_timeout": None,
            "socket_connect_timeout": timeout,
            "retry": None,
            "protocol": 2,
            "driver_info": None,
            "decode_responses": False,
        }
        try:
            self._pool = ConnectionPool(**{**parse_url(url), **options})
            self._pool.connection_class(**self._pool.connection_kwargs)
        except (ValueError, TypeError, RedisError):
            # The cause is omitted: it may quote the password.
            name = "CARE_REDIS_URL"
            message = f"{name} is not an address such as redis://:password@host:6379/0"
            raise CareError(message, code="invalid_setting", name=name) from None
        self._client = Redis(connection_pool=self._pool)
        # A semaphore, because redis-py's blocking pool may lose a free connection, or the
        # notification of one, when a waiting call is cancelled.
        self._slots = asyncio.Semaphore(connections)

    async def read(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Returns the result of an operation that changes nothing; see `write`."""
        with self._reported():
            return await self._run(operation)

    async def write(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Returns the result of an operation.

        UnavailableError if the call fails or times out, or a breaker is open. A cancelled call
        counts neither as success nor as failure. The connection of a call that was cancelled or
        timed out is closed, as its response may still arrive.
        """
        with self._reported(), self._writes.call(ResponseError):
            return await self._run(operation)

    async def _run(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        end = asyncio.get_running_loop().time() + self._timeout
        # Waiting for a connection says nothing of Redis.
        async with asyncio.timeout_at(end):
            await self._slots.acquire()
        try:
            with self._breaker.call(*_FAILURES, answers=(ResponseError,)):
                async with asyncio.timeout_at(end):
                    return await operation(self._client)
        finally:
            self._slots.release()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            kind: ErrorKind = "connection"
            if isinstance(error, ResponseError):
                kind = "response"
            elif isinstance(error, TimeoutError | RedisTimeoutError):
                kind = "timeout"
            self.on_error(kind)
            raise UnavailableError(kind) from error

    async def close(self) -> None:
        with suppress(RedisError, OSError):
            await self._pool.aclose()


class RedisCache:
    """Cache of scored rows, shared by all processes with the same Redis and secret.

    A value consists of what `packed` returns and a keyed hash of it and the key (16 bytes). A value
    without a valid hash is a miss and reported to `on_error`.
    """

    def __init__(self, guard: RedisGuard, secret: bytes, ttl_seconds: int) -> None:
        self._guard = guard
        self._secret = hashlib.sha256(b"value" + secret).digest()
        self._ttl_seconds = ttl_seconds

    async def close(self) -> None:
        await self._guard.close()

    async def get_many(self, keys: Sequence[bytes], count: int) -> list[CacheEntry | None]:
        """Looks up keys [32 bytes] in one call; a value with a row of `count` or more is a miss."""
        if not keys:
            return []
        names = [_PREFIX + key.hex() for key in keys]
        try:
            values = await self._guard.read(lambda redis: redis.mget(names))
        except UnavailableError:
            return [None] * len(keys)
        return [self._read(key, value, count) for key, value in zip(keys, values, strict=True)]

    async def put(self, key: bytes, entry: CacheEntry) -> None:
        """Stores the entry of a key; failures of Redis are ignored."""
        payload = packed(entry)
        name, value = _PREFIX + key.hex(), payload + self._mac(key, payload)
        with suppress(UnavailableError):
            await self._guard.write(lambda redis: redis.set(name, value, ex=self._ttl_seconds))

    def _read(self, key: bytes, value: Any, count: int) -> CacheEntry | None:
        if value is None:
            return None
        payload, mac = value[:-_MAC_BYTES], value[-_MAC_BYTES:]
        if hmac.compare_digest(mac, self._mac(key, payload)) and payload[0] == FORMAT:
            entry = unpacked(payload)
            rows = entry.rows[1]
            if not len(rows) or (rows.min() >= 0 and rows.max() < count):
                return entry
        self._guard.on_error("value")
        return None

    def _mac(self, key: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(key + payload, key=self._secret, digest_size=_MAC_BYTES).digest()
