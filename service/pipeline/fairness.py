"""What clients get of a service that they share: turns in a queue, and shares of a limit."""

import heapq
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from service.limits import Client

T = TypeVar("T")


class Turn(NamedTuple):
    """When an item is served: turns of one index are compared by time, then by number."""

    end: float  # the virtual time at which the item ends; below 0 before all others
    number: int  # in the order of arrival
    cost: float
    client: Client


# Clients whose last turn is remembered, before those that have nothing in the queue are forgotten.
_CLIENTS = 1024


@dataclass(slots=True)
class _Line(Generic[T]):
    """The items of one index."""

    items: list[tuple[Turn, T]] = field(default_factory=list)  # a heap
    time: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)  # of the last item of each client
    served: float = 0.0  # the virtual time until which the index is served


class FairQueue(Generic[T]):
    """A queue in which each client's items are first in, first out, and clients take turns.

    Self-clocked fair queueing (Golestani, 1994): an item ends its cost after the virtual time, or
    after the client's item before it, whichever is later. The item that ends first is served, and
    its end is the virtual time. So a client with one item does not wait for the hundred items of
    another one, and each item is served, whoever comes. Indexes take turns in the same way, by the
    cost of what is served of each, however many clients they have. Not thread-safe.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}  # of the indexes with items
        self._time = 0.0
        self._count = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, client: Client, cost: float = 1.0, *, first: bool = False) -> None:
        """Adds an item of a client: in its turn or, if `first`, before all others."""
        line = self._line(client)
        if not line.items:
            line.served = max(line.served, self._time)
        end = -1.0
        if not first:
            end = max(line.time, line.ends.get(client.name, 0.0)) + cost
            if len(line.ends) >= _CLIENTS:
                line.ends = {name: each for name, each in line.ends.items() if each > line.time}
            line.ends[client.name] = end
        self._count += 1
        self._add(line, Turn(end, self._count, cost, client), item)

    def put_back(self, turn: Turn, item: T) -> None:
        """Adds an item that `take` has returned, with its turn."""
        line = self._line(turn.client)
        line.served -= turn.cost
        self._add(line, turn, item)

    def take(self, most: int = 1) -> list[tuple[Turn, T]]:
        """Returns the next items, at most `most`, each with its turn; it serves the first one."""
        taken: list[tuple[Turn, T]] = []
        while self._length and len(taken) < most:
            line = min(self._lines.values(), key=self._end)
            line.served += line.items[0][0].cost
            if not taken:
                self._time = max(self._time, line.served)
                line.time = max(line.time, line.items[0][0].end)
            taken.append(heapq.heappop(line.items))
            self._length -= 1
        return taken

    def _end(self, line: _Line[T]) -> float:
        """Returns the virtual time at which the next item of an index would end."""
        if not line.items:
            return math.inf
        turn, _ = line.items[0]
        return -1.0 if turn.end < 0 else line.served + turn.cost

    def _line(self, client: Client) -> _Line[T]:
        if client.index not in self._lines:
            # Those that have nothing in the queue, and would begin at once, are forgotten.
            self._lines = {
                name: line
                for name, line in self._lines.items()
                if line.items or line.served > self._time
            }
            self._lines[client.index] = _Line()
        return self._lines[client.index]

    def _add(self, line: _Line[T], turn: Turn, item: T) -> None:
        heapq.heappush(line.items, (turn, item))
        self._length += 1


class FairExecutor:
    """Runs functions in the threads of a pool, those of different clients in turn."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._lock = Lock()

    def submit(self, client: Client, work: Callable[[], T]) -> "Future[T]":
        """Returns the future of a function that a thread of the pool calls."""
        future: Future[T] = Future()
        with self._lock:
            self._queue.push((future, work), client)
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            ((_, (future, work)),) = self._queue.take()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # of any kind, as in a pool of threads
            future.set_exception(error)
