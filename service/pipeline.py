"""From texts to results: admission, batches in encoding threads, the rest in search threads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

# Looks up results by the keys of flights, None where there is none.
Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[Any]]]


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """What is asked for one text; once it is asked for, only the pipeline changes it.

    `finish` makes the result from the text's vector, in a search thread. Flights with equal keys,
    unless empty, are one, which all their requests, the `waiters`, wait for. It takes `admitted`
    tokens of the queue.
    """

    finish: Callable[[FloatArray], Any]
    key: bytes = b""
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    waiters: int = 0
    admitted: int = 0


class Pipeline:
    """Owns each flight from `complete` to result; all methods but `stop` are for the event loop.

    `keep` is told of each result by the key of its flight.
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
        metrics.queue_queries.set_function(lambda: self._queries)
        metrics.queue_tokens.set_function(lambda: self._tokens)
        metrics.queue_limit.set(self._limit)
        threads = max(settings.threads, self._parts)
        self._search = ThreadPoolExecutor(threads, "search", limit_threads)
        self._batcher = Batcher(
            encoder,
            settings.encoders,
            settings.batch_tokens,
            settings.batch_padding,
            self._encoded,
            metrics,
        )

    async def complete(
        self,
        asked: Sequence[Flight],
        deadline: float,
        lookup: Lookup | None = None,
        others: Sequence["asyncio.Future[Any]"] = (),
        *,
        urgent: bool = False,
    ) -> list[Flight]:
        """Joins flights already under way, starts the others, and waits for all results.

        Those that are started are found by equal ones at once; then they are looked up, if there
        is a lookup, then those that it did not find are admitted, all or none; urgent ones pass
        admission and go before all that wait. `others` are waited for as well, but not cancelled
        when the wait ends. The last request to leave a flight without its result ends it.

        Returns for each the flight that brought its result, of which only result and times may be
        read. Raises the first error, or `RequestError` if the queue had no room, or the deadline,
        on the clock of the event loop [s], passes first.
        """
        flights = [self._open.setdefault(one.key, one) if one.key else one for one in asked]
        started = [one for one, flight in zip(asked, flights, strict=True) if flight is one]
        for flight in flights:
            flight.waiters += 1
        if asked and asked[0].key:
            self._metrics.looked_up("in_flight", len(flights) - len(started), len(started))
        try:
            if lookup and started:
                spawn(self._look_up(lookup, started), self._lookups)
            else:
                self._submit(started, urgent=urgent)
            waited = {*(flight.result for flight in flights), *others}
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            done, pending = await asyncio.wait(
                waited, timeout=left, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for flight in flights:
                flight.waiters -= 1
                if not flight.waiters and not flight.result.done():
                    flight.abandoned = True
                    flight.result.cancel()
                    self._close(flight)
        for error in (future.exception() for future in done):
            if error:
                raise error
        if pending:
            late = "the deadline passed before the answer was ready"
            raise RequestError("deadline_exceeded", late)
        return flights

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
            results = await lookup([flight.key for flight in flights])
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
        if flight.key:
            self._keep(flight.key, result)

    def _close(self, flight: Flight) -> None:
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]
        self._queries -= bool(flight.admitted)
        self._tokens -= flight.admitted
        flight.admitted = 0

    def _encoded(self, flights: Sequence[Flight], vectors: FloatArray | Exception) -> None:
        """Called in an encoding thread, which goes on with the next batch."""
        if isinstance(vectors, Exception):
            self._deliver([(flight, vectors) for flight in flights])
        elif not self._parts:
            self._finish(flights, vectors)
        else:
            for part in range(min(self._parts, len(flights))):
                mine = slice(part, None, self._parts)
                self._search.submit(self._finish, flights[mine], vectors[mine])

    def _finish(self, flights: Sequence[Flight], vectors: FloatArray) -> None:
        finished: list[tuple[Flight, Any]] = []
        due = time.perf_counter() + _DELIVER_EVERY
        for flight, vector in zip(flights, vectors, strict=True):
            if flight.abandoned:
                continue
            try:
                finished.append((flight, flight.finish(vector)))
            except Exception as error:  # whatever it is, its waiters must hear of it
                finished.append((flight, error))
            if time.perf_counter() >= due:
                self._deliver(finished)
                finished, due = [], time.perf_counter() + _DELIVER_EVERY
        if finished:
            self._deliver(finished)

    def _deliver(self, finished: Sequence[tuple[Flight, Any]]) -> None:
        def resolve() -> None:
            for flight, result in finished:
                self._resolve(flight, result)

        finished[0][0].result.get_loop().call_soon_threadsafe(resolve)


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Runs a coroutine beside the others, held by a set until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
