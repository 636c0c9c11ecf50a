"""Runs `care serve` with an event loop that measures its callbacks.

The loop is uvloop's, with wrapped callbacks. A callback that takes at least a millisecond of the
loop thread's processor time, and a beat of a timer that is at least 10 ms late, become lines of
JSON at the end of a file. Callbacks of libuv itself, which accept connections and write buffers,
are not measured; `Summary.measured` tells how much that leaves out.
"""

import argparse
import asyncio
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVarTuple

import uvloop

_Ts = TypeVarTuple("_Ts")
_WRITTEN_FROM_MS = 1.0
_LATE_FROM_MS = 10.0
_BEAT_SECONDS = 0.02
# Methods of a protocol that the loop calls directly, not by `call_soon`.
_PROTOCOL = ("connection_made", "data_received", "eof_received", "resume_writing")


@dataclass(frozen=True, slots=True)
class Summary:
    """What the event loop did while requests were served.

    Attributes:
        callback_ms: Processor time of the longest callback [ms]; 0 below 1 ms.
        callback: The function or coroutine that it called.
        lag_ms: Largest delay of a timer [ms], which includes the wait for a processor and for
            Python's global lock; 0 below 10 ms.
        measured: Processor time of all callbacks, as a share of the thread's.
    """

    callback_ms: float
    callback: str
    lag_ms: float
    measured: float


class ProbeLog:
    """Reads the log of a probed service, each time from where the last call ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def summary(self) -> Summary:
        """Summarises the lines that were written since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            written = log.read()
        complete = written[: written.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = [json.loads(line) for line in complete.splitlines()]
        longest = max(
            (line for line in lines if "ms" in line), key=lambda line: line["ms"], default=None
        )
        seconds = [line for line in lines if "thread_ms" in line]
        thread = sum(line["thread_ms"] for line in seconds)
        return Summary(
            callback_ms=longest["ms"] if longest else 0.0,
            callback=longest["callback"] if longest else "",
            lag_ms=max((line["lag_ms"] for line in lines if "lag_ms" in line), default=0.0),
            measured=sum(line["callbacks_ms"] for line in seconds) / thread if thread else 1.0,
        )


class ProbedLoop(uvloop.Loop):
    """A loop of uvloop that writes its long callbacks and its delays to a file.

    Args:
        log: Descriptor of the file, opened for appending.
    """

    def __init__(self, log: int) -> None:
        super().__init__()
        self._log = log
        self._inside = False
        self._measured_ns = 0

    def run_forever(self) -> None:
        """Runs the loop and its timer."""
        self._beat(self.time(), self.time() + 1, time.thread_time_ns())
        super().run_forever()

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules a measured callback."""
        return super().call_soon(self._run, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedules a measured callback from another thread."""
        return super().call_soon_threadsafe(self._run, callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a measured callback after a delay [s]."""
        return super().call_later(delay, self._run, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedules a measured callback at a time of the loop's clock [s]."""
        return super().call_at(when, self._run, callback, *args, context=context)

    async def create_server(
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *args: Any, **options: Any
    ) -> Any:
        """Creates a server whose protocols are measured."""

        def probed() -> asyncio.BaseProtocol:
            protocol = protocol_factory()
            for name in _PROTOCOL:
                method = getattr(protocol, name)
                setattr(protocol, name, lambda *a, method=method: self._run(method, *a))
            return protocol

        return await super().create_server(probed, *args, **options)

    def _run(self, callback: Callable[[*_Ts], object], *args: *_Ts) -> object:
        if self._inside:
            return callback(*args)
        self._inside = True
        started = time.thread_time_ns()
        try:
            return callback(*args)
        finally:
            spent = time.thread_time_ns() - started
            self._inside = False
            self._measured_ns += spent
            if (ms := spent / 1e6) >= _WRITTEN_FROM_MS:
                self._write(ms=round(ms, 2), callback=_describe(callback))

    def _beat(self, due: float, second: float, thread_ns: int) -> None:
        now = self.time()
        if (lag := 1000 * (now - due)) >= _LATE_FROM_MS:
            self._write(lag_ms=round(lag, 2))
        if now >= second:
            used = time.thread_time_ns()
            self._write(thread_ms=(used - thread_ns) / 1e6, callbacks_ms=self._measured_ns / 1e6)
            second, thread_ns, self._measured_ns = now + 1, used, 0
        due = now + _BEAT_SECONDS
        super().call_at(due, self._beat, due, second, thread_ns)

    def _write(self, **line: Any) -> None:
        os.write(self._log, (json.dumps(line) + "\n").encode())


def _describe(callback: Callable[..., object]) -> str:
    """Returns the name of a function, or of the coroutine that a step of a task resumes."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "__qualname__", "coroutine")
    return getattr(callback, "__qualname__", type(callback).__name__)


def main() -> None:
    """Runs the service, whose settings are `CARE_*` variables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("log", type=Path, help="file that lines are appended to")
    parser.add_argument("--open-files", type=int, help="limit of open files (RLIMIT_NOFILE)")
    options = parser.parse_args()
    if options.open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.open_files, options.open_files))
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Uvicorn's loop factory reads this name.
    uvloop.new_event_loop = lambda: ProbedLoop(log)
    sys.argv = ["care", "serve"]
    runpy.run_module("care", run_name="__main__")


if __name__ == "__main__":
    main()
