"""A transport whose answers are scripted, and waits that take no time."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from care_client import AsyncClient, Client

Answer = httpx2.Response | Exception


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


def problem(status: int, code: str, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"title": "", "status": status, "code": code, "detail": "d", "request_id": "r"} | fields
    return httpx2.Response(status, json=body, headers=headers)


def answer(**fields: Any) -> Answer:
    """A response to `/search` with one hit."""
    hit = {"id": "1", "score": 0.9, "rank": 1, "title": "t"}
    return httpx2.Response(200, json={"hits": [hit], **fields})
