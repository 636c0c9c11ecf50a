"""The writer process of a service, as the process sees it that starts it."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Self

_LOG = logging.getLogger("care.service")
# The writer process uses the packages of indexing, which the service does not import.
_COMMAND = (sys.executable, "-m", "care.writer")
# Requests that wait until the process accepts them.
_BACKLOG = 1024
# A process that ends sooner than this is started again after this time [s].
_PAUSE = 1.0
# How long it may take to end its commits when the service ends [s].
_END = 5.0


class WriterProcess:
    """Starts the writer process when a request waits for it, and again after it has ended.

    It inherits the socket, on which the workers of the service connect, so that no request is lost
    while no process runs. It ends when its standard input does, which is when this process ends,
    however that is.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="care-")  # only this user may enter it
        self.path = str(Path(self._folder.name, "writer"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._socket.listen(_BACKLOG)
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self) -> None:
        """Starts the process whenever it is needed, until cancelled."""
        while True:
            await self._wanted()
            started = time.monotonic()
            status = await self._ended(self._start())
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            fields = {"code": "writer_ended", "reason": f"it ended {how}"}
            _LOG.error("the writer process ended", extra={"fields": fields})
            if time.monotonic() < started + _PAUSE:
                await asyncio.sleep(_PAUSE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, once its commits are done, and removes the socket."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._socket.close()
        self._folder.cleanup()

    async def _wanted(self) -> None:
        """Returns when a request waits."""
        loop = asyncio.get_running_loop()
        waits: asyncio.Future[None] = loop.create_future()

        def note() -> None:
            loop.remove_reader(self._socket)
            if not waits.done():
                waits.set_result(None)

        loop.add_reader(self._socket, note)
        try:
            await waits
        finally:
            loop.remove_reader(self._socket)

    def _start(self) -> "subprocess.Popen[bytes]":
        file = self._socket.fileno()
        # A group of its own: Ctrl-C in a terminal is for the service, which ends the process.
        process = self._process = subprocess.Popen(
            [*_COMMAND, str(file)],
            stdin=subprocess.PIPE,
            pass_fds=[file],
            process_group=0,
            env=os.environ,
        )
        return process

    async def _ended(self, process: "subprocess.Popen[bytes]") -> int:
        """Returns the status of a process when it ends."""
        loop = asyncio.get_running_loop()
        status: asyncio.Future[int] = loop.create_future()

        def set_status(found: int) -> None:
            if not status.done():
                status.set_result(found)

        def wait() -> None:
            found = process.wait()
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(set_status, found)

        Thread(target=wait, name="writer", daemon=True).start()
        return await status
