"""Middleware of all requests: ids, metrics, logs, traces, limits, and unexpected errors."""

import asyncio
import logging
import random
import re
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import describe
from service.access import client_of
from service.content_coding import decoded
from service.cors import Cors
from service.exchange import exchange_of, header
from service.fairness import Shares
from service.metrics import DEPARTED, STAGES, UNMATCHED, Metrics
from service.problems import RequestError, problem_response
from service.settings import Settings
from service.tracing import Tracer

_LOG = logging.getLogger("care.service")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Headers of each answer that does not have them.
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
# Request bodies in memory at once; 1024 searches take about 1 MB.
_MAX_BUFFERED_BYTES = 256 << 20
# Monitoring calls these every few seconds, also while searches reach the limits. They have a limit
# of their own.
_PROBES = {"/health/live", "/health/ready", "/metrics"}
_MAX_PROBES = 64


class RequestContext:
    """Assigns each request an id, counts, times, logs and traces it, and handles unexpected errors.

    Neither the response to an unexpected error nor its log entry contains the message of the
    exception, which could quote a query.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None, cors: Cors | None = None
    ) -> None:
        self._app = app
        self._cors = cors or Cors(())
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["path"] = scope["path"].removeprefix(scope.get("root_path", ""))
        state["arrived"] = asyncio.get_running_loop().time()
        status = 0
        gone = departed = False

        def depart() -> None:
            nonlocal gone, departed
            gone, departed = True, departed or not status

        async def receive_or_depart() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                depart()
            return message

        state["depart"] = depart

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = list(message.get("headers", ()))
                names = {name for name, _ in headers}
                headers += (each for each in _HEADERS if each[0] not in names)
                headers += self._cors.headers(scope)
                headers.append((b"x-request-id", request_id.encode()))
                message["headers"] = headers
            await send(message)

        started = time.perf_counter()
        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive_or_depart, send_with_headers)
        except (asyncio.CancelledError, ClientDisconnect):
            if not gone:
                raise
        except Exception as error:
            fields = {"request_id": request_id, **describe(error)}
            message = f"request {request_id} failed with {fields['error']}"
            _LOG.error(message, extra={"fields": fields})
            if status:
                status = 500  # the answer has begun; the server breaks it off
            else:
                await problem_response(error, scope)(scope, receive, send_with_headers)
        finally:
            self._metrics.in_flight -= 1
        self._report(scope, DEPARTED if departed else str(status), started)

    def _report(self, scope: Scope, status: str, started: float) -> None:
        seconds = time.perf_counter() - started
        route = getattr(scope.get("route"), "path_format", UNMATCHED)
        self._metrics.answered(route, status, seconds)
        if status == DEPARTED:
            self._metrics.rejections.labels("departed").inc()
        state = scope["state"]
        level = logging.DEBUG if state["path"] in _PROBES else logging.INFO
        logged = _LOG.isEnabledFor(level)
        if not (logged or self._tracer):
            return
        timings = state.get("timings")
        stages = {n: getattr(timings, n) for n in STAGES if n != "total"} if timings else {}
        if logged:
            fields = {
                "request_id": state["request_id"],
                "method": scope["method"],
                "route": route,
                "status": int(status),
                "ms": round(seconds * 1000, 3),
                "stages_ms": stages,
                **({"key": state["key"]} if "key" in state else {}),
            }
            _LOG.log(level, "request", extra={"fields": fields})
        if self._tracer:
            headers = Headers(scope=scope)
            self._tracer.record(route, int(status), headers, seconds, stages, state["request_id"])


class Limits:
    """Limits the requests and request bodies that the service accepts.

    A request beyond `max_requests` at once gets 503, as does one whose body would take the bodies
    in memory beyond `_MAX_BUFFERED_BYTES`; of both limits each client has a share. A request counts
    once its body is complete, so that clients which send half of one refuse no others. A body of
    more than `max_body_bytes`, before or after it is decoded and whatever its headers say, gets
    413, and one that has not arrived after `timeout_ms` gets 504.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.timeout_ms / 1000
        self._metrics = metrics
        self._requests = Shares(settings.max_requests)
        self._buffered = Shares(max(_MAX_BUFFERED_BYTES, settings.max_body_bytes))
        self._probes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["state"]["path"] in _PROBES:
            await self._probe(scope, receive, send)
            return
        client = client_of(scope)
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
            if exchange and exchange.has_arrived():
                message = await receive()
            else:
                try:
                    async with asyncio.timeout_at(deadline):
                        message = await receive()
                except TimeoutError as error:
                    late = "the request body did not arrive before the deadline"
                    raise RequestError("deadline_exceeded", late) from error
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            received += size
            self._buffered.take(client, size)
            if received > self._max_bytes:
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
        if self._probes == _MAX_PROBES:
            error = self._too_many("too many requests of monitoring at once: retry later")
            await problem_response(error, scope)(scope, receive, send)
            return
        self._probes += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._probes -= 1

    def _too_many(self, message: str) -> RequestError:
        self._metrics.rejections.labels("connections").inc()
        return RequestError("too_many_requests", message)


def _has_body(scope: Scope) -> bool:
    """Returns whether a request announces a body."""
    length = header(scope, b"content-length")
    return length not in (None, "0") or header(scope, b"transfer-encoding") is not None
