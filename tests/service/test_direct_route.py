from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import Cookie, Depends, FastAPI, Header, Query, Request
from fastapi.routing import APIRoute, APIRouter
from fastapi.testclient import TestClient
from pydantic import BaseModel
from starlette.routing import Mount

from core.manifest import IndexManifest
from service.access.api_keys import ApiKeys
from service.access.guards import Access, Anyone, RequireRole
from service.app import create_app
from service.errors import RequestError
from service.routes.direct_route import DirectRoute, routes_for
from service.settings import Settings
from tests.encoders import BigramEncoder
from tests.errors import raises


class Body(BaseModel):
    text: str


def from_query(number: int) -> None: ...


async def body_only(body: Body) -> Any:
    return body


async def with_header(number: Annotated[int, Header(ge=1)] = 7) -> Any:
    return {"number": number}


def client_of(router: APIRouter) -> TestClient:
    app = FastAPI()
    app.state.service = SimpleNamespace(
        settings=Settings(host="0.0.0.0"),
        access=Access(ApiKeys.parse("", "test"), None, (), None, None),
        catalog=SimpleNamespace(default_name="test"),
    )
    app.router.routes.extend(router.routes)
    return TestClient(app)


def test_a_route_reads_path_query_headers_and_body() -> None:
    router = routes_for(Depends(Anyone()))

    @router.post("/all/{name}")
    async def read(
        request: Request,
        name: str,
        body: Body,
        number: Annotated[int, Header()] = 7,
        size: Annotated[int, Query(ge=1)] = 8,
    ) -> Any:
        path = request.url.path
        return {"path": path, "name": name, "text": body.text, "number": number, "size": size}

    client = client_of(router)
    response = client.post("/all/b%20c", json={"text": "a"}).json()
    assert response == {"path": "/all/b c", "name": "b c", "text": "a", "number": 7, "size": 8}
    assert client.post("/all/b?size=9&other=1", json={"text": "a"}).json()["size"] == 9
    for wrong in ("0", "", "a"):
        with raises(RequestError, "invalid_request"):
            client.post(f"/all/b?size={wrong}", json={"text": "a"})
    headers = {"number": "3"}
    response = client.post("/all/b", json={"text": "a"}, headers=headers).json()
    assert response["number"] == 3


@pytest.mark.parametrize("parts", [[b'{"a":1}'], [b'{"a"', b":", b"1}"]])
def test_a_generator_is_sent_in_its_parts_and_then_closed(parts: list[bytes]) -> None:
    closed = []

    async def generate() -> AsyncGenerator[bytes, None]:
        try:
            for part in parts:
                yield part
        finally:
            closed.append(True)

    async def answer() -> Any:
        return generate()

    router = routes_for(Depends(Anyone()))
    router.add_api_route("/", answer, methods=["GET"])
    response = client_of(router).get("/")
    assert response.json() == {"a": 1}
    assert response.headers["content-type"] == "application/json"
    assert ("content-length" in response.headers) == (len(parts) == 1)
    assert closed == [True]


def test_the_role_is_checked_before_anything_is_read() -> None:
    router = routes_for(Depends(RequireRole("admin")))
    router.add_api_route("/", body_only, methods=["POST"])
    router.add_api_route("/header", with_header, methods=["GET"])
    client = client_of(router)
    with raises(RequestError, "needs_key"):
        client.post("/", content=b"no JSON")
    with raises(RequestError, "needs_key"):
        client.get("/header", headers={"number": "0"})


async def takes_cookie(number: Annotated[int, Cookie()]) -> None: ...


async def takes_two_bodies(one: Body, other: Body) -> None: ...


async def takes_dependency(value: Annotated[None, Depends(from_query)]) -> None: ...


@pytest.mark.parametrize("endpoint", [takes_cookie, takes_two_bodies, takes_dependency])
def test_a_parameter_that_a_route_does_not_read_is_an_error(endpoint: Callable[..., Any]) -> None:
    """OpenAPI would document it, and the service ignore it."""
    router = routes_for(Depends(Anyone()))
    with pytest.raises(TypeError):
        router.add_api_route("/", endpoint, methods=["POST"])


@pytest.mark.parametrize(
    "dependencies", [[], [Depends(from_query)], [Depends(Anyone()), Depends(RequireRole("admin"))]]
)
def test_a_route_without_one_role_is_an_error(dependencies: list[Any]) -> None:
    router = APIRouter(route_class=DirectRoute, dependencies=dependencies)
    with pytest.raises(TypeError):
        router.add_api_route("/", body_only, methods=["POST"])


def test_a_route_that_a_router_includes_fails() -> None:
    """FastAPI would serve it, without its limits."""
    app = FastAPI()
    router = routes_for(Depends(Anyone()))
    router.add_api_route("/", body_only, methods=["POST"])
    app.include_router(router)
    with pytest.raises(TypeError):
        TestClient(app).post("/", json={"text": "a"})


def test_every_path_of_the_service_is_a_direct_route(
    settings: Settings, manifest: IndexManifest
) -> None:
    """Other paths are files, and the OpenAPI document."""
    routes = create_app(settings, BigramEncoder()).routes
    direct = {route.path for route in routes if isinstance(route, DirectRoute)}
    assert {"/search", "/search/batch", "/v1/embeddings", "/index/reload"} <= direct
    others = [route for route in routes if not isinstance(route, DirectRoute)]
    assert {route.path for route in others if isinstance(route, Mount)} == {
        "/page",
        "/page/swagger",
    }
    assert [getattr(route, "path", route) for route in others if not isinstance(route, Mount)] == [
        "/openapi.json"
    ]
    assert not any(isinstance(route, APIRoute) for route in others)
