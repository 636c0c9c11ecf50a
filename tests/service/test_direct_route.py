from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

from service.direct_route import DirectRoute


class Body(BaseModel):
    text: str


class RefusedError(Exception):
    pass


def refuse(request: Request) -> None:
    if "let-me-in" not in request.headers:
        raise RefusedError


async def later(request: Request) -> None: ...


def from_query(number: int) -> None: ...


def nested(of: Annotated[None, Depends(refuse)]) -> None: ...


async def body_only(body: Body) -> Any:
    return body


async def with_header(number: Annotated[int, Header(ge=1)] = 7) -> Any:
    return {"number": number}


def client_of(router: APIRouter) -> TestClient:
    app = FastAPI()
    app.include_router(router)
    return TestClient(app)


def test_a_route_reads_path_headers_and_body() -> None:
    router = APIRouter(route_class=DirectRoute)

    @router.post("/all/{name}")
    async def read(
        request: Request, name: str, body: Body, number: Annotated[int, Header()] = 7
    ) -> Any:
        return {"path": request.url.path, "name": name, "text": body.text, "number": number}

    client = client_of(router)
    response = client.post("/all/b%20c", json={"text": "a"}).json()
    assert response == {"path": "/all/b c", "name": "b c", "text": "a", "number": 7}
    headers = {"number": "3"}
    response = client.post("/all/b", json={"text": "a"}, headers=headers).json()
    assert response["number"] == 3


@pytest.mark.parametrize("where", ["router", "route"])
def test_dependencies_are_called_wherever_they_are_declared(where: str) -> None:
    declared = {"dependencies": [Depends(refuse)]}
    router = APIRouter(route_class=DirectRoute, **(declared if where == "router" else {}))
    router.add_api_route("/", body_only, methods=["POST"], **(declared if where == "route" else {}))
    client = client_of(router)
    with pytest.raises(RefusedError):
        client.post("/", json={"text": "a"})
    assert client.post("/", json={"text": "a"}, headers={"let-me-in": "1"}).status_code == 200


def test_dependencies_are_called_before_anything_is_read() -> None:
    router = APIRouter(route_class=DirectRoute, dependencies=[Depends(refuse)])
    router.add_api_route("/", body_only, methods=["POST"])
    router.add_api_route("/header", with_header, methods=["GET"])
    client = client_of(router)
    with pytest.raises(RefusedError):
        client.post("/", content=b"no JSON")
    with pytest.raises(RefusedError):
        client.get("/header", headers={"number": "0"})


async def takes_query(number: int) -> None: ...


async def takes_two_bodies(one: Body, other: Body) -> None: ...


async def takes_dependency(value: Annotated[None, Depends(from_query)]) -> None: ...


@pytest.mark.parametrize(
    ("endpoint", "dependencies"),
    [
        (takes_query, []),
        (takes_two_bodies, []),
        (takes_dependency, []),
        (body_only, [Depends(from_query)]),
        (body_only, [Depends(nested)]),
        (body_only, [Depends(later)]),
    ],
)
def test_a_parameter_that_a_route_does_not_read_is_an_error(
    endpoint: Callable[..., Any], dependencies: list[Any]
) -> None:
    """OpenAPI would document it, and the service ignore it."""
    router = APIRouter(route_class=DirectRoute)
    with pytest.raises(TypeError):
        router.add_api_route("/", endpoint, methods=["POST"], dependencies=dependencies)
