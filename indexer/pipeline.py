"""Stages of work that overlap, and a clock of the one that matters."""

import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], pool: Executor) -> Iterator[T]:
    """Yields items, none of them None, each of which is made while the one before is in use.

    Args:
        items: Makes them; an error of it is raised at its item's turn.
        pool: What makes them; the items of one iterator are made one at a time.
    """
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


class WorkClock:
    """The time in which at least one call was running; calls may come from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self.seconds += time.perf_counter() - self._since
