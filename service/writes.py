"""Writes of one worker: sent to the writer process, and served before they are acknowledged."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from core.errors import IndexVersionError, QueryError
from core.writes import Write, Written, frame, read_frame
from service.errors import RequestError, is_request_error
from service.observe.metrics import CHANGES, Metrics

# Errors of what is written, by the names of their classes, and of encoders. Messages of the latter
# can name servers, and are in the log of the writer.
_OF_DATA = {"CorpusError", "DataError", "QueryError"}
OF_ENCODERS = {"EmbeddingServerError", "PairError", "ProviderError", "VectorError"}
# How long writes may take when the service ends [s].
_END = 5.0

# Lets all workers serve the version of an index that has a number, or a later one.
Follow = Callable[[str, int], Awaitable[None]]


class Writes:
    """Sends writes to the writer process; all methods must be called on the event loop.

    Args:
        path: The socket of the writer process.
        follow: Lets all workers serve what is written.
        metrics: What counts writes.
    """

    def __init__(self, path: str, follow: Follow, metrics: Metrics) -> None:
        self._path = path
        self._follow = follow
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Written]] = set()

    async def write(self, write: Write) -> Written:
        """Returns what a write has changed, once all workers serve it.

        It goes on if the caller is cancelled. Raises `RequestError`, `QueryError` or
        `IndexVersionError` if it fails.
        """
        return await asyncio.shield(self._spawn(write))

    async def accept(self, write: Write) -> str:
        """Returns the id of a write that the writer process has accepted; errors as of `write`."""
        accepted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = self._spawn(write, accepted)
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

    async def close(self) -> None:
        """Waits until the writes that were sent are done, at most `_END`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END)

    def _spawn(
        self, write: Write, accepted: "asyncio.Future[str] | None" = None
    ) -> "asyncio.Task[Written]":
        task = asyncio.get_running_loop().create_task(self._run(write, accepted))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[Written]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _run(self, write: Write, accepted: "asyncio.Future[str] | None") -> Written:
        started = perf_counter()
        message = {"write": write.as_json(), "accepted": accepted is not None}
        try:
            async with self._sent(message) as answers:
                answer = await answers()
                if accepted and "accepted" in answer:
                    if not accepted.done():  # else nobody waits for it any more
                        accepted.set_result(answer["accepted"])
                    answer = await answers()
            written = _written(answer)
            await self._follow(write.index, written.number)
        except BaseException:
            self._metrics.writes.labels("failure").inc()
            raise
        self._metrics.writes.labels("success").inc()
        self._metrics.write_seconds.observe(perf_counter() - started)
        for change, documents in changes(written).items():
            if documents:
                self._metrics.written_documents.labels(change).inc(documents)
        return written

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
    """Returns the result that an answer of the writer has; raises the error that it has instead."""
    if "written" in answer:
        return Written.from_json(answer["written"])
    error: dict[str, Any] = answer["error"]
    code, message, fields, kind = (error[n] for n in ("code", "message", "fields", "kind"))
    if is_request_error(code):
        raise RequestError(code, message, **fields)
    if kind in _OF_DATA:
        field = fields.pop("field", "body")
        raise QueryError(field, message, code=code, **fields)
    if kind in OF_ENCODERS:
        message = (
            "the documents cannot be encoded now; the log of the service says why: retry later"
        )
        raise RequestError("encoding_failed", message)
    raise IndexVersionError(message, code=code, **fields)


def _unavailable(reason: str) -> RequestError:
    return RequestError("writer_unavailable", f"the process that writes documents {reason}")
