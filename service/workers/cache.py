"""The cache of queries that all workers share, behind the memory cache of each."""

import struct
import time
import zlib

from search.hits import CacheEntry
from service.pipeline.cache import MemoryCache, packed, unpacked

# A place has 1 KiB: time of the last use [ns], checksum, length, key and value.
PLACE = 1024
_HEAD = struct.Struct("<QII32s")
_MOST_BYTES = PLACE - _HEAD.size
# The places that a key may have; it takes the one that was used the longest time ago.
_WAYS = 4


class SharedTable:
    """A table of values by keys [32 bytes] in memory that processes share, without a lock.

    A value that two processes write at once, or one writes while another reads, has a wrong
    checksum and is a miss. Values that do not fit into a place of `PLACE` bytes are not kept.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._sets = len(memory) // PLACE // _WAYS

    def get(self, key: bytes) -> bytes | None:
        for start in self._places(key):
            used, checksum, size, of = _HEAD.unpack_from(self._memory, start)
            if of == key and used and size <= _MOST_BYTES:
                value = bytes(self._memory[start + _HEAD.size : start + _HEAD.size + size])
                if zlib.crc32(value, zlib.crc32(key)) == checksum:
                    _HEAD.pack_into(self._memory, start, time.monotonic_ns(), checksum, size, key)
                    return value
        return None

    def put(self, key: bytes, value: bytes) -> None:
        if len(value) > _MOST_BYTES:
            return
        heads = {start: _HEAD.unpack_from(self._memory, start) for start in self._places(key)}
        own = (start for start, head in heads.items() if head[3] == key)
        start = next(own, None)
        if start is None:
            start = min(heads, key=lambda start: heads[start][0], default=None)
        if start is None:
            return
        end = start + _HEAD.size + len(value)
        self._memory[start + _HEAD.size : end] = value
        checksum = zlib.crc32(value, zlib.crc32(key))
        _HEAD.pack_into(self._memory, start, time.monotonic_ns(), checksum, len(value), key)

    def _places(self, key: bytes) -> range:
        if not self._sets:
            return range(0)
        first = int.from_bytes(key[:8], "little") % self._sets * _WAYS * PLACE
        return range(first, first + _WAYS * PLACE, PLACE)


class WorkerCache(MemoryCache):
    """The memory cache of a worker, which looks into the shared table for what it lacks."""

    def __init__(self, entries: int, json_bytes: int, table: SharedTable) -> None:
        super().__init__(entries, json_bytes)
        self._table = table

    def get(self, key: bytes) -> CacheEntry | None:
        entry = super().get(key)
        if entry is None and key and (value := self._table.get(key)):
            entry = unpacked(value)
            super().put(key, entry)
        return entry

    def put(self, key: bytes, rows: CacheEntry) -> None:
        """Stores the entry of a key, for all workers."""
        super().put(key, rows)
        self._table.put(key, packed(rows))
