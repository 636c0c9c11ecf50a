"""A service of configured behaviour, in a separate thread."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn


@dataclass
class KnownService:
    """An ASGI application with configured responses to POST requests.

    Attributes:
        statuses: Statuses of the responses, in turn and repeated.
        stall_at: Number of the request that starts a stall, in which there are no responses.
        stall_seconds: Length of the stall.
        limit: Concurrent requests; more get 429 with Retry-After.
        hold_until: Number of requests that must have arrived before the first response.
        key: Required bearer token, if set.
        close: Whether responses close the connection.
        arrivals: Arrival time of each POST, in seconds of the monotonic clock.
        bodies: Bodies of the requests.
        clients: Client ports of the requests.
    """

    statuses: Sequence[int] = (200,)
    stall_at: int = -1
    stall_seconds: float = 0.0
    limit: int = 1_000_000
    hold_until: int = 0
    key: str = ""
    close: bool = False
    arrivals: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    stall_end: float = 0.0
    _in_flight: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.key and key != f"Bearer {self.key}":
            await self._answer(send, 401, {})
        elif scope["method"] == "GET":
            index = {"name": "known", "version": "1", "filters": {"department": ["儿科", "骨科"]}}
            await self._answer(send, 200, index)
        else:
            self.clients.append(scope["client"][1])
            self.bodies.append(json.loads(body))
            await self._answer(send, await self._serve(), {})

    async def _serve(self) -> int:
        number = len(self.arrivals)
        self.arrivals.append(time.monotonic())
        if len(self.arrivals) >= self.hold_until:
            self._released.set()
        if self._in_flight >= self.limit:
            return 429
        self._in_flight += 1
        if number == self.stall_at:
            self.stall_end = time.monotonic() + self.stall_seconds
        # One sleep is not enough: the event loop's timers may fire milliseconds early.
        while (remaining := self.stall_end - time.monotonic()) > 0:
            await asyncio.sleep(remaining)
        if self.hold_until:
            await self._released.wait()
        self._in_flight -= 1
        return self.statuses[number % len(self.statuses)]

    async def _answer(self, send: Any, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if self.close:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def served(service: KnownService) -> Iterator[str]:
    """Serves the application on a free port and yields its address."""
    config = uvicorn.Config(service, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
