"""`python -m care.writer`: the process that changes the indexes of a service.

The service starts it with a listening socket (`service/writer_process.py`); `core/writes.py` has
the protocol.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from care.live import LiveIndexes
from core.errors import (
    CareError,
    CorpusError,
    DataError,
    IndexVersionError,
    QueryError,
    describe,
)
from core.writes import Write, Written, error_json, frame, read_frame
from indexer.live.index import LiveIndex
from service.observe.logs import configure_logs
from service.settings import read_settings

_LOG = logging.getLogger("care.service")
# Searches of the service come first.
_NICENESS = 5
# Indexes that commit at once; within one, commits follow each other.
_THREADS = 4
# Requests that wait for an index, and bytes of one commit, so that single documents do not wait
# for all that was sent before them.
_MOST_WAITING, _COMMIT_BYTES = 1024, 16 << 20
# What builds the base of an index anew, whose name follows.
_REBUILD = (sys.executable, "-m", "care.live")
# The pause after the base of an index could not be built anew [s].
_REBUILD_PAUSE = 600.0
# Indexes that are kept open for their next write.
_MOST_OPEN = 64
# Results of accepted writes, and how long each is kept [s].
_MOST_RESULTS, _KEPT = 10_000, 3600.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Write | Callable[[], dict[str, Any]]
    size: int
    result: "asyncio.Future[Any]"


class _Queue:
    """The writes of one index: while one commit runs, arrivals wait and form the next.

    `open_index` opens the index before its first commit, and again after an unexpected error;
    `rebuild` builds its base anew.
    """

    def __init__(
        self,
        open_index: Callable[[], LiveIndex],
        rebuild: Callable[[], None],
        most_bytes: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._open = open_index
        self._rebuild = rebuild
        self._live: LiveIndex | None = None
        self._most_bytes = most_bytes
        self._threads = threads
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._seconds = 1.0  # of the last commit
        self.committing: asyncio.Task[None] | None = None

    def add(self, work: Write | Callable[[], dict[str, Any]], size: int) -> "asyncio.Future[Any]":
        """Returns the future result of a write of a number of bytes; CareError if it is full.

        Instead of a write it can be a function, which is called alone, after the writes before it.
        """
        if len(self._waiting) >= _MOST_WAITING or (
            self._waiting and self._bytes + size > self._most_bytes
        ):
            message = "too many writes wait for the index: retry later"
            raise CareError(message, code="overloaded", retry_after=self._seconds)
        loop = asyncio.get_running_loop()
        one = _Waiting(work, size, loop.create_future())
        self._waiting.append(one)
        self._bytes += size
        if self.committing is None:
            self.committing = loop.create_task(self._commit_all())
        return one.result

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                first = self._next()
                if not isinstance(first.work, Write):
                    result = await loop.run_in_executor(self._threads, self._call, first.work)
                    _finish(first.result, result)
                    continue
                group, writes, size = [first], [first.work], first.size
                while self._waiting and isinstance(write := self._waiting[0].work, Write):
                    if (size := size + self._waiting[0].size) > _COMMIT_BYTES:
                        break
                    group.append(self._next())
                    writes.append(write)
                started = time.monotonic()
                results = await loop.run_in_executor(self._threads, self._commit, writes)
                self._seconds = time.monotonic() - started
                for one, written in zip(group, results, strict=True):
                    _finish(one.result, written)
                if not self._waiting and await loop.run_in_executor(self._threads, self._merge):
                    self._rebuild()
        finally:
            self.committing = None

    def _next(self) -> _Waiting:
        one = self._waiting.popleft()
        self._bytes -= one.size
        return one

    def _commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        try:
            self._live = self._live or self._open()
            results = self._live.commit(writes)
            # Of the caller's faults and those of documents the answer says what is wrong.
            failures = {str(e): e for e in results if isinstance(e, CareError) and not _is_data(e)}
            for failure in failures.values():
                fields = _fields(failure) | {"index": writes[0].index}
                _LOG.error("documents cannot be written", extra={"fields": fields})
            return results
        except Exception as error:
            self._live = None
            return [_shown(error, "documents cannot be written", index=writes[0].index)] * len(
                writes
            )

    def _call(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any] | CareError:
        self._live = None
        try:
            return function()
        except (IndexVersionError, CorpusError) as error:
            return error
        except Exception as error:
            return _shown(error, "an index cannot be created or deleted")

    def _merge(self) -> bool:
        """Joins small segments; returns whether the base is to be built anew."""
        try:
            if self._live:
                self._live.merge()
                return self._live.is_large
        except Exception as error:
            # While a build of the index runs, it is locked: a later commit joins them.
            if not (isinstance(error, CareError) and error.code == "locked"):
                self._live = None
                _LOG.error("segments cannot be merged", extra={"fields": _fields(error)})
        return False


def _shown(error: Exception, message: str, **fields: str) -> CareError:
    """Logs an error, and returns the one that the service gets."""
    _LOG.error(message, extra={"fields": _fields(error) | fields})
    if isinstance(error, CareError):
        return error
    return CareError(f"an unexpected error: {type(error).__name__}", code="internal_error")


def _is_data(error: CareError) -> bool:
    return isinstance(error, CorpusError | DataError | QueryError)


def _fields(error: Exception) -> dict[str, str]:
    if isinstance(error, CareError):
        return {"code": error.code, "reason": str(error)}
    return describe(error)


def _finish(future: "asyncio.Future[Any]", result: Any) -> None:
    if not isinstance(result, CareError):
        future.set_result(result)
    else:
        future.set_exception(result)
        future.exception()  # the service may not wait for it any more


class Writer:
    """Commits writes that arrive on a socket.

    Args:
        indexes: Opens, creates and deletes the index of a name.
        most_bytes: Most bytes of writes that wait for one index.
    """

    def __init__(self, indexes: LiveIndexes, most_bytes: int) -> None:
        self._indexes = indexes
        self._most_bytes = most_bytes
        self._threads = ThreadPoolExecutor(_THREADS, "commit")
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        # By id: until when it is kept, the index, and the result.
        self._results: OrderedDict[str, tuple[float, str, asyncio.Future[Written]]] = OrderedDict()
        self._rebuilding: asyncio.Task[None] | None = None
        self._rebuild_from = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the one message of a connection."""
        with suppress(OSError, asyncio.IncompleteReadError):  # the service does not wait any more
            try:
                message, size = await read_frame(reader)
                if "state" in message:
                    answer = await self._state(message["state"], message["index"])
                elif "create" in message:
                    asked = message["create"]
                    create = partial(self._indexes.create, **asked)
                    answer = {"done": await self._queue(asked["name"]).add(create, 0)}
                elif "delete" in message:
                    delete = partial(self._indexes.delete, message["delete"])
                    answer = {"done": await self._queue(message["delete"]).add(delete, 0)}
                else:
                    result = self._queue(message["write"]["index"]).add(
                        Write.from_json(message["write"]), size
                    )
                    if message["accepted"]:
                        id_ = self._keep(message["write"]["index"], result)
                        writer.write(frame({"accepted": id_}))
                    answer = {"written": (await result).as_json()}
            except CareError as error:
                answer = {"error": error_json(error)}
            writer.write(frame(answer))
            await writer.drain()
        writer.close()

    async def close(self) -> None:
        """Waits until all commits are done; abandons what builds a base anew."""
        tasks = [queue.committing for queue in self._queues.values() if queue.committing]
        if tasks:
            await asyncio.wait(tasks)
        if self._rebuilding:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])

    def _queue(self, index: str) -> _Queue:
        if index not in self._queues:
            open_index = partial(self._indexes.open, index)
            rebuild = partial(self._rebuild, index)
            self._queues[index] = _Queue(open_index, rebuild, self._most_bytes, self._threads)
        self._queues.move_to_end(index)
        idle = [name for name, queue in self._queues.items() if not queue.committing]
        for name in idle[: max(0, len(self._queues) - _MOST_OPEN)]:
            if name != index:
                del self._queues[name]
        return self._queues[index]

    def _rebuild(self, index: str) -> None:
        """Builds the base of an index anew, unless another is being built or has just failed."""
        free = self._rebuilding is None or self._rebuilding.done()
        if free and time.monotonic() >= self._rebuild_from:
            self._rebuilding = asyncio.get_running_loop().create_task(self._run_rebuild(index))

    async def _run_rebuild(self, index: str) -> None:
        """Does so in another process, whose memory and priority are its own."""
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *_REBUILD, index, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        fields = {"index": index, "seconds": round(time.monotonic() - started, 1)}
        if status == 0:
            _LOG.info("the base of an index was built anew", extra={"fields": fields})
        else:  # its last line on standard error says why
            self._rebuild_from = time.monotonic() + _REBUILD_PAUSE
            extra = {"fields": fields | {"code": "rebuild_failed", "status": status}}
            _LOG.error("the base of an index cannot be built anew", extra=extra)

    def _keep(self, index: str, result: "asyncio.Future[Written]") -> str:
        """Keeps the result of a write, and returns its id."""
        now, id_ = time.monotonic(), uuid.uuid4().hex
        while self._results:
            until, _, _ = next(iter(self._results.values()))
            if until > now and len(self._results) < _MOST_RESULTS:
                break
            self._results.popitem(last=False)
        self._results[id_] = now + _KEPT, index, result
        return id_

    async def _state(self, id_: str, index: str) -> dict[str, Any]:
        until, of, result = self._results.get(id_, (0.0, "", None))
        if result is None or of != index or until < time.monotonic():
            message = "no write of this index has this id, or it is older than an hour"
            raise CareError(message, code="unknown_write")
        return {"written": (await result).as_json()} if result.done() else {"waiting": True}


async def serve_until_input_ends(listening: socket.socket, writer: Writer) -> None:
    """Serves a listening socket until standard input ends, then ends the commits."""
    loop = asyncio.get_running_loop()
    server = await asyncio.start_unix_server(writer.serve, sock=listening, limit=1 << 20)
    ends = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ends.set)
    await ends.wait()
    server.close()
    await writer.close()


def main() -> None:
    """Runs the writer process; its argument is the descriptor of a listening socket."""
    # It ends with the service, which gets these signals too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    settings = read_settings()
    configure_logs(settings.log_level)
    listening = socket.socket(fileno=int(sys.argv[1]))
    writer = Writer(LiveIndexes(settings), settings.write_queue_bytes)
    asyncio.run(serve_until_input_ends(listening, writer))
    os._exit(0)


if __name__ == "__main__":
    main()
