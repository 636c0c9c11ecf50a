"""Limits of queries per second, by the generic cell rate algorithm.

GCRA (ITU-T I.371, annex A) is a leaky bucket that stores one number, the theoretical arrival
time, at which the bucket is full again. A request of n queries advances it by n emission intervals;
the request conforms if the result is at most `burst` intervals after now.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, cast

from core.breaker import UnavailableError

if TYPE_CHECKING:
    from service.pipeline.redis_tier import RedisGuard

# Times are whole microseconds, which are exact in Lua and in Python. The clock is that of Redis, as
# the clocks of replicas differ. The key expires when the bucket is full again: a missing key stands
# for a full bucket. No request is charged more than `most` queries: a later time, which others may
# have written, counts as that one.
_SCRIPT = """
local interval, burst, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local most = tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local full = tonumber(redis.call('GET', KEYS[1])) or now
if full ~= full then
  full = now
end
full = math.min(math.max(now, full), now + most * interval)
local wait = full - now - (burst - math.min(cost, burst)) * interval
if wait > 0 then
  return wait
end
full = full + cost * interval
if full > now then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000))
end
return 0
"""


class Buckets:
    """The theoretical arrival time [us] of each name, in the memory of one process.

    They are bounded: names are those of keys that were configured, of a number of buckets for
    tokens, or "anonymous".
    """

    def __init__(self) -> None:
        self._full_at: dict[str, int] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes from the buckets within the block."""
        return nullcontext()

    def get(self, name: str) -> int:
        """Returns the time of a name, 0 if it has none."""
        return self._full_at.get(name, 0)

    def put(self, name: str, full_at: int) -> None:
        self._full_at[name] = full_at


class RateLimiter:
    """Admits `burst` queries at once and `rate` per second on average, for each name.

    Replicas of one service share the bucket of a name in Redis. While Redis fails, refuses writes
    or returns an impossible time, each replica uses a local bucket, full at first, so that n
    replicas together admit n times the rate. The workers of a replica share its local buckets.

    A request of more queries than the burst never conforms. It is admitted when the bucket is
    full, and all its queries are charged, so that the next request waits longer; no request has
    more than `largest` queries.

    Intervals are whole microseconds, so `rate` is at most 1,000,000. `clock` is monotonic [ns];
    `service` tells the keys of services on one Redis apart.
    """

    def __init__(
        self,
        rate: float,
        burst: int,
        guard: "RedisGuard | None",
        clock: Callable[[], int] = time.monotonic_ns,
        service: str = "",
        largest: int = 4096,
        buckets: Buckets | None = None,
    ) -> None:
        self._interval = max(1, round(1_000_000 / rate))
        self._burst = burst
        self._guard = guard
        self._clock = clock
        self._service = service
        self._most = max(burst, largest)
        self._buckets = buckets or Buckets()

    async def admit(self, name: str, cost: int) -> float:
        """Charges a request of `cost` queries to the name of a key, if it conforms.

        Returns 0.0 if the request is admitted, else the time after which to retry [s].
        """
        if self._guard:
            key = f"care:rate:{self._service}:{name}"
            arguments = (key, self._interval, self._burst, cost, self._most)
            with suppress(UnavailableError):
                wait = await self._guard.write(
                    lambda redis: cast("Awaitable[int]", redis.eval(_SCRIPT, 1, *arguments))
                )
                if 0 <= wait <= (self._most + cost) * self._interval:
                    return wait / 1_000_000
                self._guard.on_error("value")
        now = self._clock() // 1000
        with self._buckets.locked():
            full_at = max(now, self._buckets.get(name))
            wait = full_at - now - (self._burst - min(cost, self._burst)) * self._interval
            if wait <= 0:
                self._buckets.put(name, full_at + cost * self._interval)
        return max(0, wait) / 1_000_000
