"""Compares the table of cached queries that workers share with a Redis on the same machine.

    python -m loadtest.shared_cache --redis-url redis://127.0.0.1:6379

Another process stores the entries; this one looks them up in random order, as the service does.
Redis is also asked for several at once, as by requests that wait together.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from multiprocessing import get_context

import numpy as np
import uvloop

from core.breaker import Breaker
from search.hits import CacheEntry
from service.pipeline.cache import packed, unpacked
from service.pipeline.redis_tier import RedisCache, RedisGuard
from service.workers.cache import SharedTable
from service.workers.memory import SharedMemory

_ROWS = 10  # of an entry
_TOGETHER = 16
_SECRET = b"measurement"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.shared_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--redis-url", help="address of the Redis; without it only the table")
    parser.add_argument("--entries", type=int, default=10_000, help="entries that are stored")
    parser.add_argument("--places", type=int, help="places of the table (default: entries)")
    parser.add_argument("--lookups", type=int, default=50_000, help="entries that are looked up")
    options = parser.parse_args(arguments)
    numbers = random.Random(0).choices(range(options.entries), k=options.lookups)
    keys = list(map(_key, numbers))
    places = options.places or options.entries
    memory = SharedMemory.create(2, places)
    _elsewhere(_fill_table, memory.file, places, options.entries)
    _report("shared table", *_look_up_table(memory.table, keys))
    if options.redis_url:
        _elsewhere(_fill_redis, options.redis_url, options.entries)
        for together in (1, _TOGETHER):
            found = uvloop.run(_look_up_redis(options.redis_url, keys, together))
            _report(f"Redis, {together} at once", *found)
    return 0


def _key(number: int) -> bytes:
    return blake2b(number.to_bytes(8), digest_size=32).digest()


def _entry(number: int) -> CacheEntry:
    scores = np.linspace(1, 0, _ROWS, dtype=np.float32)
    return CacheEntry((scores, np.arange(_ROWS) + number), None)


def _elsewhere(work: Callable[..., None], *arguments: object) -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        pool.submit(work, *arguments).result()


def _fill_table(file: int, places: int, entries: int) -> None:
    table = SharedMemory(file, 2, 1, places).table
    for number in range(entries):
        table.put(_key(number), packed(_entry(number)))


def _fill_redis(url: str, entries: int) -> None:
    async def fill() -> None:
        cache = _redis(url)
        for number in range(entries):
            await cache.put(_key(number), _entry(number))
        await cache.close()

    uvloop.run(fill())


def _redis(url: str) -> RedisCache:
    guard = RedisGuard(url, 1.0, Breaker(), Breaker(), lambda _: None)
    return RedisCache(guard, _SECRET, 3600)


def _look_up_table(table: SharedTable, keys: Sequence[bytes]) -> tuple[list[float], int, float]:
    spent, found = [], 0
    started = time.perf_counter()
    for key in keys:
        before = time.perf_counter()
        value = table.get(key)
        found += value is not None and unpacked(value) is not None
        spent.append(time.perf_counter() - before)
    return spent, found, time.perf_counter() - started


async def _look_up_redis(
    url: str, keys: Sequence[bytes], together: int
) -> tuple[list[float], int, float]:
    cache, spent, found = _redis(url), list[float](), 0
    waiting = iter(keys)

    async def look_up() -> None:
        nonlocal found
        for key in waiting:
            before = time.perf_counter()
            (entry,) = await cache.get_many([key], 1 << 40)
            found += entry is not None
            spent.append(time.perf_counter() - before)

    started = time.perf_counter()
    work: list[Awaitable[None]] = [look_up() for _ in range(together)]
    await asyncio.gather(*work)
    seconds = time.perf_counter() - started
    await cache.close()
    return spent, found, seconds


def _report(name: str, spent: Sequence[float], found: int, seconds: float) -> None:
    p50, p99 = (1e6 * float(s) for s in np.percentile(spent, [50, 99]))
    print(
        f"{name}: {len(spent) / seconds:,.0f} lookups/s, p50 {p50:,.1f} µs, p99 {p99:,.1f} µs, "
        f"{found / len(spent):.1%} hits"
    )


if __name__ == "__main__":
    sys.exit(main())
