import hashlib
import json
import secrets
from collections import OrderedDict
from dataclasses import asdict
from threading import Lock

from core.types import Query
from service.vector_search import Found


class Cache:
    """Found rows of recent queries, least recently used out first; thread-safe.

    Keys are keyed hashes under a secret of this process: a memory dump or a debugger shows
    no query text.

    Args:
        entries: The number of queries kept; 0 keeps none.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._secret = secrets.token_bytes(32)
        self._found: OrderedDict[bytes, Found] = OrderedDict()
        self._lock = Lock()

    def key(self, query: Query, version: str) -> bytes:
        """Returns the key of a query to an index version; the version implies the space."""
        fields = json.dumps([version, asdict(query)], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(fields.encode(), key=self._secret, digest_size=32).digest()

    def get(self, key: bytes) -> Found | None:
        """Returns what was found for a key, or None."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: bytes, found: Found) -> None:
        """Keeps what was found for a key."""
        with self._lock:
            self._found[key] = found
            self._found.move_to_end(key)
            if len(self._found) > self._entries:
                self._found.popitem(last=False)
