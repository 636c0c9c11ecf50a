"""The class of all routes: from ASGI to the function of a route, and back.

FastAPI documents the routes from the declarations of their functions. Requests do not pass through
it: it would resolve the parameters for each request, which takes longer than everything that a
search does on the event loop.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.params import Depends
from fastapi.routing import APIRoute, APIRouter
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from service.access.guards import Roles, get_state
from service.http.body import parse_body, read_body, validated
from service.http.exchange import header

# The parameters that a function can declare to FastAPI besides the request.
_DECLARED = (
    *("path_params", "query_params", "header_params", "cookie_params", "body_params"),
    *("dependencies", "websocket_param_name", "http_connection_param_name"),
    *("response_param_name", "background_tasks_param_name", "security_scopes_param_name"),
)
_READ = ("path_params", "query_params", "header_params", "body_params", "dependencies")


_Headers = Iterable[tuple[bytes, bytes]]


class DirectRoute(APIRoute):
    """A route whose function takes the request, path and query parameters, headers and a JSON body.

    Its only dependency is one of `Roles`, which says who may call it and is checked first. Path,
    query, headers and body are read next. The function returns a value, which is sent as JSON; JSON
    in bytes; an asynchronous generator of the parts of JSON; or a `Response`. A generator is closed
    when the last part is sent or the client is gone. Several parts are sent as they are made, each
    when the client has room for it. `answer_headers` in the state of the request, pairs of bytes,
    are sent with JSON.

    A route of GET answers HEAD too, without documenting it; the server leaves out the content.

    TypeError if no role is declared, a parameter of the query has no default, or the function
    declares a parameter that this class does not read: OpenAPI would document it, and requests
    would ignore it.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        dependant = self.dependant
        _check(dependant, endpoint)
        hints = get_type_hints(endpoint, include_extras=True)
        self._admit = dependant.dependencies[0].call
        self._paths = [(f.name, f.alias, TypeAdapter(hints[f.name])) for f in dependant.path_params]
        self._queries = [
            (f.name, f.alias, TypeAdapter(hints[f.name])) for f in dependant.query_params
        ]
        # A header is text: `strict` would reject its numbers.
        self._headers = [
            (f.name, f.alias, f.alias.lower().encode(), TypeAdapter(hints[f.name]))
            for f in dependant.header_params
        ]
        self._bodies = [(f.name, TypeAdapter(hints[f.name])) for f in dependant.body_params]
        self._wants_request = dependant.request_param_name
        self.app = self._serve
        methods = self.methods or set()
        self.answered = methods | ({"HEAD"} if "GET" in methods else set())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns a handler that fails: a router that includes this route would bypass `app`."""

        async def fail(request: Request) -> Response:
            raise TypeError("add routes of DirectRoute to the application itself")

        return fail

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Returns whether the route has the path of a request, and answers its method."""
        match, found = super().matches(scope)
        answers = match is Match.PARTIAL and scope["method"] in self.answered
        return (Match.FULL if answers else match), found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path matches; raises `HTTPException` for a wrong method."""
        if scope["method"] not in self.answered:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self.answered))})
        if scope["method"] == "HEAD":
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert self._admit
        self._admit(request)
        arguments: dict[str, Any] = {}
        if self._wants_request:
            arguments[self._wants_request] = request
        for name, alias, type_ in self._paths:
            arguments[name] = validated(type_, request.path_params[alias], alias)
        for name, alias, type_ in self._queries:
            if (value := request.query_params.get(alias)) is not None:
                arguments[name] = validated(type_, value, alias)
        for name, alias, key, type_ in self._headers:
            if (value := header(scope, key)) is not None:
                arguments[name] = validated(type_, value, alias)
        for name, type_ in self._bodies:
            body, settings = await read_body(receive), get_state(request).settings
            content_type = header(scope, b"content-type")
            arguments[name] = await parse_body(type_, content_type, body, settings)
        result = await self.endpoint(**arguments)
        headers = scope["state"].get("answer_headers", ())
        if isinstance(result, bytes):
            await _send(result, headers, send)
        elif isinstance(result, Response):
            await result(scope, receive, send)
        elif isinstance(result, AsyncGenerator):
            await _send_parts(result, headers, send)
        else:
            await _send(to_json(result, inf_nan_mode="null"), headers, send)


def routes_for(role: Depends, prefix: str = "", tags: Sequence[str] = ()) -> APIRouter:
    """Returns a router whose routes are open to a role."""
    return APIRouter(
        route_class=DirectRoute, dependencies=[role], prefix=prefix, tags=list(tags) or None
    )


def _check(dependant: Dependant, endpoint: Callable[..., Any]) -> None:
    roles = [dependency.call for dependency in dependant.dependencies]
    if len(roles) != 1 or not isinstance(roles[0], Roles):
        raise TypeError(f"{endpoint} needs one dependency, the role that may call it: {roles}")
    unread = [name for name in _DECLARED if name not in _READ and getattr(dependant, name)]
    if len(dependant.body_params) > 1:
        unread.append("a second body")
    if any(field.field_info.is_required() for field in dependant.query_params):
        unread.append("a parameter of the query without a default")
    if unread:
        raise TypeError(f"{endpoint} declares parameters that DirectRoute does not read: {unread}")


async def _send_parts(parts: AsyncGenerator[bytes, None], headers: _Headers, send: Send) -> None:
    """Sends one part like any JSON, and several as a stream."""
    async with aclosing(parts):
        part = await anext(parts)
        following = await anext(parts, None)
        if following is None:
            await _send(part, headers, send)
            return
        start = {"type": "http.response.start", "status": 200, "headers": [_JSON, *headers]}
        await send(start)
        while following is not None:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            part, following = following, await anext(parts, None)
        await send({"type": "http.response.body", "body": part})


async def _send(content: bytes, headers: _Headers, send: Send) -> None:
    all_headers = [(b"content-length", b"%d" % len(content)), _JSON, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": all_headers})
    await send({"type": "http.response.body", "body": content})


_JSON = (b"content-type", b"application/json")
