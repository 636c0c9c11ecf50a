"""From texts to results: admission, batches in encoding threads, the rest in search threads."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from core.types import FloatArray, QueryEncoder
from service.batcher import Batcher, Job
from service.metrics import Metrics
from service.settings import Settings
from service.vector_search import limit_threads

_T = TypeVar("_T")

# Results that are ready this close together wake the event loop once [s].
_DELIVER_EVERY = 0.001


class OverloadedError(Exception):
    """More tokens are in work or waiting than the service admits."""


class DeadlineError(Exception):
    """The deadline passed before the answer was ready."""


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """Work on one text, which several requests may wait for; belongs to the event loop.

    Attributes:
        finish: Makes the result from the text's vector; called in a search thread.
        key: By which an equal query finds it; empty if none may.
        result: What `finish` returned.
        waiters: Requests that wait for it.
        admitted: Tokens that it takes of the queue.
    """

    finish: Callable[[FloatArray], Any]
    key: bytes = b""
    result: "asyncio.Future[Any]" = field(default_factory=_future)
    waiters: int = 0
    admitted: int = 0


class Pipeline:
    """Works on flights; all methods but `close` are for the event loop.

    Args:
        encoder: The query encoder.
        settings: The service's settings.
        metrics: Where the queue and batches are shown.
    """

    def __init__(self, encoder: QueryEncoder, settings: Settings, metrics: Metrics) -> None:
        self._limit = settings.queue_tokens
        self._longest = encoder.spec.max_length
        self._prompt = len(encoder.spec.prompt)
        self._parts = settings.searchers
        self._metrics = metrics
        self._open: dict[bytes, Flight] = {}
        self._queries = 0
        self._tokens = 0
        metrics.watch_queue(lambda: self._queries, lambda: self._tokens, self._limit)
        self._search = ThreadPoolExecutor(
            max(settings.threads, self._parts), "search", limit_threads
        )
        self._batcher = Batcher(
            encoder,
            settings.encoders,
            settings.batch_tokens,
            settings.batch_padding,
            self._encoded,
            metrics,
            limit_threads,
        )

    def find(self, key: bytes) -> Flight | None:
        """Returns the work under way on an equal query."""
        return self._open.get(key)

    def open(self, flights: Iterable[Flight]) -> None:
        """Lets equal queries find these flights."""
        for flight in flights:
            self._open[flight.key] = flight

    def submit(self, flights: Sequence[Flight], *, urgent: bool = False) -> None:
        """Admits all of these flights or none; a queue with nothing in it admits any.

        Args:
            flights: Flights of one request.
            urgent: Whether they pass admission and go before all that wait.

        Raises:
            OverloadedError: If the queue has no room for their tokens.
        """
        tokens = [self._most_tokens(flight.text) for flight in flights]
        if not urgent and self._tokens and self._tokens + sum(tokens) > self._limit:
            raise OverloadedError
        for flight, admitted in zip(flights, tokens, strict=True):
            flight.admitted = admitted
        self._queries += len(flights)
        self._tokens += sum(tokens)
        self._metrics.admitted_tokens.inc(sum(tokens))
        self._batcher.submit(flights, first=urgent)

    async def wait(self, futures: Iterable["asyncio.Future[Any]"], deadline: float) -> None:
        """Waits for all, or for the first error.

        Args:
            futures: What is waited for; not cancelled when the wait ends.
            deadline: On the clock of the event loop [s].

        Raises:
            DeadlineError: If it passes first.
            Exception: The first error.
        """
        now = asyncio.get_running_loop().time()
        done, pending = await asyncio.wait(
            futures, timeout=max(0.0, deadline - now), return_when=asyncio.FIRST_EXCEPTION
        )
        for future in done:
            future.result()
        if pending:
            raise DeadlineError

    def leave(self, flight: Flight) -> None:
        """Stops waiting for a flight; the last one to leave ends it."""
        flight.waiters -= 1
        if not flight.waiters and not flight.result.done():
            flight.abandoned = True
            flight.result.cancel()
            self._close(flight)

    def resolve(self, flight: Flight, result: Any) -> None:
        """Ends a flight with its result, or an exception; the first to do so counts."""
        if flight.result.done():
            return
        self._close(flight)
        if isinstance(result, Exception):
            flight.result.set_exception(result)
        else:
            flight.result.set_result(result)

    def run(self, work: Callable[..., _T], *arguments: Any) -> "asyncio.Future[_T]":
        """Runs something in a search thread."""
        return asyncio.get_running_loop().run_in_executor(self._search, work, *arguments)

    def close(self) -> None:
        """Waits for the work in hand and ends the threads."""
        self._batcher.close()
        self._search.shutdown()

    def _most_tokens(self, text: str) -> int:
        # A token is at least one character; two more begin and end the text.
        return min(self._prompt + len(text) + 2, self._longest)

    def _close(self, flight: Flight) -> None:
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]
        self._queries -= bool(flight.admitted)
        self._tokens -= flight.admitted
        flight.admitted = 0

    def _encoded(self, flights: Sequence[Flight], vectors: FloatArray | Exception) -> None:
        """Called in an encoding thread, which goes on with the next batch."""
        if not self._parts:
            self._finish(flights, vectors)
        for i in range(min(self._parts, len(flights))):
            mine = slice(i, None, self._parts)
            part = vectors if isinstance(vectors, Exception) else vectors[mine]
            self._search.submit(self._finish, flights[mine], part)

    def _finish(self, flights: Sequence[Flight], vectors: FloatArray | Exception) -> None:
        loop = flights[0].result.get_loop()
        finished: list[tuple[Flight, Any]] = []
        due = time.perf_counter() + _DELIVER_EVERY
        for i, flight in enumerate(flights):
            if flight.abandoned:
                continue
            try:
                result = vectors if isinstance(vectors, Exception) else flight.finish(vectors[i])
            except Exception as error:  # whatever it is, its waiters must hear of it
                result = error
            finished.append((flight, result))
            if time.perf_counter() >= due:
                loop.call_soon_threadsafe(self._resolve_all, finished)
                finished, due = [], time.perf_counter() + _DELIVER_EVERY
        if finished:
            loop.call_soon_threadsafe(self._resolve_all, finished)

    def _resolve_all(self, finished: Sequence[tuple[Flight, Any]]) -> None:
        for flight, result in finished:
            self.resolve(flight, result)
