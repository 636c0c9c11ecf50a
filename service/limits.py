"""All limits of what a service takes at once, and what counts against them."""

from array import array
from collections import Counter
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from service.errors import RequestError
from service.settings import Settings

# Request bodies in memory at once; 1024 searches take about 1 MB.
_BUFFERED_BYTES = 256 << 20
# Probes at once: monitoring calls them every few seconds, also while searches reach the limits.
_PROBES = 64
# Answers below this size are made on the event loop and are not charged [bytes].
SMALL_ANSWER = 1 << 16
# Hits as JSON in the memory caches of all workers: at most this much [bytes].
_CACHED_JSON = 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service takes at once, from all clients and in all its workers together."""

    connections: int
    unsent_bytes: int  # bytes of answers that clients have not yet taken
    requests: int  # besides probes
    probes: int  # requests of monitoring
    buffered_bytes: int  # bytes of request bodies in memory
    answer_bytes: int  # bytes of the answers that are made or sent
    # Tokens that wait or are being encoded; as many may wait for the encoder of
    # `CARE_OVERFLOW_PAIR`.
    queue_tokens: int
    cache_entries: int  # queries in the memory cache of one worker
    cache_bytes: int  # bytes of hits as JSON in the memory cache of one worker

    @classmethod
    def of(cls, settings: Settings) -> Self:
        workers = settings.workers or 1
        return cls(
            connections=settings.max_connections,
            unsent_bytes=settings.max_unsent_bytes,
            requests=settings.max_requests,
            probes=_PROBES,
            buffered_bytes=max(_BUFFERED_BYTES, settings.max_body_bytes),
            answer_bytes=settings.max_answer_bytes,
            queue_tokens=settings.queue_tokens,
            # A part of at least one entry; 0, which turns the cache off, stays.
            cache_entries=min(settings.cache_entries, max(1, settings.cache_entries // workers)),
            cache_bytes=_CACHED_JSON // workers,
        )


class Usage:
    """What a service takes of one limit: a number for each of its workers, which all can read.

    `taken`, int64 [workers], is shared by the processes; by default the service has one.
    """

    def __init__(self, taken: MutableSequence[int] | None = None, worker: int = 0) -> None:
        self._taken = array("q", [0]) if taken is None else taken
        self._worker = worker

    @property
    def own(self) -> int:
        """What this worker takes."""
        return self._taken[self._worker]

    @property
    def total(self) -> int:
        """What all workers take."""
        return sum(self._taken)

    def add(self, amount: int) -> None:
        """Notes that this worker takes an amount more or, if it is negative, gives it back."""
        self._taken[self._worker] += amount

    def allows(self, amount: int, limit: int) -> bool:
        """Returns whether this worker may take an amount more.

        It may take what the others leave of the limit, and its equal part of it at any time, so
        that it does not wait for a worker that has taken more.
        """
        part = limit // len(self._taken)
        return self.total + amount <= limit or self.own + amount <= part


@dataclass(frozen=True, slots=True)
class Usages:
    """What a service takes of each of its limits that all workers share; see `Limits`."""

    connections: Usage = field(default_factory=Usage)
    unsent_bytes: Usage = field(default_factory=Usage)
    requests: Usage = field(default_factory=Usage)
    probes: Usage = field(default_factory=Usage)
    buffered_bytes: Usage = field(default_factory=Usage)
    answer_bytes: Usage = field(default_factory=Usage)
    queue_tokens: Usage = field(default_factory=Usage)
    overflow_tokens: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class Client:
    """Who shares what a service has: a client, in each index that it asks."""

    name: str = ""
    index: str = ""


ANYONE = Client()


class Shares:
    """What clients take of a limit.

    One client may take all of it. Once it is used up, a client may still take its equal share of
    the equal share of its index, so that others cannot keep it out; all together then take less
    than twice the limit.
    """

    def __init__(self, limit: int, usage: Usage | None = None) -> None:
        self._limit = limit
        self.usage = usage or Usage()
        self._taken: Counter[Client] = Counter()
        self._clients: Counter[str] = Counter()  # of each index

    @property
    def taken(self) -> int:
        """What all clients of this object take."""
        return self._taken.total()

    def allow(self, client: Client, amount: int) -> bool:
        """Returns whether a client may take an amount more."""
        if self.usage.allows(amount, self._limit):
            return True
        indexes = len(self._clients) + (client.index not in self._clients)
        clients = self._clients[client.index] + (client not in self._taken)
        share = self._limit // indexes // clients
        return indexes * clients > 1 and self._taken[client] + amount <= share

    def take(self, client: Client, amount: int) -> None:
        """Notes that a client takes an amount more or, if it is negative, gives it back."""
        self.usage.add(amount)
        self._clients[client.index] += client not in self._taken
        self._taken[client] += amount
        if not self._taken[client]:
            del self._taken[client]
            self._clients[client.index] -= 1
            if not self._clients[client.index]:
                del self._clients[client.index]


class AnswerBudget:
    """Limits the sum of the sizes of answers in progress [bytes]; one alone may be larger."""

    def __init__(self, limit: int, usage: Usage | None = None) -> None:
        self._limit = limit
        self.usage = usage or Usage()

    @contextmanager
    def charged(self, size: int) -> Iterator[None]:
        """Charges `size` bytes within the block; RequestError if answers exceed the limit."""
        size = size if size >= SMALL_ANSWER else 0
        if size and self.usage.total and not self.usage.allows(size, self._limit):
            message = "too many long answers at once: retry later, or lower top_k"
            raise RequestError("overloaded", message, rejection="answers")
        self.usage.add(size)
        try:
            yield
        finally:
            self.usage.add(-size)
