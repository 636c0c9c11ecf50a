"""What clients get of a service that they share: turns in a queue, and shares of a limit."""

import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# The virtual time at which an item ends, and its number in the order of arrival.
Turn = tuple[float, int]

# Clients whose last turn is remembered, before those that have nothing in the queue are forgotten.
_CLIENTS = 1024


class FairQueue(Generic[T]):
    """A queue in which each client's items are first in, first out, and clients take turns.

    Self-clocked fair queueing (Golestani, 1994): an item ends its cost after the virtual time, or
    after the client's item before it, whichever is later. The item that ends first is served, and
    its end is the virtual time. So a client with one item does not wait for the hundred items of
    another one, and each item is served, whoever comes. Not thread-safe.
    """

    def __init__(self) -> None:
        self._items: list[tuple[Turn, T]] = []
        self._time = 0.0
        self._ends: dict[str, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: T, client: str, cost: float = 1.0, *, first: bool = False) -> None:
        """Adds an item of a client: in its turn or, if `first`, before all others."""
        end = -1.0
        if not first:
            end = max(self._time, self._ends.get(client, 0.0)) + cost
            if len(self._ends) >= _CLIENTS:
                self._ends = {name: each for name, each in self._ends.items() if each > self._time}
            self._ends[client] = end
        self._count += 1
        self.put_back((end, self._count), item)

    def put_back(self, turn: Turn, item: T) -> None:
        """Adds an item that `take` has returned, with its turn."""
        heapq.heappush(self._items, (turn, item))

    def take(self, most: int = 1) -> list[tuple[Turn, T]]:
        """Returns the next items, at most `most`, each with its turn; it serves the first one."""
        taken = [heapq.heappop(self._items) for _ in range(min(most, len(self._items)))]
        if taken:
            self._time = max(self._time, taken[0][0][0])
        return taken


class FairExecutor:
    """Runs functions in the threads of a pool, those of different clients in turn."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._queue: FairQueue[tuple[Future[Any], Callable[[], Any]]] = FairQueue()
        self._lock = Lock()

    def submit(self, client: str, work: Callable[[], T]) -> "Future[T]":
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
