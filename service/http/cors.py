"""Pages of other origins (CORS): which may call the service, and what their browsers are told."""

from collections.abc import Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import RequestError
from service.http.exchange import header
from service.http.problems import problem_response

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = (b"access-control-expose-headers", b"ETag, X-Request-ID, Retry-After")


class Cors:
    """The origins whose pages may call the service; `*` is any.

    Requests carry no cookies, so a page can do no more than a program that has its API key.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, origin: str | None) -> bool:
        return origin is not None and bool(self._origins & {origin, "*"})

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Returns the headers of any answer to a request: an error can be read like a result."""
        if not self._origins:
            return []
        origin = header(scope, b"origin")
        headers = [(b"vary", b"Origin")]
        if origin is not None and self.allows(origin):
            headers += [(b"access-control-allow-origin", origin.encode("latin-1")), _EXPOSED]
        return headers


class Preflight:
    """Middleware: answers the question of a browser before it sends the request of a page.

    The page may send any header: tracing libraries add many, and no header but the API key changes
    what a request may do.
    """

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers: ASGIApp = self._app
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            origin = header(scope, b"origin")
            method = header(scope, b"access-control-request-method")
            if origin is not None and method is not None:
                answers = self._answer(scope, origin, method)
        await answers(scope, receive, send)

    def _answer(self, scope: Scope, origin: str, method: str) -> Response:
        refusal = None
        if not self._cors.allows(origin):
            refusal = f"CARE_CORS_ORIGINS does not list the origin {origin}"
        elif method not in _METHODS:
            refusal = f"pages of other origins may use the methods {', '.join(_METHODS)}"
        if refusal:
            return problem_response(RequestError("cors_refused", refusal), scope)
        headers = {
            "Access-Control-Allow-Methods": ", ".join(_METHODS),
            "Access-Control-Max-Age": "600",
        }
        if names := header(scope, b"access-control-request-headers"):
            headers["Access-Control-Allow-Headers"] = names
        return Response(headers=headers)
