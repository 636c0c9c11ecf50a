"""The routes that create and delete indexes."""

from typing import Any

from fastapi import Depends, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from core.errors import IndexVersionError, QueryError
from core.versions import IndexFolder
from service import schemas
from service.access.guards import (
    RequireRole,
    Timeout,
    charge_rate,
    deadline_of,
    get_state,
    index_name,
    may,
    problem_responses,
    writes_of,
)
from service.document_schemas import CREATE_BODY, CreateRequest, DeletedIndexResponse
from service.errors import RequestError, unknown_index
from service.http.body import parse_body, read_body
from service.http.exchange import header
from service.routes.direct_route import routes_for
from service.routes.search import IndexName, described
from service.writes import before_deadline

# The index need not exist: the route checks the role in the one that it names.
create_routes = routes_for(Depends(RequireRole("admin", anywhere=True)), tags=["administration"])
delete_routes = routes_for(Depends(RequireRole("admin")), tags=["administration"])

_REQUEST: TypeAdapter[CreateRequest] = TypeAdapter(CreateRequest)
_ERRORS = (401, 403, 404, 409, 422, 429, 503, 504)


@create_routes.put(
    "/indexes/{index}",
    status_code=201,
    response_model=schemas.IndexResponse,
    responses=problem_responses(400, 413, 415, 507, *_ERRORS)
    | {200: {"model": schemas.IndexResponse}},
    openapi_extra=CREATE_BODY,
)
async def create_index(request: Request, index: IndexName, timeout_ms: Timeout = None) -> Any:
    """Creates an index without documents; if there is an equal one, the answer is 200."""
    state = get_state(request)
    content_type = header(request.scope, b"content-type")
    body = await read_body(request.receive) or bytearray(b"{}")
    asked: CreateRequest = await parse_body(_REQUEST, content_type, body, state.settings)
    try:
        IndexFolder(state.settings.indexes, index)
    except IndexVersionError as error:
        raise QueryError("index", str(error), code=error.code) from error
    name = _own_name(request, index)
    if not may(request, "admin", name):
        raise RequestError("forbidden", "the key lacks the role admin in this index", role="admin")
    if not state.catalog.serves(name):
        message = "CARE_SERVE_INDEXES does not name this index: choose a name that it does"
        raise RequestError("index_not_served", message)
    like = state.catalog.default_name
    if asked.like:
        try:
            like = state.catalog.real_name(asked.like)
            if not may(request, "search", like):
                raise unknown_index()
            state.catalog.check(like)
        except RequestError as error:
            raise RequestError(error.code, f"like: {error}") from error
    await charge_rate(request, 1)
    async with before_deadline(deadline_of(request, timeout_ms)):
        created = await writes_of(request).create(name, like, asked.filter_fields)
    request.scope["state"]["written"] = {"created": int(created)}
    deadline = deadline_of(request, timeout_ms)
    content = await described(await state.catalog.open(name, deadline), deadline)
    return Response(content, 201 if created else 200, media_type="application/json")


@delete_routes.delete(
    "/indexes/{index}",
    response_model=DeletedIndexResponse,
    responses=problem_responses(*_ERRORS),
)
async def delete_index(request: Request, index: IndexName, timeout_ms: Timeout = None) -> Any:
    """Deletes an index with all of its versions; searches that run can still end."""
    name = _own_name(request, index)
    if name == get_state(request).catalog.default_name:
        message = "the service needs its default index (CARE_INDEX), which is not deleted"
        raise RequestError("index_protected", message)
    await charge_rate(request, 1)
    async with before_deadline(deadline_of(request, timeout_ms)):
        documents = await writes_of(request).delete(name)
    request.scope["state"]["written"] = {"deleted": documents}
    return {"name": name, "documents": documents}


def _own_name(request: Request, index: str) -> str:
    """Returns the name of the index that a path names; RequestError if it is an alias."""
    name = index_name(request)
    if name != index:
        message = f"'{index}' is an alias of the index '{name}': name that index"
        raise RequestError("index_is_alias", message)
    return name
