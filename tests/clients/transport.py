"""Calls of clients of both kinds over a transport whose answers are scripted."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from care_client import AsyncClient, Client

Answer = httpx2.Response | Exception
both = pytest.mark.parametrize("kind", ["sync", "async"])


class Recorded(BaseException):
    """Ends a call after its request is recorded."""


def recorded(index: str | None = None) -> tuple[Client, list[httpx2.Request]]:
    """Returns a client whose calls end with `Recorded`, and the requests of its calls."""
    requests: list[httpx2.Request] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        raise Recorded

    http = httpx2.Client(transport=httpx2.MockTransport(respond))
    return Client(index=index, http=http), requests


class Script:
    """Answers requests one after another, and keeps them.

    Args:
        answers: Responses to return and exceptions to raise; a function makes an answer.
    """

    def __init__(self, *answers: Answer | Callable[[httpx2.Request], Answer]) -> None:
        self._answers: Iterator[Any] = iter(answers)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = next(self._answers)
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        # A copy, because a client reads and closes its response.
        return httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def client(self, **options: Any) -> Client:
        return Client(http=httpx2.Client(transport=httpx2.MockTransport(self)), **options)

    def async_client(self, **options: Any) -> AsyncClient:
        http = httpx2.AsyncClient(transport=httpx2.MockTransport(self))
        return AsyncClient(http=http, **options)


def call(respond: Callable[..., Any], kind: str, method: str, *args: Any, **options: Any) -> Any:
    """Calls a method of a client of either kind, of which `respond` answers requests."""
    transport = httpx2.MockTransport(respond)
    settings = {name: options.pop(name) for name in ("api_key", "retries") if name in options}
    if kind == "sync":
        with Client(http=httpx2.Client(transport=transport), **settings) as client:
            return getattr(client, method)(*args, **options)

    async def run() -> Any:
        http = httpx2.AsyncClient(transport=transport)
        async with AsyncClient(http=http, **settings) as client:
            return await getattr(client, method)(*args, **options)

    return asyncio.run(run())


def problem(status: int, code: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"title": "", "status": status, "code": code, "detail": "d", "request_id": "r"} | fields
    return httpx2.Response(status, json=body, headers=headers)


def answer(**fields: Any) -> Answer:
    """A response to `/search` with one hit."""
    hit = {"id": "1", "score": 0.9, "rank": 1, "title": "t"}
    return httpx2.Response(200, json={"hits": [hit], **fields})
