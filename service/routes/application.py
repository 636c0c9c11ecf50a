"""The application: its middleware calls routes directly, without the layers of FastAPI."""

from functools import cached_property
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import RequestError
from service.http.problems import EXPECTED, problem_response
from service.routes.direct_route import DirectRoute
from service.schemas import SCHEMA, OpenAIProblem, Problem

_INDEXES = "/indexes/"


class Application(FastAPI):
    """FastAPI declares and documents the routes; requests do not pass through its layers.

    The layers handle what `RequestContext`, `Limits` and `DirectRoute` handle here: errors, limits
    of bodies, telemetry and resources of dependencies. They take longer than a cached search.
    """

    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document, with the schemas of errors that routes refer to."""
        if self.openapi_schema:
            return self.openapi_schema
        document = super().openapi()
        _, problems = models_json_schema(
            [(Problem, "serialization"), (OpenAIProblem, "serialization")], ref_template=SCHEMA
        )
        schemas = document["components"]["schemas"]
        schemas |= jsonable_encoder(problems["$defs"], exclude_none=True)
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        return document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection, without FastAPI's telemetry."""
        await Starlette.__call__(self, scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Returns the middleware of the application, around its routes."""
        app: ASGIApp = self._answer
        for middleware in reversed(self.user_middleware):
            app = middleware.cls(app, *middleware.args, **middleware.kwargs)
        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the route of a request, and answers its errors."""
        try:
            await self._route(scope)(scope, receive, send)
        except EXPECTED as error:
            if isinstance(error, RequestError) and error.rejection:
                self.state.service.metrics.rejections.labels(error.rejection).inc()
            is_method = isinstance(error, HTTPException) and error.status_code == 405
            if is_method and (methods := self._methods(scope)):
                error.headers = {"Allow": ", ".join(sorted(methods))}  # type: ignore[union-attr]
            await problem_response(error, scope)(scope, receive, send)

    def _route(self, scope: Scope) -> ASGIApp:
        """Returns the route of a path, or what finds it if its parameter is not an index alone."""
        if scope["type"] == "http":
            path, parameters = scope["state"]["path"], {}
            if path.startswith(_INDEXES):
                index, slash, rest = path.removeprefix(_INDEXES).partition("/")
                path, parameters = f"{_INDEXES}{{index}}{slash}{rest}", {"index": index}
            route = self._routes.get((scope["method"], path))
            if route:
                scope.update(route=route, path_params=parameters)
                return route.app
        return self.router

    def _methods(self, scope: Scope) -> set[str]:
        """Returns the methods that a path answers, of all of its routes.

        A path without a parameter is another one than that of the parameter it would be.
        """
        matching = [
            route
            for route in self.router.routes
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        ]
        fewest = min((len(route.param_convertors) for route in matching), default=0)
        closest = (route for route in matching if len(route.param_convertors) == fewest)
        return {m for route in closest for m in getattr(route, "answered", route.methods or ())}

    @cached_property
    def _routes(self) -> dict[tuple[str, str], DirectRoute]:
        return {
            (method, route.path): route
            for route in self.router.routes
            if isinstance(route, DirectRoute) and not route.param_convertors.keys() - {"index"}
            for method in route.answered
        }
