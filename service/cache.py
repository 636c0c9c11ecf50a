"""The cache in memory, and the keys of queries in both caches."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import fields

from core.encoders import EncoderSpec
from core.types import Query
from stores.base import ScoredRows

_QUERY_FIELDS = [field.name for field in fields(Query)]


class QueryKeys:
    """Computes cache keys: keyed hashes, which reveal nothing without the secret.

    A key depends on everything that the result depends on: the query, the embedding space, the
    weights of the query encoder and the files of the index version. Entries of another model or
    index version are therefore never found.
    """

    def __init__(self, secret: str, spec: EncoderSpec) -> None:
        self._secret = hashlib.sha256(secret.encode()).digest()
        self._encoder = [spec.embedding_space, spec.weights_sha256, spec.tokenizer_sha256]

    def key(self, query: Query, index: str) -> bytes:
        """Returns the key [32 bytes] of a query to the index version with this identity."""
        values = [getattr(query, name) for name in _QUERY_FIELDS]
        text = json.dumps([self._encoder, index, values], sort_keys=True)
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=32).digest()


class MemoryCache:
    """LRU cache of the scored rows of queries; not thread-safe."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._found: OrderedDict[bytes, ScoredRows] = OrderedDict()

    def get(self, key: bytes) -> ScoredRows | None:
        """Returns the scored rows of a key, or None."""
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: bytes, found: ScoredRows) -> None:
        """Stores the scored rows of a key; evicts the least recently used entry if full."""
        self._found[key] = found
        self._found.move_to_end(key)
        if len(self._found) > self._entries:
            self._found.popitem(last=False)
