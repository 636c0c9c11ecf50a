import asyncio
import json
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from service.metrics import Metrics
from service.middleware import Limits, RequestContext
from service.problems import problem_response
from service.settings import Settings

MIB = 1 << 20


class Client:
    """Sends one request with a body of zeros, and keeps the status and code of the response."""

    def __init__(self, body: int) -> None:
        self.body = bytes(body)
        self.status = 0
        self.code: str | None = None
        self._sent = False

    async def receive(self) -> Message:
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": self.body}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.code = json.loads(message["body"]).get("code")


async def handle(app: Any, client: Client) -> None:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/search", "headers": []}
    await app(scope, client.receive, client.send)


def test_an_answer_that_breaks_off_counts_as_an_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("the disk fails")

    metrics = Metrics()
    client = Client(0)
    asyncio.run(handle(RequestContext(app, metrics, None), client))
    assert (client.status, client.code) == (200, None)
    labels = {"route": "unmatched", "status": "500"}
    assert metrics.registry.get_sample_value("care_http_requests_total", labels) == 1


def test_the_bodies_in_memory_are_limited_together() -> None:
    """Three requests with bodies of 100 MiB: the third is rejected until one has ended."""
    read = asyncio.Semaphore(0)
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
        except Exception as error:
            await problem_response(error, scope)(scope, receive, send)
            return
        read.release()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    metrics = Metrics()
    limits = Limits(app, Settings(max_body_bytes=100 * MIB), metrics)
    served = RequestContext(limits, metrics, None)

    async def run() -> list[Client]:
        clients = [Client(100 * MIB) for _ in range(4)]
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for client in clients[:2]:
                tasks.create_task(handle(served, client))
                await read.acquire()
            await handle(served, clients[2])
            release.set()
        await handle(served, clients[3])
        return clients

    first, second, third, fourth = asyncio.run(run())
    assert [first.status, second.status, third.status, fourth.status] == [200, 200, 503, 200]
    assert third.code == "too_many_requests"
    rejected = metrics.registry.get_sample_value("care_rejections_total", {"reason": "connections"})
    assert rejected == 1
