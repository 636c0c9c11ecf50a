"""Writes of one worker: sent to the writer process, and served before they are acknowledged."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import Any, TypeVar

from core.errors import IndexVersionError, QueryError
from core.writes import Write, Written, frame, read_frame
from service.errors import RequestError, is_request_error, unknown_index
from service.observe.metrics import CHANGES, Metrics

# Errors of what is written, by the names of their classes, and of encoders. Messages of the latter
# can name servers, and are in the log of the writer.
_OF_DATA = {"CorpusError", "DataError", "QueryError"}
_OF_ENCODERS = {
    *("EmbeddingServerError", "PairError", "ProviderError", "UnavailableError", "VectorError")
}
# How long writes may take when the service ends [s].
_END = 5.0

# Lets all workers serve the version of an index that has a number, or a later one; without a number
# the active one, or none of an index that was deleted.
Follow = Callable[[str, int | None], Awaitable[None]]

_T = TypeVar("_T")


@asynccontextmanager
async def before_deadline(deadline: float) -> AsyncIterator[None]:
    """Raises `RequestError` if the block does not end before a time of the event loop [s].

    Whether its client disconnects or not: the write goes on, and is served then.
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        message = "the deadline passed before the changes were served; they can still be made"
        raise RequestError("deadline_exceeded", message) from error


class Writes:
    """Sends writes to the socket of the writer process, then lets all workers `follow` them.

    All methods must be called on the event loop.
    """

    def __init__(self, path: str, follow: Follow, metrics: Metrics) -> None:
        self._path = path
        self._follow = follow
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Any]] = set()

    async def write(self, write: Write) -> Written:
        """Returns what a write has changed, once all workers serve it.

        It goes on if the caller is cancelled. Raises `RequestError`, `QueryError` or
        `IndexVersionError` if it fails.
        """
        return await asyncio.shield(self._kept(self._run(write)))

    async def accept(self, write: Write) -> str:
        """Returns the id of a write that the writer process has accepted; errors as of `write`."""
        accepted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = self._kept(self._run(write, accepted))
        task.add_done_callback(lambda _: accepted.cancel())
        try:
            return await accepted
        except asyncio.CancelledError:
            if task.done():
                await task  # which has failed
            raise

    async def result(self, index: str, id_: str) -> Written | None:
        """Returns what an accepted write has changed and all workers serve; None if it waits.

        RequestError if the writer process does not know it; the write's own errors too.
        """
        async with self._sent({"state": id_, "index": index}) as answers:
            answer = await answers()
        if "waiting" in answer:
            return None
        written = _written(answer)
        await self._follow(index, written.number)
        return written

    async def create(self, index: str, like: str, fields: Sequence[str]) -> bool:
        """Creates an index like another one, which all workers serve then; errors as of `write`.

        Returns whether it was created: else there is an equal one.
        """
        asked = {"create": {"name": index, "like": like, "fields": list(fields)}}
        return bool((await self._change(index, asked))["created"])

    async def delete(self, index: str) -> int | None:
        """Deletes an index, which no worker serves then; errors as of `write`.

        Returns the number of its documents; None if it could not be read.
        """
        documents: int | None = (await self._change(index, {"delete": index}))["documents"]
        return documents

    async def close(self) -> None:
        """Waits until the writes that were sent are done, at most `_END`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END)

    async def _change(self, index: str, message: Any) -> dict[str, Any]:
        """Lets the writer process create or delete an index, and all workers follow."""

        async def run() -> dict[str, Any]:
            with self._counted():
                async with self._sent(message) as answers:
                    done: dict[str, Any] = _result(await answers(), "done")
                await self._follow(index, done.get("number"))
            return done

        return await asyncio.shield(self._kept(run()))

    def _kept(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Starts work that goes on if nobody waits for it any more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _run(self, write: Write, accepted: "asyncio.Future[str] | None" = None) -> Written:
        message = {"write": write.as_json(), "accepted": accepted is not None}
        with self._counted():
            async with self._sent(message) as answers:
                answer = await answers()
                if accepted and "accepted" in answer:
                    if not accepted.done():  # else nobody waits for it any more
                        accepted.set_result(answer["accepted"])
                    answer = await answers()
            written = _written(answer)
            await self._follow(write.index, written.number)
        for change, documents in changes(written).items():
            if documents:
                self._metrics.written_documents.labels(change).inc(documents)
        return written

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts the block as a write in the metrics."""
        started = perf_counter()
        try:
            yield
        except BaseException:
            self._metrics.writes.labels("failure").inc()
            raise
        self._metrics.writes.labels("success").inc()
        self._metrics.write_seconds.observe(perf_counter() - started)

    @asynccontextmanager
    async def _sent(self, message: Any) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
        """Sends a message; yields what returns the next answer to it."""
        try:
            content = await asyncio.to_thread(frame, message)
        except ValueError as error:  # Python's limit on the digits of a whole number
            reason = "the request body has a number with too many digits"
            raise RequestError("invalid_json", reason) from error
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise _unavailable("cannot be reached: retry later") from error
        try:
            writer.write(content)
            yield lambda: _next(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _unavailable("ended before it answered: send the request again") from error
        finally:
            writer.close()


async def _next(reader: asyncio.StreamReader) -> Any:
    return (await read_frame(reader))[0]


def changes(written: Written) -> dict[str, int]:
    """Returns the numbers of documents of a write by what was done to them."""
    counts = {name: getattr(written, name) for name in CHANGES}
    return {name: n if isinstance(n, int) else len(n) for name, n in counts.items()}


def _written(answer: Mapping[str, Any]) -> Written:
    return Written.from_json(_result(answer, "written"))


def _result(answer: Mapping[str, Any], name: str) -> Any:
    """Returns the result that an answer of the writer has; raises the error that it has instead."""
    if name in answer:
        return answer[name]
    error: dict[str, Any] = answer["error"]
    code, message, fields, kind = (error[n] for n in ("code", "message", "fields", "kind"))
    if code == "no_active_version":  # the index was deleted meanwhile
        raise unknown_index()
    if is_request_error(code):
        raise RequestError(code, message, **fields)
    if kind in _OF_DATA:
        field = fields.pop("field", "body")
        raise QueryError(field, message, code=code, **fields)
    if kind in _OF_ENCODERS:
        message = (
            "the documents cannot be encoded now; the log of the service says why: retry later"
        )
        raise RequestError("encoding_failed", message)
    raise IndexVersionError(message, code=code, **fields)


def _unavailable(reason: str) -> RequestError:
    return RequestError("writer_unavailable", f"the process that writes documents {reason}")
