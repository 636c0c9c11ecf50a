"""Requests to an application without a server, and the processor time of the event loop."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

_PART = 1 << 16


@dataclass
class Exchange:
    """A request, and the response to it.

    Attributes:
        aborted: Whether the client disconnects once it has sent the body, before its end.
        read: Called with the number of each part of the response; the client reads it afterwards.
        gone: Set when the client disconnects.
    """

    path: str
    body: bytes = b""
    method: str = "POST"
    aborted: bool = False
    read: Callable[[int], Awaitable[Any]] | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        starts = range(0, len(self.body) or 1, _PART)
        self._chunks = [self.body[start : start + _PART] for start in starts]

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)

    @property
    def code(self) -> Any:
        return json.loads(self.content)["code"]

    async def run(self, app: FastAPI) -> "Exchange":
        scope = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "query_string": b"",
            "headers": [],
            "client": ("127.0.0.1", 50_000),
        }
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> Message:
        if self._chunks:
            chunk = self._chunks.pop(0)
            more = bool(self._chunks) or self.aborted
            return {"type": "http.request", "body": chunk, "more_body": more}
        if not self.aborted:
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            if self.read:
                await self.read(len(self.parts))
            self.parts.append(message["body"])


@contextmanager
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Measures the processor time [s] of the longest callback of asyncio's own event loop."""
    longest = [0.0]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - started)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest
    assert longest[0], "no callback was measured"
