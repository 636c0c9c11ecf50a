"""Requests to an application without a server, and the processor time of the event loop."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

PART = 1 << 16


@dataclass
class Exchange:
    """A request with a body, and the response to it.

    `read` is called with the number of each part of the response, and may wait.
    """

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    chunk: int = PART
    read: Callable[[int], Any] | None = None
    status: int = 0
    parts: list[bytes] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._sent = 0

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.content)

    async def receive(self) -> Message:
        if self._sent > len(self.body) or (self._sent and self._sent == len(self.body)):
            await self.gone.wait()
            return {"type": "http.disconnect"}
        part = self.body[self._sent : self._sent + self.chunk]
        self._sent += len(part) or 1
        return {"type": "http.request", "body": part, "more_body": self._sent < len(self.body)}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.body":
            if self.read:
                await self.read(len(self.parts))
            self.parts.append(message["body"])

    async def run(self, app: FastAPI) -> "Exchange":
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
            "state": {},
        }
        await app(scope, self.receive, self.send)
        return self


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[FastAPI]:
    async with app.router.lifespan_context(app):
        yield app


@contextmanager
def loop_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Collects the processor time [s] of the longest callback of event loops."""
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - started)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest


def exchange(app: FastAPI, requests: Sequence[Exchange]) -> Sequence[Exchange]:
    """Runs requests one after another."""

    async def run() -> None:
        async with started(app):
            for request in requests:
                await request.run(app)

    asyncio.run(run())
    return requests
