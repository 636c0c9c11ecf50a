"""The client covers docs/openapi.json: whoever adds a field to the service adds it there too."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from care_client import AsyncClient, Client, models
from tests.clients.transport import Recorded, recorded

DOCUMENT = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text("utf-8"))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
# Arguments of the methods that need one.
ARGUMENTS: dict[str, list[Any]] = {
    "search": ["问题"],
    "search_batch": [["问题"]],
    "search_many": [["问题"]],
    "embeddings": ["问题"],
    "model": ["care-mini"],
    "document": ["d-1"],
    "put_document": [{"_id": "d-1", "text": "文本"}],
    "put_documents": [[{"_id": "d-1", "text": "文本"}]],
    "submit_documents": [[{"_id": "d-1", "text": "文本"}]],
    "write_state": ["d-1"],
    "delete_documents": [["d-1"]],
    "delete_document": ["d-1"],
    "update_metadata": ["d-1", {}],
    "create_index": ["of-a-clinic"],
    "delete_index": ["of-a-clinic"],
}
# Parameters of paths, and their values in these calls.
PARAMETERS = {"{model}": "care-mini", "{id}": "d-1", "{index}": "of-a-clinic"}


def methods() -> Iterator[str]:
    for name, _ in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            yield name


def called_path(path: str) -> str:
    """The path of a call, given that of the document."""
    for parameter, value in PARAMETERS.items():
        path = path.replace(parameter, value)
    return path


def known_fields(name: str) -> set[str]:
    """The fields of a schema that the client's class of the same name has."""
    model = getattr(models, name, None)
    assert model, f"clients/python/care_client/models.py lacks {name}"
    if issubclass(model, BaseModel):
        return set(model.model_fields)
    return set(model.__annotations__)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_client_knows_the_fields_of_each_schema(name: str) -> None:
    missing = set(SCHEMAS[name]["properties"]) - known_fields(name)
    assert not missing, f"add them to {name} in clients/python/care_client/models.py"


def test_the_client_knows_no_field_that_no_schema_has() -> None:
    for name, schema in SCHEMAS.items():
        assert known_fields(name) <= set(schema["properties"]), name


def test_the_methods_call_all_routes() -> None:
    requests = []
    for index in (None, "of-a-clinic"):
        client, sent = recorded(index=index)
        for name in methods():
            with pytest.raises(Recorded):
                getattr(client, name)(*ARGUMENTS.get(name, []))
        requests += sent
    called = {(request.method.lower(), request.url.path) for request in requests}
    documented = {
        (verb, called_path(path)) for path, verbs in DOCUMENT["paths"].items() for verb in verbs
    }
    assert called == documented


def test_the_deadline_is_sent_to_the_routes_that_read_it() -> None:
    client, requests = recorded()
    for name in methods():
        with pytest.raises(Recorded):
            getattr(client, name)(*ARGUMENTS.get(name, []))
    routes = {called_path(path): verbs for path, verbs in DOCUMENT["paths"].items()}
    for request in requests:
        route = routes[request.url.path][request.method.lower()]
        names = {parameter["name"] for parameter in route.get("parameters", ())}
        assert ("X-Request-Timeout-Ms" in request.headers) == ("X-Request-Timeout-Ms" in names)


def test_both_clients_have_the_same_routes_and_arguments() -> None:
    for name in methods():
        coroutine = getattr(AsyncClient, name)
        assert inspect.iscoroutinefunction(coroutine)
        assert inspect.signature(coroutine) == inspect.signature(getattr(Client, name))


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name.endswith("Request")])
def test_required_fields_of_requests_are_required(name: str) -> None:
    required = getattr(models, name).__required_keys__
    assert required == set(SCHEMAS[name].get("required", ()))
