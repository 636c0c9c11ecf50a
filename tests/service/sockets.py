"""Requests as bytes on sockets, in the event loop of the service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from service.http.connections import ConnectionLimits, Connections
from service.observe.metrics import Metrics
from service.server import http_protocol


class Client:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of the next answer; `head` if it has no content."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:-2])
        size = 0 if head else int(fields.get("content-length", 0))
        return int(lines[0].split()[1]), fields, await self.reader.readexactly(size)

    async def status(self) -> int:
        return (await self.answer())[0]

    async def request(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        await self.send(data)
        return await self.answer()

    async def closed(self) -> bool:
        """Whether the server closes the connection after at most what is in the buffers."""
        try:
            while await self.reader.read(65_536):
                pass
        except ConnectionError:
            pass
        return True


class Server:
    """The protocol over an application."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], **changes: Any) -> None:
        limits: dict[str, Any] = {
            **{"connections": 64, "header_bytes": 16_384, "unsent_bytes": 1 << 30},
            **{"client_timeout": 10.0, "keep_alive": 75.0},
        }
        self.app: Any = app
        self.metrics = Metrics()
        limit = ConnectionLimits(**limits | changes)
        self.connections = Connections(limit, self.metrics.ended_connections)
        self.state = ServerState()
        self._make = http_protocol(self.connections, self.metrics, origins)
        self._clients: list[Client] = []
        self._server: asyncio.Server

    async def start(self) -> None:
        config = uvicorn.Config(self.app, ws="none", lifespan="off", proxy_headers=False)
        config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._make(config, self.state, {}, loop), "127.0.0.1", 0
        )

    async def connect(self) -> Client:
        address = self._server.sockets[0].getsockname()
        client = Client(*await asyncio.open_connection(*address, limit=2**16))
        self._clients.append(client)
        return client

    async def stop(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()
        self._server.close()
        self.connections.end_all()
        while self.state.tasks:
            await asyncio.wait(self.state.tasks)

    def after(self, seconds: float) -> None:
        """Ends what is overdue after a time, which need not pass."""
        self.connections.sweep(asyncio.get_running_loop().time() + seconds)

    def ended(self, reason: str) -> float:
        return float(self.metrics.ended_connections.labels(reason)._value.get())


@asynccontextmanager
async def serving(
    app: ASGIApp, origins: Sequence[str] = (), **changes: Any
) -> AsyncIterator[Server]:
    server = Server(app, origins, **changes)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
