"""The routes that change documents, of the default index and of one that the path names."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query, Request
from fastapi import Path as PathParameter
from pydantic_core import to_json
from starlette.responses import Response

from core.conditions import parse_filter
from core.errors import QueryError
from core.types import Conjunction
from core.writes import MUST_EXIST, MUST_NOT_EXIST, Write, Written
from service import document_schemas as schemas
from service.access.guards import (
    RequireRole,
    Timeout,
    charge_rate,
    deadline_of,
    get_state,
    index_name,
    opened_index,
    visible_to,
    writes_of,
)
from service.errors import RequestError, is_request_error
from service.http.body import is_lines, parse_documents, read_body
from service.routes.direct_route import routes_for
from service.routes.document_stream import write_lines
from service.routes.search import DocumentId, both
from service.writes import before_deadline, changes

write_routes = routes_for(Depends(RequireRole("write")), tags=["documents"])

_TAG = re.compile(r'\*|"[\x21\x23-\x7e]*"')
_ERRORS = (400, 401, 403, 404, 409, 413, 415, 422, 429, 503, 504, 507)

Wait = Annotated[
    Literal["accepted"] | None,
    Query(
        description="With accepted the answer is 202 and an id, for GET …/writes/{id}, as soon as "
        "the request waits for its turn. Without it the answer is 200 once the changes are on "
        "disk, and every later search of this service finds them."
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        description="The ETag that GET …/documents/{id} gave: if the document has changed since, "
        "the answer is 412. With * the document must exist.",
    ),
]
IfNoneMatch = Annotated[
    Literal["*"] | None,
    Header(alias="If-None-Match", description="With * the document must not exist, else 412."),
]
WriteId = Annotated[str, PathParameter(description="Id of the answer with status 202.")]
_WRITTEN: dict[str, Any] = {
    "response_model": schemas.WriteResponse,
    "responses": {202: {"model": schemas.AcceptedResponse}},
}


@both(
    write_routes,
    "PUT",
    "/documents",
    *_ERRORS,
    412,
    openapi_extra=schemas.DOCUMENTS_BODY,
    **_WRITTEN,
)
async def put_documents(
    request: Request,
    wait: Wait = None,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
    timeout_ms: Timeout = None,
) -> Any:
    """Adds documents, and replaces those with the same ids.

    The body is one document, a list of documents, or lines of JSON (application/x-ndjson). A
    document that is equal to the stored one is unchanged, so that a repeated request changes
    nothing. Of a list, documents that break a rule are rejected, each with its reason, and the
    others are written. Lines are written in groups while they arrive, so their number and the
    length of the body have no limit; what was written stays if the request ends early.
    """
    state = get_state(request)
    content_type = request.headers.get("content-type")
    tag = _tag(if_match, if_none_match)
    if is_lines(content_type) and tag is None and not wait:
        return await write_lines(request, timeout_ms)
    body = await read_body(request.receive)
    documents, single = await parse_documents(content_type, body, state.settings)
    matches: dict[str, str] = {}
    if tag is not None:
        if not single:
            message = "If-Match and If-None-Match are for a request with one document"
            raise RequestError("invalid_request", message)
        # What is no id is rejected by the writer.
        matches[str(documents[0].get("_id", documents[0].get("id")))] = tag
    write = {"put": tuple(documents), "if_match": matches}
    return await _write(request, write, len(documents), wait, timeout_ms, single=single)


@both(write_routes, "POST", "/documents/delete", *_ERRORS, **_WRITTEN)
async def delete_documents(
    request: Request, body: schemas.DeleteRequest, wait: Wait = None, timeout_ms: Timeout = None
) -> Any:
    """Deletes the documents with these ids, or all that match a filter."""
    _check_type(request)
    if bool(body.ids) == bool(body.filter):
        message = "give either ids or a filter with a condition"
        raise QueryError("filter", message, code="invalid_filter")
    if body.filter:
        where = await _conditions(request, body.filter, timeout_ms)
        return await _write(request, {"delete_where": where}, 1, wait, timeout_ms)
    number, limit = len(body.ids), get_state(request).settings.max_documents
    if number > limit:
        message = f"has {number} entries; the limit is {limit} (CARE_MAX_DOCUMENTS)"
        raise QueryError("ids", message, code="batch_too_large", limit=limit)
    return await _write(request, {"delete": tuple(body.ids)}, number, wait, timeout_ms)


@both(write_routes, "DELETE", "/documents/{id:path}", *_ERRORS, 412, **_WRITTEN)
async def delete_document(
    request: Request,
    id: DocumentId,
    wait: Wait = None,
    if_match: IfMatch = None,
    timeout_ms: Timeout = None,
) -> Any:
    """Deletes a document; if there is none with this id, `missing` of the answer has it."""
    tag = _tag(if_match)
    write = {"delete": (id,), "if_match": {} if tag is None else {id: tag}}
    return await _write(request, write, 1, wait, timeout_ms, single=True)


@both(write_routes, "PATCH", "/documents/{id:path}", *_ERRORS, 412, **_WRITTEN)
async def update_metadata(
    request: Request,
    id: DocumentId,
    body: schemas.PatchRequest,
    wait: Wait = None,
    if_match: IfMatch = None,
    timeout_ms: Timeout = None,
) -> Any:
    """Replaces the metadata of a document, which is not encoded again."""
    _check_type(request)
    tag = _tag(if_match)
    write = {"patch": ((id, body.metadata),), "if_match": {} if tag is None else {id: tag}}
    return await _write(request, write, 1, wait, timeout_ms, single=True, must_exist=True)


@both(
    *(write_routes, "GET", "/writes/{id}", 401, 403, 404, 422, 429, 503, 504),
    response_model=schemas.WriteStateResponse,
)
async def write_state(request: Request, id: WriteId, timeout_ms: Timeout = None) -> Any:
    """Returns what became of a request with wait=accepted, for an hour after it."""
    index = index_name(request)
    async with before_deadline(deadline_of(request, timeout_ms)):
        written = await writes_of(request).result(index, id)
    result = None if written is None else _response(index, written)
    return {"state": "waiting" if written is None else "written", "result": result}


async def _write(
    request: Request,
    parts: Mapping[str, Any],
    documents: int,
    wait: str | None,
    timeout_ms: int | None,
    *,
    single: bool = False,
    must_exist: bool = False,
) -> Any:
    """Writes, and returns the answer.

    `documents` are charged to the rate. What is rejected of a `single` document is an error, and so
    is a missing one that `must_exist`.
    """
    await charge_rate(request, max(1, documents))
    index = index_name(request)
    write = Write(index, within=visible_to(request) or None, **parts)
    async with before_deadline(deadline_of(request, timeout_ms)):
        if wait:
            id_ = await writes_of(request).accept(write)
            return Response(to_json({"id": id_}), 202, media_type="application/json")
        written = await writes_of(request).write(write)
    request.scope["state"]["written"] = changes(written)
    if single and written.rejected:
        code, reason = written.rejected[0].code, written.rejected[0].reason
        raise (
            RequestError(code, reason)
            if is_request_error(code)
            else QueryError("body", reason, code=code)
        )
    if written.missing and write.if_match:
        raise RequestError("document_changed", "no document has this id")
    if written.missing and must_exist:
        raise RequestError("unknown_document", "no document has this id")
    return _response(index, written)


def _response(index: str, written: Written) -> dict[str, Any]:
    fields = written.as_json()
    version = fields.pop("version")
    del fields["number"]
    return {"index": {"name": index, "version": version}, **fields}


async def _conditions(
    request: Request, filter_: Mapping[str, Any], timeout_ms: int | None
) -> Conjunction:
    """Returns the conditions of a filter, whose fields the index must have."""
    parse_filter(filter_)
    opened = await opened_index(request, timeout_ms)
    return opened.snapshot.segment.filters.check(filter_, visible_to(request))


def _tag(if_match: str | None, if_none_match: str | None = None) -> str | None:
    """Returns the tag that a document must have, as `Write.if_match` has it; None for any."""
    if if_none_match is not None:
        if if_match is not None:
            message = "If-Match and If-None-Match contradict each other: send one of them"
            raise RequestError("invalid_request", message)
        return MUST_NOT_EXIST
    if if_match is None or if_match == "*":
        return if_match and MUST_EXIST
    if not _TAG.fullmatch(if_match) or if_match == '""':
        message = 'If-Match is neither * nor one ETag in quotes, such as "0123456789abcdef"'
        raise RequestError("invalid_request", message)
    return if_match.strip('"')


def _check_type(request: Request) -> None:
    """Checks that a body says that it is JSON: browsers send others from any page unasked."""
    if "content-type" not in request.headers:
        raise RequestError("unsupported_media_type", "send Content-Type: application/json")
