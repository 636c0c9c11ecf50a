"""What happens around every request: its id, its metrics, its limits, its last resort."""

import logging
import re
import time
import traceback
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import UNMATCHED, Metrics
from service.problems import problem_response

_LOG = logging.getLogger("care.service")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Swagger's page loads its own script and style from elsewhere.
_WITHOUT_POLICY = {"/docs"}


class RequestContext:
    """Gives each request an id, counts and times it, and answers what nothing else caught.

    The answer to an unexpected error, and its log entry, hold no message of the exception:
    it could quote a query.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        departed = False

        async def receive_or_depart() -> Message:
            nonlocal departed
            message = await receive()
            departed |= message["type"] == "http.disconnect" and not status
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in _HEADERS.items():
                    if not (name == "Content-Security-Policy" and scope["path"] in _WITHOUT_POLICY):
                        headers.setdefault(name, value)
            await send(message)

        started = time.perf_counter()
        with self._metrics.in_flight.track_inprogress():
            try:
                await self._app(scope, receive_or_depart, send_with_headers)
            except Exception as error:
                _LOG.error(
                    "request %s failed with %s\n%s",
                    request_id,
                    type(error).__name__,
                    "".join(traceback.format_tb(error.__traceback__)),
                )
                if status:
                    raise
                response = problem_response(500, "an unexpected error", request_id)
                await response(scope, receive, send_with_headers)
        route = getattr(scope.get("route"), "path", UNMATCHED)
        self._metrics.requests.labels(route, "499" if departed else str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)


class BodyLimit:
    """Refuses bodies over a number of bytes with 413, whatever their headers say."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"the body is longer than {self._max_bytes} bytes")
            return message

        await self._app(scope, limited, send)
