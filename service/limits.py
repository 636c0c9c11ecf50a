"""All limits of what a service takes at once, and what counts against them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Self

from service.errors import RequestError
from service.settings import Settings

# Request bodies in memory at once; 1024 searches take about 1 MB.
_BUFFERED_BYTES = 256 << 20
# Probes at once: monitoring calls them every few seconds, also while searches reach the limits.
_PROBES = 64
# Answers below this size are made on the event loop and are not charged [bytes].
SMALL_ANSWER = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service takes at once, from all clients together.

    Attributes:
        connections: Open connections.
        unsent_bytes: Bytes of answers that clients have not yet taken.
        requests: Requests, besides probes.
        probes: Requests of monitoring.
        buffered_bytes: Bytes of request bodies in memory.
        answer_bytes: Bytes of the answers that are made or sent.
        queue_tokens: Tokens that wait or are being encoded.
        cache_entries: Queries in the memory cache.
    """

    connections: int
    unsent_bytes: int
    requests: int
    probes: int
    buffered_bytes: int
    answer_bytes: int
    queue_tokens: int
    cache_entries: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Returns the limits of a service with these settings."""
        return cls(
            connections=settings.max_connections,
            unsent_bytes=settings.max_unsent_bytes,
            requests=settings.max_requests,
            probes=_PROBES,
            buffered_bytes=max(_BUFFERED_BYTES, settings.max_body_bytes),
            answer_bytes=settings.max_answer_bytes,
            queue_tokens=settings.queue_tokens,
            cache_entries=settings.cache_entries,
        )

    def divided(self, parts: int) -> Self:
        """Returns the limits of each of `parts` processes that serve together.

        All parts are equal and not above the whole; a limit of 0, which turns a cache off, stays.
        """
        whole = (getattr(self, field.name) for field in fields(self))
        return type(self)(*(max(min(limit, 1), limit // parts) for limit in whole))


class Shares:
    """What clients take of a limit.

    One client may take all of it. Once it is used up, a client may still take its equal share, so
    that others cannot keep it out; all together then take less than twice the limit.

    Attributes:
        total: What all clients take.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = 0
        self._taken: Counter[str] = Counter()

    def allow(self, client: str, amount: int) -> bool:
        """Returns whether a client may take an amount more."""
        if self.total + amount <= self._limit:
            return True
        clients = len(self._taken) + (client not in self._taken)
        return clients > 1 and self._taken[client] + amount <= self._limit // clients

    def take(self, client: str, amount: int) -> None:
        """Notes that a client takes an amount more or, if it is negative, gives it back."""
        self.total += amount
        self._taken[client] += amount
        if not self._taken[client]:
            del self._taken[client]


class AnswerBudget:
    """Limits the size of all answers that are being made or sent.

    Args:
        limit: Largest sum of their sizes [bytes]; an answer alone may be larger.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.charged_bytes = 0

    @contextmanager
    def charged(self, size: int) -> Iterator[None]:
        """Charges an answer of `size` bytes for the duration of the block.

        Raises:
            RequestError: If it exceeds the limit together with the answers in progress.
        """
        size = size if size >= SMALL_ANSWER else 0
        if size and self.charged_bytes and self.charged_bytes + size > self._limit:
            message = "too many long answers at once: retry later, or lower top_k"
            raise RequestError("overloaded", message, rejection="answers")
        self.charged_bytes += size
        try:
            yield
        finally:
            self.charged_bytes -= size
