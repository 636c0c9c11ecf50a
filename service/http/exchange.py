"""One request and its answer, as an ASGI application sees them."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from core.errors import describe

_LOG = logging.getLogger("care.service")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_EXCHANGE = "care.exchange"  # extension of the scope, for what ASGI does not offer
_NO_CONTENT = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


def header(scope: Scope, name: bytes) -> str | None:
    """Returns the first header of a request with a name in lower case, or None."""
    for known, value in scope["headers"]:
        if known == name:
            return str(value, "latin-1")
    return None


def exchange_of(scope: Scope) -> "Exchange | None":
    """Returns the exchange of a request; None with another server than `HttpProtocol`."""
    found: Exchange | None = scope.get("extensions", {}).get(_EXCHANGE)
    return found


class Connection(Protocol):
    """What an exchange needs of its connection."""

    transport: asyncio.Transport

    async def write(self, *parts: bytes) -> None:
        """Sends bytes; returns when the client has taken them, or the connection has ended."""

    def resume_reading(self) -> None:
        """Reads on after a pause."""

    def answered(self) -> None:
        """Notes that the answer is sent."""


class Exchange:
    """One request and its answer."""

    def __init__(
        self, connection: Connection, scope: Scope, default_headers: list[tuple[bytes, bytes]]
    ) -> None:
        self.keep_alive = True  # whether the connection stays open after the answer
        # Whether the client waits for status 100 before it sends the body.
        self.expects_continue = False
        self.started = False  # whether the answer has begun
        self.complete = False  # whether the answer is sent
        self._connection = connection
        self._scope = scope
        scope["extensions"] = {_EXCHANGE: self}
        self._default_headers = default_headers
        self._body = bytearray()
        self._more_body = True
        self._arrived = asyncio.Event()
        self._disconnected = False
        self._leave: Callable[[], None] | None = None
        self._head = b""
        self._has_content = scope["method"] != "HEAD"
        self._left: int | None = None  # bytes of content that the answer's headers announce
        self._chunked = False

    @property
    def may_inform(self) -> bool:
        """Whether an interim response may be sent: the answer has not begun."""
        return not self.started and self._scope["http_version"] == "1.1"

    def receive_body(self, data: bytes) -> int:
        """Keeps content until the application asks for it; returns the bytes that are kept."""
        if not self.complete and not self._disconnected:
            self._body += data
            self._arrived.set()
        return len(self._body)

    def end_body(self) -> None:
        """Notes that the request is complete."""
        self._more_body = False
        self._arrived.set()

    def disconnect(self) -> None:
        """Notes that the client has disconnected: the application is told, its answer is lost."""
        self._disconnected = True
        self._body.clear()
        self._arrived.set()
        if self._leave:
            self._leave()

    def on_disconnect(self, leave: Callable[[], None] | None) -> None:
        """Sets what is called once when the client disconnects, at once if it has; None unsets."""
        self._leave = leave
        if leave and self._disconnected:
            leave()

    async def run(self, app: ASGIApp) -> None:
        """Calls the application; closes the connection if it does not answer."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:
            _LOG.error("unhandled error in a request", extra={"fields": describe(error)})
        finally:
            if not self.complete and not self._disconnected:
                self._connection.transport.abort()

    def has_arrived(self) -> bool:
        """Returns whether `receive` returns at once."""
        return self._arrived.is_set()

    async def receive(self) -> Message:
        """Returns what has arrived of the body, or that the client has disconnected."""
        if not self._disconnected and not self.complete:
            if self.expects_continue and not self.started:
                self.expects_continue = False
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._connection.resume_reading()
            await self._arrived.wait()
            self._arrived.clear()
        if self._disconnected or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    async def send(self, message: Message) -> None:
        """Sends a part of the answer.

        Returns when the client has taken it; at once if the client has disconnected. The head is
        sent with the first part of the content. RuntimeError if the message is not the next one of
        an answer, or the content is not as long as announced.
        """
        if self._disconnected:
            return
        expected = "http.response.body" if self.started else "http.response.start"
        if self.complete or message["type"] != expected:
            raise RuntimeError(f"unexpected message {message['type']}")
        if not self.started:
            self.started = True
            if self.expects_continue and self._more_body:
                # The client may send its next request instead of the body.
                self.keep_alive = False
            self._head = self._answer_head(message["status"], message.get("headers", ()))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the content is not as long as its content-length")
        head, self._head = self._head, b""
        if not self._has_content:
            await self._connection.write(head)
        elif self._chunked:
            chunk = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
            await self._connection.write(head, *chunk, b"" if more else b"0\r\n\r\n")
        else:
            await self._connection.write(head, body)
        if not more and not self._disconnected:
            self.complete = True
            self._body.clear()
            self._arrived.set()
            self._connection.answered()

    def _answer_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        lines = [_STATUS_LINES[status]]
        closes = False
        for name, value in (*self._default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                closes = value == b"close"
        fields = len(self._default_headers) + len(headers)
        if status in _NO_CONTENT:
            self._has_content = False
        elif self._left is None and self._has_content:
            # An HTTP/1.0 client reads until the connection closes.
            self._chunked = self._scope["http_version"] == "1.1"
            if self._chunked:
                lines.append(_CHUNKED)
                fields += 1
        if not self._has_content:
            self._left = None
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(_CLOSE)
            fields += 1
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == fields + 2:
            raise RuntimeError("a header contains a line break")
        return head
