"""A small HTTP/1.1 client: kept connections, one request at a time on each.

An open-loop driver shares the machine with what it measures, so its own work must be small: at
300 requests per second this took 0.2 ms of processor time for one, aiohttp 0.4, httpx2 1.2 or more.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

# Servers close connections after 5 s without a request (uvicorn's default) or later. An older one
# is not used again, because the server may be closing it just now.
_MAX_IDLE = 2.0


class _Connection(asyncio.Protocol):
    """One connection; httptools calls its `on_…` methods."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.reusable = True
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports have the methods, not the base class.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._fail(ConnectionResetError("closed by the server"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(str(error)))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._answer and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), b"".join(self._body)))

    async def exchange(self, message: bytes) -> tuple[int, bytes]:
        assert self._transport
        self._body = []
        # The parser counts a second message on its own; a new one is as cheap and forgets all.
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._answer

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def _fail(self, error: ConnectionError) -> None:
        self.reusable = False
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)


class Client:
    """Sends requests to one server over at most `limit` kept connections.

    Args:
        url: `http://host:port`, with or without a path to go before every other.
        headers: Sent with every request.
        limit: Connections at once; a request beyond it waits for one to come free.
        timeout: Longest time for a request, the wait for a connection included [s].

    Raises:
        ValueError: The address is not one of HTTP.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        limit: int = 1000,
        timeout: float = 10.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is not an http:// address")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._headers = "".join(
            f"{name}: {value}\r\n"
            for name, value in ({"Host": parts.netloc} | dict(headers or {})).items()
        )
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._permits = asyncio.Semaphore(limit)

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request with a JSON body."""
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def send(self, message: bytes) -> tuple[int, bytes]:
        """Sends what `message` made; returns the status and body of the answer.

        Raises:
            TimeoutError: No whole answer within the timeout.
            OSError: The connection was refused or broken.
        """
        async with asyncio.timeout(self._timeout), self._permits:
            connection = self._take() or await self._open()
            answered = False
            try:
                answer = await connection.exchange(message)
                answered = True
                return answer
            finally:
                if answered and connection.reusable:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - _MAX_IDLE
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection
