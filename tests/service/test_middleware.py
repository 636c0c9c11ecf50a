import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.access.limits import LimitRequests
from service.errors import RequestError
from service.http.context import RequestContext
from service.http.problems import problem_response
from service.limits import Limits
from service.observe.metrics import Metrics
from service.settings import Settings

pytestmark = pytest.mark.anyio

MIB = 1 << 20


async def test_an_answer_that_breaks_off_counts_as_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("the disk fails")

    async def send(message: Message) -> None:
        sent.append(message)

    metrics = Metrics()
    sent: list[Message] = []
    receive: Any = None
    scope = {"type": "http", "method": "POST", "path": "/search", "headers": []}
    await RequestContext(app, metrics, None)(scope, receive, send)
    assert [message.get("status") for message in sent] == [200]
    labels = {"route": "unmatched", "status": "500"}
    assert metrics.registry.get_sample_value("care_http_requests_total", labels) == 1


class Scene:
    """Requests that `LimitRequests` admits; `/search` answers once `release` is set."""

    def __init__(self, **settings: Any) -> None:
        self.entered = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        self.metrics = Metrics()
        chosen = Settings(**settings)
        self.limits = RequestContext(
            LimitRequests(self._app, chosen, Limits.of(chosen), self.metrics), self.metrics, None
        )
        self._tasks: list[asyncio.Task[int]] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except RequestError as error:
            await problem_response(error, scope)(scope, receive, send)
            return
        self.entered.release()
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def send(self, address: str, *, whole: bool, size: int = 3) -> "asyncio.Task[int]":
        """Sends a request, or the first bytes of one; its result is the status."""
        parts = [{"type": "http.request", "body": bytes(size), "more_body": not whole}]
        status = 0

        async def receive() -> Message:
            if parts:
                return parts.pop()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        async def request() -> int:
            headers = [(b"content-length", b"9")]
            scope = {"type": "http", "method": "POST", "path": "/search", "headers": headers}
            await self.limits(scope | {"client": (address, 1)}, receive, send)
            return status

        task = asyncio.get_running_loop().create_task(request())
        self._tasks.append(task)
        return task

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_requests_whose_bodies_are_incomplete_refuse_no_others() -> None:
    scene = Scene(max_requests=4)
    for _ in range(100):
        scene.send("10.0.0.1", whole=False)
    await asyncio.sleep(0)
    scene.release.set()
    for address in ("10.0.0.1", "10.0.0.2"):
        assert await scene.send(address, whole=True) == 200
    await scene.end()


async def test_a_client_has_a_share_of_the_requests_at_once() -> None:
    scene = Scene(max_requests=4)
    first = [scene.send("10.0.0.1", whole=True) for _ in range(4)]
    for _ in first:
        await scene.entered.acquire()
    assert await scene.send("10.0.0.1", whole=True) == 503
    others = [scene.send("10.0.0.2", whole=True) for _ in range(2)]
    for _ in others:
        await scene.entered.acquire()
    assert await scene.send("10.0.0.2", whole=True) == 503
    scene.release.set()
    assert await asyncio.gather(*first, *others) == [200] * 6
    assert scene.metrics.in_flight == 0


async def test_a_client_has_a_share_of_the_bodies_in_memory() -> None:
    scene = Scene(max_body_bytes=100 * MIB)
    scene.release.set()
    for _ in range(2):
        scene.send("10.0.0.1", whole=False, size=100 * MIB)
    await asyncio.sleep(0)
    assert await scene.send("10.0.0.1", whole=True, size=100 * MIB) == 503
    assert await scene.send("10.0.0.2", whole=True, size=100 * MIB) == 200
    await scene.end()


async def test_the_bodies_in_memory_are_limited_together() -> None:
    """Three requests with bodies of 100 MiB: the third is rejected until one has ended."""

    scene = Scene(max_body_bytes=100 * MIB)
    held = [scene.send("10.0.0.1", whole=True, size=100 * MIB) for _ in range(2)]
    for _ in held:
        await scene.entered.acquire()
    assert await scene.send("10.0.0.1", whole=True, size=100 * MIB) == 503
    rejected = {"reason": "connections"}
    registry = scene.metrics.registry
    assert registry.get_sample_value("care_rejections_total", rejected) == 1
    scene.release.set()
    assert await asyncio.gather(*held) == [200, 200]
    assert await scene.send("10.0.0.1", whole=True, size=100 * MIB) == 200
    await scene.end()
