"""Redis behind a time-out and a breaker, and the cache that replicas share in it."""

import asyncio
import hashlib
import hmac
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from core.breaker import Breaker, UnavailableError
from core.errors import CareError
from service.metrics import RedisError as ErrorKind
from stores.base import ScoredRows

T = TypeVar("T")

_PREFIX = "care:query:"
_FORMAT = 1
_HEADER = struct.Struct("<BI")
_SCORE = np.dtype("<f4")
_ROW = np.dtype("<i8")
_MAC_BYTES = 16


class RedisGuard:
    """Calls Redis so that a slow or dead one costs little: do without what it would have said.

    When calls keep failing, the breaker opens and further ones cost nothing. The timeout of a call
    [s] includes connecting and the wait for one of the connections. `on_error` is told of each
    call that failed, or whose answer is of no use.

    Raises:
        CareError: If the address cannot be used; its message does not quote it.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        breaker: Breaker,
        on_error: Callable[[ErrorKind], None],
        connections: int = 16,
    ) -> None:
        self._timeout = timeout
        self._breaker = breaker
        self.on_error = on_error
        # The time-out is the guard's alone: the client's own would start a task for each write.
        # The second version of the protocol needs no exchange before the first command.
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
            # Without its cause, which may quote the password.
            name = "CARE_REDIS_URL"
            message = f"{name} is not an address of Redis, such as redis://:password@host:6379/0"
            raise CareError(message, code="invalid_setting", name=name) from None
        self._client = Redis(connection_pool=self._pool)
        # Rather than a blocking pool, which may lose a free connection, or the news of one, when
        # those that wait are cancelled.
        self._slots = asyncio.Semaphore(connections)

    async def run(self, operation: Callable[[Redis], Awaitable[T]]) -> T:
        """Returns what an operation returns, or raises `UnavailableError` without an answer.

        A cancelled call counts neither as success nor as failure. The connection of a call
        that was cancelled or came too late is closed, as its answer may still arrive.
        """
        allowed = False
        kind: ErrorKind
        try:
            async with asyncio.timeout(self._timeout), self._slots:
                allowed = self._breaker.allows()
                if not allowed:
                    raise UnavailableError("the breaker is open")
                result = await operation(self._client)
            self._breaker.succeeded()
            return result
        except (RedisError, OSError) as error:
            if isinstance(error, ResponseError):
                # Redis is there, but refuses: it is out of memory or read-only, for example.
                kind = "value"
                self._breaker.succeeded()
            else:
                late = isinstance(error, TimeoutError | RedisTimeoutError)
                kind = "timeout" if late else "connection"
                if allowed:
                    self._breaker.failed()
            self.on_error(kind)
            raise UnavailableError(kind) from error
        except BaseException:
            if allowed:
                self._breaker.abandoned()
            raise

    async def close(self) -> None:
        """Closes the connections."""
        with suppress(RedisError, OSError):
            await self._pool.aclose()


class RedisCache:
    """Scored rows of queries, shared by all processes that share a Redis and a secret.

    A value is its format (1 byte), the number m of rows (4), the scores (float32 [m]), the rows
    (int64 [m]), all little-endian, and a keyed hash (16) of the key and all this. What was not
    written under this key by a holder of the secret is a miss, and told to `on_error`.
    """

    def __init__(self, guard: RedisGuard, secret: bytes, ttl_seconds: int) -> None:
        self._guard = guard
        self._secret = hashlib.sha256(b"value" + secret).digest()
        self._ttl_seconds = ttl_seconds

    async def get_many(self, keys: Sequence[bytes], count: int) -> list[ScoredRows | None]:
        """Looks up keys of 32 bytes, in one call; rows that are not below `count` are a miss."""
        if not keys:
            return []
        names = [_PREFIX + key.hex() for key in keys]
        try:
            values = await self._guard.run(lambda redis: redis.mget(names))
        except UnavailableError:
            return [None] * len(keys)
        return [self._read(key, value, count) for key, value in zip(keys, values, strict=True)]

    async def put(self, key: bytes, found: ScoredRows) -> None:
        """Keeps what was found for a key, unless Redis fails."""
        scores, rows = found[0].astype(_SCORE), found[1].astype(_ROW)
        payload = _HEADER.pack(_FORMAT, len(rows)) + scores.tobytes() + rows.tobytes()
        name, value = _PREFIX + key.hex(), payload + self._mac(key, payload)
        with suppress(UnavailableError):
            await self._guard.run(lambda redis: redis.set(name, value, ex=self._ttl_seconds))

    def _read(self, key: bytes, value: Any, count: int) -> ScoredRows | None:
        if value is None:
            return None
        payload, mac = value[:-_MAC_BYTES], value[-_MAC_BYTES:]
        if hmac.compare_digest(mac, self._mac(key, payload)) and payload[0] == _FORMAT:
            _, m = _HEADER.unpack_from(payload)
            # Copies, which unlike views of these bytes are aligned and can be written to.
            scores = np.frombuffer(payload, _SCORE, m, _HEADER.size).astype(np.float32)
            rows = np.frombuffer(payload, _ROW, m, _HEADER.size + scores.nbytes).astype(np.int64)
            if not m or (rows.min() >= 0 and rows.max() < count):
                return scores, rows
        self._guard.on_error("value")
        return None

    def _mac(self, key: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(key + payload, key=self._secret, digest_size=_MAC_BYTES).digest()
