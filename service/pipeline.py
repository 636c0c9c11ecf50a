"""From texts to results: admission, batches in encoding threads, the rest in search threads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from core.encoders import QueryEncoder
from core.types import FloatArray
from service.batcher import Batcher, Job
from service.metrics import Metrics
from service.problems import RequestError
from service.settings import Settings
from stores.faiss.search import limit_threads

_T = TypeVar("_T")

# Results that are ready this close together wake the event loop once [s].
_DELIVER_EVERY = 0.001


class Work(NamedTuple):
    """What is asked of the pipeline for one text.

    Attributes:
        text: Under the text rules of `core.text`.
        finish: Makes the result from the text's vector; called in a search thread.
        key: Work in flight with an equal key is shared; empty if none may be.
    """

    text: str
    finish: Callable[[FloatArray], Any]
    key: bytes = b""


# Looks up results by the keys of works, None where there is none.
Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[Any]]]


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """Work in flight, which several requests may wait for; only the pipeline changes it.

    Attributes:
        work: What was asked for.
        result: What its `finish` returned.
        waiters: Requests that wait for it.
        admitted: Tokens that it takes of the queue.
    """

    work: Work
    result: "asyncio.Future[Any]" = field(default_factory=_future)
    waiters: int = 0
    admitted: int = 0


class Pipeline:
    """Owns each flight from admission to result; all methods but `stop` are for the event loop.

    Args:
        encoder: The query encoder.
        settings: The service's settings.
        metrics: Where the queue, batches and shared flights are counted.
        keep: Told of each result by the key of its work.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        settings: Settings,
        metrics: Metrics,
        keep: Callable[[bytes, Any], None],
    ) -> None:
        self._limit = settings.queue_tokens
        self._longest = encoder.spec.max_length
        self._prompt = len(encoder.spec.prompt)
        self._parts = settings.searchers
        self._metrics = metrics
        self._keep = keep
        self._open: dict[bytes, Flight] = {}
        self._lookups: set[asyncio.Task[None]] = set()
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

    @contextmanager
    def join(
        self, works: Sequence[Work], lookup: Lookup | None = None, *, urgent: bool = False
    ) -> Iterator[list[Flight]]:
        """Joins the flights of equal works, starts the others, and leaves all when the block ends.

        Those that are started are found by equal works at once; then they are looked up, if there
        is a lookup, then those that it did not find are admitted, all or none.

        Args:
            works: What one request asks for.
            lookup: Where results may be had without work.
            urgent: Whether they pass admission and go before all that wait.

        Yields:
            A flight for each work, of which only results and times may be read.
        """
        flights, started = [], []
        for work in works:
            flight = self._open.get(work.key)
            if flight is None:
                flight = Flight(text=work.text, work=work)
                started.append(flight)
                if work.key:
                    self._open[work.key] = flight
            flight.waiters += 1
            flights.append(flight)
        if works and works[0].key:
            self._metrics.looked_up("in_flight", len(flights) - len(started), len(started))
        try:
            if lookup and started:
                spawn(self._look_up(lookup, started), self._lookups)
            else:
                self._submit(started, urgent=urgent)
            yield flights
        finally:
            for flight in flights:
                self._leave(flight)

    async def results(
        self, flights: Sequence[Flight], deadline: float, *others: "asyncio.Future[Any]"
    ) -> list[Any]:
        """Waits for the results of flights, or for the first error.

        Args:
            flights: Those that the request has joined.
            deadline: On the clock of the event loop [s].
            others: What else is waited for; not cancelled when the wait ends.

        Raises:
            RequestError: If the queue had no room, or the deadline passes first.
            Exception: The first error.
        """
        now = asyncio.get_running_loop().time()
        waited = {*(flight.result for flight in flights), *others}
        done, pending = await asyncio.wait(
            waited, timeout=max(0.0, deadline - now), return_when=asyncio.FIRST_EXCEPTION
        )
        errors = [error for future in done if (error := future.exception())]
        if errors:
            raise errors[0]
        if pending:
            raise RequestError(
                "deadline_exceeded", "the deadline passed before the answer was ready"
            )
        return [flight.result.result() for flight in flights]

    def run(self, work: Callable[..., _T], *arguments: Any) -> "asyncio.Future[_T]":
        """Runs something in a search thread."""
        return asyncio.get_running_loop().run_in_executor(self._search, work, *arguments)

    async def close(self) -> None:
        """Waits for the work in hand and ends the threads."""
        for task in self._lookups:
            task.cancel()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Does so from a thread without the event loop."""
        self._batcher.close()
        self._search.shutdown()

    async def _look_up(self, lookup: Lookup, flights: Sequence[Flight]) -> None:
        try:
            results = await lookup([flight.work.key for flight in flights])
        except Exception as error:
            results = [error] * len(flights)
        for flight, result in zip(flights, results, strict=True):
            flight.queued = time.perf_counter()
            if result is not None:
                self._resolve(flight, result)
        self._submit([flight for flight in flights if not flight.result.done()])

    def _submit(self, flights: Sequence[Flight], *, urgent: bool = False) -> None:
        """Admits all of these flights or none; a queue with nothing in it admits any."""
        if not flights:
            return
        # A token is at least one character; two more begin and end the text.
        tokens = [min(self._prompt + len(f.text) + 2, self._longest) for f in flights]
        if not urgent and self._tokens and self._tokens + sum(tokens) > self._limit:
            error = RequestError("overloaded", "the queue is full: retry later")
            for flight in flights:
                self._resolve(flight, error)
            return
        for flight, admitted in zip(flights, tokens, strict=True):
            flight.admitted = admitted
        self._queries += len(flights)
        self._tokens += sum(tokens)
        self._metrics.admitted_tokens.inc(sum(tokens))
        self._batcher.submit(flights, first=urgent)

    def _leave(self, flight: Flight) -> None:
        """Counts one waiter less; the last one to leave ends the flight."""
        flight.waiters -= 1
        if not flight.waiters and not flight.result.done():
            flight.abandoned = True
            flight.result.cancel()
            self._close(flight)

    def _resolve(self, flight: Flight, result: Any) -> None:
        """Ends a flight with its result, or an exception; the first to do so counts."""
        if flight.result.done():
            return
        self._close(flight)
        if isinstance(result, Exception):
            flight.result.set_exception(result)
            flight.result.exception()  # a request stops at its first error and asks for no other
            return
        flight.result.set_result(result)
        if flight.work.key:
            self._keep(flight.work.key, result)

    def _close(self, flight: Flight) -> None:
        if self._open.get(flight.work.key) is flight:
            del self._open[flight.work.key]
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
                if isinstance(vectors, Exception):
                    raise vectors
                result = flight.work.finish(vectors[i])
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
            self._resolve(flight, result)


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Runs a coroutine beside the others, held by a set until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
