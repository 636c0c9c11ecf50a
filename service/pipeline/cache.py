"""The caches in memory of results and of vectors, and the keys of queries."""

import hashlib
import json
import math
import secrets
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from threading import Lock

import numpy as np

from core.encoders import EncoderSpec, Pair
from core.types import Conjunction, FloatArray, Query
from search.hits import CacheEntry

_QUERY_FIELDS = [field.name for field in fields(Query)]


FORMAT = 3
_HEADER = struct.Struct("<BId")
_SCORE = np.dtype("<f4")
_ROW = np.dtype("<i8")


def packed(entry: CacheEntry) -> bytes:
    """Returns an entry as bytes.

    These are the format (1 byte), the number m of rows (4 bytes), the answerable score (float64,
    NaN for none), the scores (float32 [m]) and the rows (int64 [m]), all little-endian.
    """
    scores, rows = entry.rows[0].astype(_SCORE), entry.rows[1].astype(_ROW)
    answerable = math.nan if entry.answerable is None else entry.answerable
    return _HEADER.pack(FORMAT, len(rows), answerable) + scores.tobytes() + rows.tobytes()


def unpacked(value: bytes) -> CacheEntry:
    """Returns the entry of bytes that `packed` has returned."""
    _, m, answerable = _HEADER.unpack_from(value)
    # Copies: views of the bytes would be unaligned and read-only.
    scores = np.frombuffer(value, _SCORE, m, _HEADER.size).astype(np.float32)
    rows = np.frombuffer(value, _ROW, m, _HEADER.size + scores.nbytes).astype(np.int64)
    return CacheEntry((scores, rows), None if math.isnan(answerable) else answerable)


class QueryKeys:
    """Computes cache keys: keyed hashes, which reveal nothing without the secret.

    A key depends on everything that the result depends on: the query, the embedding space, the
    weights of the query encoder, what judges whether a query is answered, what ranks hits again
    (`reranker`: address, model and limit of tokens of a server), and the files of the index
    version. Entries of another model or index version are therefore never found.
    """

    def __init__(
        self, secret: str, spec: EncoderSpec, pair: Pair, reranker: Sequence[str] = ()
    ) -> None:
        key = hashlib.sha256(secret.encode()).digest()
        self._encode = json.JSONEncoder(sort_keys=True, default=Conjunction.as_json).encode
        model = spec.embedding_space, spec.weights_sha256, spec.tokenizer_sha256
        of_pair = pair.model_dump(mode="json", include={"answerable", "late_interaction"})
        facts = self._encode([*model, of_pair, *reranker])
        self._hash = hashlib.blake2b(facts.encode(), key=key, digest_size=32)

    def key(self, query: Query, index: str) -> bytes:
        """Returns the key [32 bytes] of a query to the index version with this identity."""
        values = [getattr(query, name) for name in _QUERY_FIELDS]
        found = self._hash.copy()
        found.update(self._encode([index, values]).encode())
        return found.digest()


@dataclass(slots=True)
class _Entry:
    """What is known of a query: its scored rows, and its hits as JSON with their fields."""

    rows: CacheEntry
    include: tuple[str, ...] = ()
    json: bytes | None = None


class VectorCache:
    """LRU cache of at most `entries` query vectors, by their texts; thread-safe.

    They depend on the encoder alone, so they outlive the version of an index. Its keys are hashes
    with a secret of its own.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._secret = secrets.token_bytes()
        self._found: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> FloatArray | None:
        """Returns the vector of a text, float32 [dimension], if it is known."""
        key = self._key(text)
        with self._lock:
            vector = self._found.get(key)
            if vector is not None:
                self._found.move_to_end(key)
            return vector

    def put(self, text: str, vector: FloatArray) -> None:
        """Stores a copy of the vector of a text, float32 [dimension]."""
        key = self._key(text)
        with self._lock:
            self._found[key] = vector.copy()
            self._found.move_to_end(key)
            if len(self._found) > self._entries:
                self._found.popitem(last=False)

    def _key(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=16).digest()


class MemoryCache:
    """LRU cache of the scored rows of queries, and of their hits as JSON; not thread-safe.

    It has at most `entries` queries, and fewer if their JSON takes more than `json_bytes`.
    """

    def __init__(self, entries: int, json_bytes: int = 64 << 20) -> None:
        self._entries = entries
        self._most_json = json_bytes
        self._json_bytes = 0
        self._found: OrderedDict[bytes, _Entry] = OrderedDict()

    def get(self, key: bytes) -> CacheEntry | None:
        entry = self._found.get(key)
        if entry is None:
            return None
        self._found.move_to_end(key)
        return entry.rows

    def get_json(self, key: bytes, include: Sequence[str]) -> bytes | None:
        """Returns the hits of a key as JSON with these optional fields, or None."""
        entry = self._found.get(key)
        if entry is None or entry.include != tuple(include):
            return None
        self._found.move_to_end(key)
        return entry.json

    def put(self, key: bytes, rows: CacheEntry) -> None:
        """Stores the entry of a key; evicts the least recently used keys if full."""
        self._drop_json(self._found.get(key))
        self._found[key] = _Entry(rows)
        self._found.move_to_end(key)
        if len(self._found) > self._entries:
            self._evict()

    def put_json(self, key: bytes, include: Sequence[str], json: bytes) -> None:
        """Stores the hits of a key as JSON, if it has rows."""
        entry = self._found.get(key)
        if entry is None:
            return
        self._drop_json(entry)
        entry.include, entry.json = tuple(include), json
        self._json_bytes += len(json)
        while self._json_bytes > self._most_json:
            self._evict()

    def _evict(self) -> None:
        self._drop_json(self._found.popitem(last=False)[1])

    def _drop_json(self, entry: _Entry | None) -> None:
        if entry and entry.json is not None:
            self._json_bytes -= len(entry.json)
            entry.json = None
