"""HTTP/1.1 on one connection: reads requests within limits, calls the application, sends answers.

llhttp parses; this module gives it one request at a time and decides when to stop.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from service.errors import RequestError
from service.http.connections import Connections, Ending, Progress
from service.http.exchange import Exchange
from service.http.request_head import origin_of, resolve

_MAX_REQUEST_LINE = 8192
_MAX_HEADERS = 128
# Bytes of a request that wait in memory, before reading from the connection pauses.
_HIGH_WATER = 65_536
# The parser drops the body of a request to upgrade the connection. This server never upgrades, so
# it gives the parser the header under another name.
_UPGRADE = re.compile(rb"\r\nUpgrade(?=[ \t]*:)", re.IGNORECASE)
_NOT_UPGRADE = b"\r\nIgnored"
# Bytes of a chunked body that the parser gets at once, so that the limit of framing applies.
_PIECE = 1024
# How often the service looks whether a client that ended its side of the connection is gone [s].
_LOOK_EVERY = 0.05
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # the state in TCP_INFO after a reset

Refuse = Callable[[RequestError], ASGIApp]
"""Makes the application that answers a request which the server refuses."""


class HttpProtocol(asyncio.Protocol):
    """The server's side of a connection; uvicorn makes one for each."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        refuse: Refuse,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._app: ASGIApp = config.loaded_app
        self._root_path = config.root_path
        self._server_state = server_state
        self._app_state = app_state
        self._connections = connections
        self._limits = connections.limits
        self._refuse = refuse
        self._parser = httptools.HttpRequestParser(self)
        # Bytes that the parser has not seen: of an incomplete head, or of the next request.
        self._input = bytearray()
        self._head = b""  # of the last request, as far as it has arrived
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_complete = False
        self._keep_alive = True
        self._more_body = False  # the parser expects more of the request
        self._body_left = 0  # bytes of the body that it expects, if it knows
        self._chunked = False
        self._framing = 0  # bytes of a chunked body since its last content
        self._exchange: Exchange | None = None
        self._waits_since = self.loop.time()  # for the client to send
        self._reused = False
        self._discards = False  # the last answer is sent: what arrives is discarded
        self._reading = True
        self._ended = False  # the client sends nothing more
        self._writable: asyncio.Future[None] | None = None  # set while the client does not read
        self._progress: Progress | None = None

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for a request."""
        self.transport = cast("asyncio.Transport", transport)
        # A write then fills the socket at once and reports whether the client has taken all of it.
        self.transport.set_write_buffer_limits(high=0)
        self._addresses = get_remote_addr(self.transport), get_local_addr(self.transport)
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request in progress that its client has disconnected."""
        self._server_state.connections.discard(self)
        self._connections.remove(self)
        self.resume_writing()
        if self._exchange:
            self._exchange.disconnect()
        self._exchange = None
        self._discards = True

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        if not self._input and not self._exchange:
            # Empty lines before a request are ignored; a request has not begun with them.
            data = data.lstrip(b"\r\n")
            if not data:
                return
            self._waits_since = self.loop.time()
        self._input += data
        self._advance()

    def eof_received(self) -> bool:
        """Keeps a connection open whose client has sent its request and reads the answer."""
        self._ended = True
        exchange = self._exchange
        if self._discards or not exchange or exchange.complete or self._more_body:
            return False
        # A client that has closed the connection instead resets it when it gets something, and any
        # client must accept an interim response (RFC 9110 15.2).
        if exchange.may_inform:
            self.transport.write(_INTERIM)
        if hasattr(socket, "TCP_INFO"):
            self.loop.call_later(_LOOK_EVERY, self._look, exchange)
        return True

    def _look(self, exchange: Exchange) -> None:
        """Ends the connection if the client of a request has closed it."""
        if exchange is not self._exchange or exchange.complete or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_EVERY, self._look, exchange)

    def pause_writing(self) -> None:
        """The socket has not taken all that was written."""
        if not self._writable:
            self._writable = self.loop.create_future()
            left = self.transport.get_write_buffer_size()
            self._progress = Progress(self.loop.time(), left)

    def resume_writing(self) -> None:
        """The socket has taken everything, or never will."""
        if self._writable and not self._writable.done():
            self._writable.set_result(None)
        self._writable = self._progress = None

    # What the parser calls

    def on_message_begin(self) -> None:
        """Stops the parser where it finds a second request behind a chunked body."""
        if self._exchange:
            raise _SecondRequestError

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header; trailers are dropped."""
        if not self._exchange:
            # The parser leaves white space behind the value.
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Notes whether the connection may stay open; the parser forgets it with the request."""
        self._head_complete = True
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Passes content on; what arrives after the answer is dropped."""
        assert self._exchange
        self._body_left -= len(body)
        self._framing = 0
        if self._exchange.receive_body(body) > _HIGH_WATER:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._more_body = False

    # What the exchange calls

    async def write(self, *parts: bytes) -> None:
        """Sends bytes; returns when the socket has taken all of them, or the connection ends."""
        if self.transport.is_closing():
            return
        self.transport.writelines(parts)
        if writable := self._writable:
            self._connections.sending(self, sum(map(len, parts)))
            try:
                await writable
            finally:
                self._connections.sent(self)

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    def answered(self) -> None:
        """The answer is sent: goes on to the next request, or closes."""
        exchange = self._exchange
        if not exchange or self.transport.is_closing():
            return
        self._server_state.total_requests += 1
        self._waits_since = self.loop.time()
        self._connections.wait_for(self)
        self.resume_reading()
        if self._more_body:
            # The client may still send. Closing now could take the answer from it.
            if not exchange.keep_alive:
                self._discard()
        elif exchange.keep_alive:
            self._exchange = None
            self._reused = True
            self._advance()
            if self._ended:
                if self._exchange and not self._more_body:
                    self.loop.call_later(_LOOK_EVERY, self._look, self._exchange)
                else:
                    self.transport.close()
        else:
            self.transport.close()

    # What uvicorn and `Connections` call

    def shutdown(self) -> None:
        """Closes an idle connection; a busy one closes after its answer."""
        if not self._exchange or self._exchange.complete:
            self.transport.close()
        else:
            self._exchange.keep_alive = False

    def overdue(self, now: float) -> Ending | None:
        """Returns why the connection must end now, if it must."""
        timeout = self._limits.client_timeout
        if self._progress:
            left = self.transport.get_write_buffer_size()
            return "send" if self._progress.stalled(now, left, timeout) else None
        waited = now - self._waits_since
        if self._exchange or self._input or self._discards:
            # The application limits the time of a body that it reads.
            served = self._exchange and not self._exchange.complete
            return None if served or waited < timeout else "receive"
        return "idle" if waited >= (self._limits.keep_alive if self._reused else timeout) else None

    def end(self) -> None:
        """Closes the connection, and gives up what is unsent."""
        if self._exchange or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    # Reading

    def _advance(self) -> None:
        """Gives the parser what has arrived, up to the end of one request."""
        while self._input and not self._discards:
            if self._exchange and not self._more_body:
                # The next request, which the client sends before it has the last answer.
                if len(self._input) > _HIGH_WATER:
                    self._pause_reading()
                return
            if self._exchange:
                self._read_body(self._exchange)
            elif not self._read_head():
                return

    def _read_head(self) -> bool:
        """Starts the next request; returns whether its head is complete and accepted."""
        if self._input[0] in b"\r\n":
            self._input = self._input.lstrip(b"\r\n")
        found = self._input.find(b"\r\n\r\n")
        size = len(self._input) if found < 0 else found + 4
        line = self._input.find(b"\r\n", 0, _MAX_REQUEST_LINE)
        most = self._limits.header_bytes
        head = self._head = bytes(self._input[: min(size, most)])
        if line < 0 and size > _MAX_REQUEST_LINE:
            longest = f"the request line is longer than {_MAX_REQUEST_LINE} bytes"
            return self._reject("url_too_long", longest, limit=_MAX_REQUEST_LINE)
        if size > most:
            longest = f"request line and headers are longer than {most} bytes"
            return self._reject("headers_too_long", longest, limit=most)
        # Proxies disagree on whether a line feed alone ends a line. Methods begin with a letter.
        if head.count(b"\n") != head.count(b"\r\n") or (head and not head[:1].isalpha()):
            return self._reject_syntax()
        if found < 0:
            return False
        del self._input[:size]
        if b"upgrade" in head.lower():
            head = _UPGRADE.sub(_NOT_UPGRADE, head)
        self._headers = []
        self._more_body = True
        self._head_complete = False
        if not self._feed(head):
            return False
        if not self._head_complete:  # the preface of HTTP/2
            return self._reject_syntax()
        if len(self._headers) > _MAX_HEADERS:
            too_many = f"the request has more than {_MAX_HEADERS} headers"
            return self._reject("headers_too_long", too_many, limit=_MAX_HEADERS)
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        try:
            target, headers = resolve(method, self._url, version, self._headers)
            url = httptools.parse_url(target)
            path = (url.path or b"/").decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            return self._reject_syntax()
        except ValueError as error:
            return self._reject("invalid_http", str(error))
        fields = dict(headers)
        expects = version == "1.1" and fields.get(b"expect", b"").lower()
        if expects not in (False, b"", b"100-continue"):
            return self._reject("expectation_failed", "the only Expect is 100-continue")
        self._chunked = b"transfer-encoding" in fields
        self._body_left = int(fields.get(b"content-length", b"0"))
        self._framing = 0
        scope = self._scope(method, version, path)
        scope["query_string"] = url.query or b""
        scope["headers"] = headers
        exchange = Exchange(self, scope, self._server_state.default_headers)
        exchange.keep_alive = version == "1.1" and self._keep_alive
        exchange.expects_continue = bool(expects)
        self._begin(exchange, self._app)
        return True

    def _read_body(self, exchange: Exchange) -> None:
        size = self._body_left if self._body_left > 0 else _PIECE
        data = bytes(self._input[:size])
        del self._input[:size]
        self._framing += len(data)
        if not self._feed(data):
            return
        if self._chunked and self._framing > (most := self._limits.header_bytes):
            longest = f"trailers or extensions of a chunk are longer than {most} bytes"
            self._reject("headers_too_long", longest, limit=most)
        elif not self._more_body:
            exchange.end_body()
            if exchange.complete:
                self.answered()
            else:
                self._connections.serve(self)

    def _feed(self, data: bytes) -> bool:
        """Gives the parser bytes; returns whether they are valid, else answers with an error."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _SecondRequestError) or not self._exchange:
                raise
            # Where the second request begins is not known, so the client is to send it again.
            self._exchange.keep_alive = False
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return self._reject_syntax()
        return True

    def _scope(self, method: str, version: str, path: str) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._addresses[1],
            "client": self._addresses[0],
            "scheme": "http",
            "method": method,
            "root_path": self._root_path,
            "path": self._root_path + (unquote(path) if "%" in path else path),
            "raw_path": (self._root_path + path).encode("ascii"),
            "query_string": b"",
            "headers": [],
            "state": self._app_state.copy(),
        }

    def _begin(self, exchange: Exchange, app: ASGIApp) -> None:
        self._exchange = exchange
        if not self._more_body:
            exchange.end_body()
            self._connections.serve(self)
        task = self.loop.create_task(exchange.run(app))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _reject_syntax(self) -> bool:
        return self._reject("invalid_http", "the request is not valid HTTP/1.1")

    def _reject(self, code: str, message: str, **fields: Any) -> bool:
        """Answers with an error, unless an answer has begun, and reads no further request."""
        exchange, self._exchange = self._exchange, None
        if exchange:
            exchange.disconnect()
            if exchange.started:
                self.transport.abort()
                return False
        self._input.clear()
        self._more_body = self._discards = True
        method = "HEAD" if self._head.startswith(b"HEAD ") else "-"
        scope = self._scope(method, "1.1", "")
        scope["headers"] = origin_of(self._head)
        refusal = Exchange(self, scope, self._server_state.default_headers)
        refusal.keep_alive = False
        self._begin(refusal, self._refuse(RequestError(code, message, **fields)))
        return False

    def _discard(self) -> None:
        """Sends nothing more, and discards what arrives until the client closes."""
        self._discards = True
        self._input.clear()
        self.transport.write_eof()

    def _pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()


class _SecondRequestError(Exception):
    pass
