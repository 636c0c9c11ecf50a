import os
from hashlib import blake2b
from multiprocessing import get_context

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from search.hits import CacheEntry
from service.pipeline.cache import MemoryCache, packed, unpacked
from service.workers.cache import PLACE, SharedTable, WorkerCache
from service.workers.memory import SharedMemory


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(4), digest_size=32).digest()


def found(number: int, rows: int = 10) -> CacheEntry:
    scores = np.linspace(1, 0, rows, dtype=np.float32)
    return CacheEntry((scores, np.arange(rows) + number), number / 7)


def same(one: CacheEntry | None, other: CacheEntry) -> bool:
    return one is not None and packed(one) == packed(other)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.binary(max_size=1100))))
def test_a_table_returns_the_last_value_of_a_key_or_none(
    steps: list[tuple[bool, int, bytes]],
) -> None:
    table, stored = SharedTable(memoryview(bytearray(8 * PLACE))), dict[bytes, bytes]()
    for put, number, value in steps:
        if put:
            table.put(key(number), value)
            if len(value) <= 976:
                stored[key(number)] = value
        else:
            value_found = table.get(key(number))
            assert value_found in (None, stored.get(key(number)))
    if steps and steps[-1][0] and len(steps[-1][2]) <= 976:
        assert table.get(key(steps[-1][1])) == steps[-1][2]


def test_the_least_recently_used_of_four_places_is_taken() -> None:
    table = SharedTable(memoryview(bytearray(4 * PLACE)))
    for number in range(4):
        table.put(key(number), b"%d" % number)
    assert table.get(key(0)) == b"0"
    table.put(key(4), b"4")
    kept = [table.get(key(number)) for number in range(5)]
    assert kept == [b"0", None, b"2", b"3", b"4"]


def test_a_table_without_places_keeps_nothing() -> None:
    table = SharedTable(memoryview(b""))
    table.put(key(0), b"value")
    assert table.get(key(0)) is None


@given(st.integers(0, 60), st.none() | st.floats(0, 1))
def test_entries_are_the_same_after_packing(rows: int, answerable: float | None) -> None:
    entry = found(1, rows)._replace(answerable=answerable)
    back = unpacked(packed(entry))
    assert np.array_equal(back.rows[0], entry.rows[0])
    assert np.array_equal(back.rows[1], entry.rows[1])
    assert back.answerable == answerable


def test_what_one_worker_has_found_another_knows() -> None:
    memory = SharedMemory.create(2, 64)
    one, other = (
        WorkerCache(4, 100, table=SharedMemory(memory.file, 2, i, 64).table) for i in range(2)
    )
    one.put(key(1), found(1))
    assert same(other.get(key(1)), found(1))
    assert other.get(key(2)) is None
    # Queries without a key, such as those that explain, are not kept.
    assert other.get(b"") is None
    # A result that is too long for a place stays with the worker that found it.
    one.put(key(3), found(3, rows=100))
    assert same(one.get(key(3)), found(3, rows=100))
    assert other.get(key(3)) is None
    assert isinstance(other, MemoryCache)
    os.close(memory.file)


def _write(file: int, worker: int, rounds: int) -> int:
    """Writes and reads few keys; returns how many values it read that nobody has written."""
    table = SharedMemory(file, 2, worker, 8).table
    wrong = 0
    for i in range(rounds):
        number = i % 3
        table.put(key(number), bytes([number, worker]) * (100 + i % 300))
        value = table.get(key(number))
        written = value is None or (
            value[0] == number and len(set(zip(value[::2], value[1::2], strict=True))) == 1
        )
        wrong += not written
    return wrong


def test_workers_that_write_at_once_read_whole_values_or_none() -> None:
    memory = SharedMemory.create(2, 8)
    with get_context("fork").Pool(2) as pool:
        started = [pool.apply_async(_write, (memory.file, i, 20_000)) for i in range(2)]
        assert [each.get(60) for each in started] == [0, 0]
    os.close(memory.file)


def test_the_secret_of_a_service_is_new_and_the_same_for_its_workers() -> None:
    one, other = SharedMemory.create(2), SharedMemory.create(2)
    assert one.secret == SharedMemory(one.file, 2, 0).secret != other.secret
    assert len(set(one.secret)) > 4
    for each in (one, other):
        os.close(each.file)
