"""The pipeline from texts to results: admission, batches, encoding threads, search threads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from core.breaker import UnavailableError
from core.encoders import QueryEncoder
from core.types import FloatArray
from search.task import SearchTask, search_together
from service.errors import RequestError
from service.limits import Client, Limits, Shares, Usages
from service.observe.metrics import Metrics
from service.pipeline.batcher import Batcher, Job
from service.pipeline.cache import VectorCache
from service.pipeline.fairness import FairExecutor
from service.settings import Settings
from stores.faiss.search import limit_threads

if TYPE_CHECKING:
    from service.pipeline.rerank_server import RerankServer

_T = TypeVar("_T")

# Results that become ready within this time wake up the event loop once [s].
_DELIVER_EVERY = 0.001
# The share of the queue's tokens that one part of a long list of texts may take.
_PART_OF_QUEUE = 4

# Largest batch of the encoder for a full queue, and most padding that one more text may add
# [tokens]: the time of a batch is that of calls and of waiting for the interpreter after them.
_OVERFLOW_BATCH, _OVERFLOW_PADDING = 4096, 64
# With such an encoder, threads of the main one leave the processors to it and to the event loop:
# requests that the event loop does not read in time wait in sockets, where nothing limits them.
_LOWEST_PRIORITY = 19
# The share of the queue that is used while the encoder for a full queue has work.
_SHORT_QUEUE = 4

QUEUE_FULL = "the queue is full: retry later"
DEADLINE_EXCEEDED = "the deadline of the request passed before the response was ready"

# Looks up results by the keys of flights; None for keys without a result.
Lookup = Callable[[Sequence[bytes]], Awaitable[Sequence[Any]]]


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """A text to encode, the search for it, and the future of the result; shared by equal requests.

    Only the pipeline changes a flight once it is submitted.
    """

    task: SearchTask | None = None  # the search; None if the result is the vector of the text
    key: bytes = b""  # flights with equal keys are shared, unless the key is empty
    # The result, or the exception that took its place.
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    overflow: bool = False  # whether another encoder has taken it; the result is then not cached
    waiters: int = 0  # number of requests that wait for the result
    admitted: int = 0  # tokens of the queue that it takes

    @property
    def needs_vector(self) -> bool:
        return self.task is None or self.task.needs_vector

    def abandon(self) -> None:
        """Ends the work for a result that no request waits for."""
        self.abandoned = True
        self.result.cancel()
        if self.task:
            self.task.abandoned = True
            if self.task.lexical:
                self.task.lexical.cancel()

    def outcome(self, vector: Any) -> Any:
        """Returns the result, or the exception that took the place of the vector.

        `vector` is that of the text, the exception that encoding raised, or None. With a server
        that ranks hits again, the result of its task is not complete yet.
        """
        task = self.task
        if task is None or (isinstance(vector, Exception) and task.query.mode != "hybrid"):
            return vector
        if task.by_server:
            return task.channels()
        return task.search()


class Pipeline:
    """Owns each flight from `complete` to its result.

    All methods but `stop` must be called on the event loop. The encoder `overflow` takes what the
    queue has no room for; `keep` is called with the key and the result of each flight that has a
    key.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        overflow: QueryEncoder | None,
        settings: Settings,
        limits: Limits,
        metrics: Metrics,
        keep: Callable[[bytes, Any], None],
        reranker: "RerankServer | None" = None,
        usages: Usages | None = None,
    ) -> None:
        usages = usages or Usages()
        self._limit = limits.queue_tokens
        self._longest = encoder.spec.max_length
        self._prompt = len(encoder.spec.prompt)
        self._parts = settings.search_workers
        self._metrics = metrics
        self._keep = keep
        self._reranker = reranker
        self._vectors = VectorCache(limits.cache_entries)
        self._open: dict[bytes, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queries = 0
        self._tokens = Shares(self._limit, usages.queue_tokens)
        self._overflow_tokens = usages.overflow_tokens
        self._freed = asyncio.Event()
        metrics.follow(metrics.queue_queries, lambda: self._queries)
        metrics.follow(metrics.queue_tokens, lambda: self._tokens.taken)
        metrics.queue_limit.set(self._limit)
        threads = max(settings.threads, self._parts)
        self._search = ThreadPoolExecutor(threads, "search", limit_threads)
        self._in_turn = FairExecutor(self._search)
        self._batcher = Batcher(
            encoder,
            settings.encode_workers,
            settings.batch_tokens,
            settings.batch_padding,
            self._encoded,
            metrics,
            niceness=_LOWEST_PRIORITY if overflow else 0,
        )
        self._overflow: Batcher | None = None
        if overflow:
            size = _OVERFLOW_BATCH, _OVERFLOW_PADDING
            self._overflow = Batcher(overflow, 1, *size, self._encoded, metrics)

    async def complete(
        self,
        requested: Sequence[Flight],
        deadline: float,
        lookup: Lookup | None = None,
        others: Sequence["asyncio.Future[Any]"] = (),
        *,
        urgent: bool = False,
    ) -> list[Flight]:
        """Joins flights that are already open, starts the others, and waits for all results.

        Started flights are open to equal ones at once. They are looked up in a shared cache, if a
        `lookup` is given, and those without a result are admitted, all or none. A flight ends when
        the last request that waits for it gives up. `others` are further futures to wait for; they
        are not cancelled. An `urgent` request skips admission and the queue.

        Returns for each requested flight the one that has its result; read only its result and
        times. Raises the first exception of a flight, and RequestError if the queue is full or the
        deadline, a time of the event loop [s], passes.
        """
        flights = [self._open.setdefault(one.key, one) if one.key else one for one in requested]
        started = [one for one, flight in zip(requested, flights, strict=True) if flight is one]
        for flight in flights:
            flight.waiters += 1
        if requested and requested[0].key:
            self._metrics.looked_up("in_flight", len(flights) - len(started), len(started))
        try:
            if lookup and started:
                spawn(self._look_up(lookup, started), self._tasks)
            else:
                self._submit(started, urgent=urgent)
            waited = {*(flight.result for flight in flights), *others}
            done = await _first_failed_or_all(waited, deadline)
        finally:
            for flight in flights:
                flight.waiters -= 1
                if not flight.waiters and not flight.result.done():
                    flight.abandon()
                    self._close(flight)
        for error in (future.exception() for future in done):
            if error:
                raise error
        if len(done) < len(waited):
            raise RequestError("deadline_exceeded", DEADLINE_EXCEEDED)
        return flights

    def has_room(self, text: str, key: bytes, client: Client) -> bool:
        """Returns whether `complete` admits one text, or has a flight with its key."""
        tokens = self._cost(text)
        if self._overflow or key in self._open or not self._is_full(tokens, self._limit):
            return True
        return self._tokens.allow(client, tokens)

    def split(self, texts: Sequence[str], most: int) -> list[list[str]]:
        """Splits texts into parts of at most `most` texts and a quarter of the queue's tokens.

        A longer text is a part by itself.
        """
        parts: list[list[str]] = []
        room = 0
        for text in texts:
            tokens = self._cost(text)
            if not parts or len(parts[-1]) == most or tokens > room:
                parts.append([])
                room = self._limit // _PART_OF_QUEUE
            parts[-1].append(text)
            room -= tokens
        return parts

    async def wait_for_room(self, texts: Sequence[str]) -> None:
        """Waits until the queue has room for texts; the caller must submit them at once."""
        tokens = sum(map(self._cost, texts))
        while self._is_full(tokens, self._limit):
            self._freed.clear()
            await self._freed.wait()

    def run(self, work: Callable[..., _T], *arguments: Any) -> "asyncio.Future[_T]":
        """Runs a function in a search thread."""
        return asyncio.get_running_loop().run_in_executor(self._search, work, *arguments)

    async def close(self) -> None:
        """Waits for flights in the queue and stops the threads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Does so for callers outside the event loop."""
        self._batcher.close()
        if self._overflow:
            self._overflow.close()
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
        missing = [flight for flight in flights if not flight.result.done()]
        try:
            self._submit(missing)
        except RequestError as error:
            for flight in missing:
                self._resolve(flight, error)

    def _submit(self, flights: Sequence[Flight], *, urgent: bool = False) -> None:
        """Admits all flights or raises RequestError; an empty queue admits any number of tokens."""
        if not flights:
            return
        tokens = [self._cost(flight.text) for flight in flights]
        if not urgent and self._overflow and self._overflows(flights, sum(tokens)):
            for flight, admitted in zip(flights, tokens, strict=True):
                flight.overflow, flight.admitted = True, admitted
                flight.with_tokens = False  # those of this encoder are of another space
            self._overflow_tokens.add(sum(tokens))
            self._metrics.overflow.inc(len(flights))
            self._start(flights, self._overflow)
            return
        full = not urgent and self._is_full(sum(tokens), self._limit)
        if full and not self._tokens.allow(flights[0].client, sum(tokens)):
            raise RequestError("overloaded", QUEUE_FULL)
        for flight, admitted in zip(flights, tokens, strict=True):
            flight.admitted = admitted
            self._tokens.take(flight.client, admitted)
        self._queries += len(flights)
        self._metrics.admitted_tokens.inc(sum(tokens))
        self._start(flights, self._batcher, first=urgent)

    def _start(self, flights: Sequence[Flight], batcher: Batcher, *, first: bool = False) -> None:
        """Starts the full-text search of each flight, and queues it for encoding.

        One whose vector is known is searched at once, unless it is to test the encoder.
        """
        unknown = []
        for flight in flights:
            task = flight.task
            if task and task.query.mode == "hybrid":
                task.lexical = self._in_turn.submit(flight.client, task.search_lexical)
            vector = None
            if flight.needs_vector and not first:
                vector = self._known_vector(flight)
            if flight.needs_vector and vector is None:
                unknown.append(flight)
            else:
                self._in_turn.submit(flight.client, partial(self._finish, [flight], [vector]))
        batcher.submit(unknown, first=first)

    def _known_vector(self, flight: Flight) -> FloatArray | None:
        """Returns the vector of a flight's query, if nothing else of its encoding is wanted."""
        if not flight.key or flight.overflow or flight.with_tokens:
            return None
        vector = self._vectors.get(flight.text)
        self._metrics.looked_up("vectors", vector is not None, vector is None)
        return vector

    def _cost(self, text: str) -> int:
        """Returns the most tokens that a text can have.

        A token is at least one character; two more tokens begin and end the text.
        """
        return min(self._prompt + len(text) + 2, self._longest)

    def _is_full(self, tokens: int, limit: int) -> bool:
        """Returns whether the queue has no room for tokens; an empty queue has room for any."""
        usage = self._tokens.usage
        return bool(usage.own) and not usage.allows(tokens, limit)

    def _overflows(self, flights: Sequence[Flight], tokens: int) -> bool:
        """Returns whether the other encoder takes flights: its queue has room, the other none."""
        waiting = self._overflow_tokens.own
        has_room = not waiting or self._overflow_tokens.allows(tokens, self._limit)
        # While it has work, little waits for the main encoder, which is slow meanwhile.
        limit = self._limit // _SHORT_QUEUE if waiting else self._limit
        return has_room and self._is_full(tokens, limit) and all(flight.task for flight in flights)

    async def _rank_by_server(self, flight: Flight, task: SearchTask) -> None:
        """Lets the server rank what a task has found; if it fails, this stays as it is."""
        started = time.perf_counter()
        try:
            try:
                texts = await self.run(task.snapshot.texts, task.ranked.rows)
                scores = task.ranked.scores
                if texts and self._reranker:
                    scores = await self._reranker.scores(task.query.text, texts)
                task.rerank_by(scores, time.perf_counter() - started)
            except UnavailableError:
                task.leave_ranking(time.perf_counter() - started)
            self._resolve(flight, await self.run(task.read))
        except Exception as error:  # of any kind: each waiting request must get it
            self._resolve(flight, error)

    def _resolve(self, flight: Flight, result: Any) -> None:
        """Sets the result of a flight, or its exception; later calls are ignored."""
        if flight.result.done():
            return
        self._close(flight)
        if isinstance(result, Exception):
            flight.result.set_exception(result)
            # Marks the exception as retrieved: a request reads only the first one of its flights.
            flight.result.exception()
            return
        flight.result.set_result(result)
        if flight.key and not flight.overflow:
            self._keep(flight.key, result)

    def _close(self, flight: Flight) -> None:
        if self._open.get(flight.key) is flight:
            del self._open[flight.key]
        if flight.overflow:
            self._overflow_tokens.add(-flight.admitted)
        else:
            self._queries -= bool(flight.admitted)
            self._tokens.take(flight.client, -flight.admitted)
        flight.admitted = 0
        self._freed.set()

    def _encoded(self, flights: Sequence[Flight], vectors: FloatArray | Exception) -> None:
        """Passes a batch on to search threads; called in an encoding thread."""
        if isinstance(vectors, Exception):
            self._finish(flights, [vectors] * len(flights))
            return
        for flight, vector in zip(flights, vectors, strict=True):
            if flight.key and not flight.overflow:
                self._vectors.put(flight.text, vector)
        if not self._parts:
            self._finish(flights, vectors)
        else:
            for part in range(min(self._parts, len(flights))):
                mine = slice(part, None, self._parts)
                self._search.submit(self._finish, flights[mine], vectors[mine])

    def _finish(self, flights: Sequence[Flight], vectors: FloatArray | Sequence[Any]) -> None:
        finished: list[tuple[Flight, Any]] = []
        tasks = []
        for flight, vector in zip(flights, vectors, strict=True):
            if flight.task and not flight.abandoned:
                flight.task.vector, flight.task.tokens = vector, flight.token_vectors
                tasks.append(flight.task)
        search_together(tasks)
        due = time.perf_counter() + _DELIVER_EVERY
        for flight, vector in zip(flights, vectors, strict=True):
            if flight.abandoned:
                continue
            try:
                finished.append((flight, flight.outcome(vector)))
            except Exception as error:  # of any kind: each waiting request must get it
                finished.append((flight, error))
            if time.perf_counter() >= due:
                self._deliver(finished)
                finished, due = [], time.perf_counter() + _DELIVER_EVERY
        if finished:
            self._deliver(finished)

    def _deliver(self, finished: Sequence[tuple[Flight, Any]]) -> None:
        def resolve() -> None:
            for flight, result in finished:
                task = flight.task
                if task and task.by_server and not isinstance(result, Exception):
                    spawn(self._rank_by_server(flight, task), self._tasks)
                else:
                    self._resolve(flight, result)

        finished[0][0].result.get_loop().call_soon_threadsafe(resolve)


async def _first_failed_or_all(
    futures: Collection["asyncio.Future[Any]"], deadline: float
) -> list["asyncio.Future[Any]"]:
    """Waits until all futures are done, one has failed, or the deadline passes.

    It does less for each request than `asyncio.wait`. Returns the futures that are done.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    left = len(futures)

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def count(future: "asyncio.Future[Any]") -> None:
        nonlocal left
        left -= 1
        if not left or future.cancelled() or future.exception():
            end()

    timer = loop.call_at(deadline, end)
    for future in futures:
        future.add_done_callback(count)
    try:
        if futures:
            await ended
    finally:
        timer.cancel()
        for future in futures:
            future.remove_done_callback(count)
    return [future for future in futures if future.done()]


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Starts a task; the set keeps a reference to it until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
