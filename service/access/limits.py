"""Middleware: the requests and request bodies that the service takes at once."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.guards import client_of
from service.errors import RequestError
from service.http.content_coding import decoded
from service.http.context import PROBES
from service.http.exchange import exchange_of, header
from service.http.problems import problem_response
from service.limits import Client, Limits, Shares, Usages
from service.observe.metrics import Metrics
from service.settings import Settings


class LimitRequests:
    """Limits the requests and request bodies that the service accepts.

    A request beyond `requests` at once gets 503, as does one whose body would take the bodies
    in memory beyond `buffered_bytes`; of both limits each client has a share. A request counts
    once its body is complete, so that clients which send half of one refuse no others. A body of
    more than `max_body_bytes`, before or after it is decoded and whatever its headers say, gets
    413, and one that has not arrived after `timeout_ms` gets 504. Of a stream, each part has this
    time, and the route bounds what it holds.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        limits: Limits,
        metrics: Metrics,
        usages: Usages | None = None,
    ) -> None:
        usages = usages or Usages()
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.timeout_ms / 1000
        self._metrics = metrics
        self._requests = Shares(limits.requests, usages.requests)
        self._buffered = Shares(limits.buffered_bytes, usages.buffered_bytes)
        self._probes = usages.probes
        self._most_probes = limits.probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["state"]["path"] in PROBES:
            await self._probe(scope, receive, send)
            return
        client = Client(client_of(scope))
        counted = 0

        def count() -> None:
            nonlocal counted
            if not self._requests.allow(client, 1):
                raise self._too_many("too many requests at once: retry later")
            counted = 1
            self._requests.take(client, 1)

        if not _has_body(scope):
            try:
                count()
            except RequestError as error:
                await problem_response(error, scope)(scope, receive, send)
                return
        deadline = scope["state"]["arrived"] + self._timeout
        exchange = exchange_of(scope)
        receive = decoded(scope, receive, self._max_bytes)
        received = 0
        complete = False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            held = scope["state"].get("held")
            if held is not None:  # the route reads a stream, and says what it still holds of it
                self._buffered.take(client, held - received)
                received = held
            if exchange and exchange.has_arrived():
                message = await receive()
            else:
                try:
                    until = deadline
                    if held is not None:
                        until = asyncio.get_running_loop().time() + self._timeout
                    async with asyncio.timeout_at(until):
                        message = await receive()
                except TimeoutError as error:
                    late = "the request body did not arrive before the deadline"
                    raise RequestError("deadline_exceeded", late) from error
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            received += size
            self._buffered.take(client, size)
            if held is None and received > self._max_bytes:
                too_long = f"the request body is longer than {self._max_bytes} bytes"
                raise RequestError("body_too_long", too_long, limit=self._max_bytes)
            if not self._buffered.allow(client, 0):
                raise self._too_many("too many long request bodies at once: retry later")
            if complete and not counted:
                count()
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._requests.take(client, -counted)
            self._buffered.take(client, -received)

    async def _probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._probes.allows(1, self._most_probes):
            error = self._too_many("too many requests of monitoring at once: retry later")
            await problem_response(error, scope)(scope, receive, send)
            return
        self._probes.add(1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._probes.add(-1)

    def _too_many(self, message: str) -> RequestError:
        self._metrics.rejections.labels("connections").inc()
        return RequestError("too_many_requests", message)


def _has_body(scope: Scope) -> bool:
    length = header(scope, b"content-length")
    return length not in (None, "0") or header(scope, b"transfer-encoding") is not None
