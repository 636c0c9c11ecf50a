"""Middleware of all requests: ids, metrics, logs, traces, and unexpected errors."""

import asyncio
import logging
import random
import re
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import describe
from service.http.cors import Cors
from service.http.exchange import header
from service.http.problems import problem_response
from service.observe.audit import AuditLog
from service.observe.metrics import ABANDONED, STAGES, UNMATCHED, Metrics
from service.observe.tracing import Tracer

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
# Paths that monitoring calls every few seconds: they are logged at a lower level.
PROBES = {"/health/live", "/health/ready", "/metrics"}


class RequestContext:
    """Assigns each request an id, counts, times, logs and traces it, and handles unexpected errors.

    The audit log has the requests for an index, and those without a known key. Neither the response
    to an unexpected error nor its log entry contains the message of the exception, which could
    quote a query.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        tracer: Tracer | None,
        cors: Cors | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self._app = app
        self._cors = cors or Cors(())
        self._metrics = metrics
        self._tracer = tracer
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        left = abandoned = False

        def leave() -> None:
            nonlocal left, abandoned
            left, abandoned = True, abandoned or not status

        async def receive_or_leave() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                leave()
            return message

        state["client_left"] = leave

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
            await self._app(scope, receive_or_leave, send_with_headers)
        except (asyncio.CancelledError, ClientDisconnect):
            if not left:
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
        self._report(scope, ABANDONED if abandoned else str(status), started)

    def _report(self, scope: Scope, status: str, started: float) -> None:
        seconds = time.perf_counter() - started
        route = getattr(scope.get("route"), "path_format", UNMATCHED)
        self._metrics.answered(route, status, seconds)
        if status == ABANDONED:
            self._metrics.rejections.labels("departed").inc()
        state = scope["state"]
        if self._audit and (state.get("index") or status == "401"):
            self._audit.write(state, route, status)
        level = logging.DEBUG if state["path"] in PROBES else logging.INFO
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
