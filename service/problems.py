"""Errors as `application/problem+json`; a table from exception to status."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import IndexVersionError, QueryError
from service.engine import OverloadedError
from service.schemas import FieldError, Problem

MEDIA_TYPE = "application/problem+json"

_MAX_ERRORS = 16
_NOT_JSON = FieldError(field="body", message="is not valid JSON")


def problem_response(
    status: int,
    detail: str,
    request_id: str,
    errors: Sequence[FieldError] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    """Builds the response for an error."""
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        request_id=request_id,
        errors=list(errors),
    )
    return Response(
        problem.model_dump_json(), status_code=status, headers=headers, media_type=MEDIA_TYPE
    )


def add_problem_handlers(app: FastAPI) -> None:
    """Teaches an application how each exception is answered."""
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(QueryError, _bad_query)
    app.add_exception_handler(OverloadedError, _overloaded)
    app.add_exception_handler(IndexVersionError, _bad_index)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(HTTPStatus.BAD_REQUEST, _unreadable_body)


def _respond(
    request: Request,
    status: int,
    detail: str,
    errors: Sequence[FieldError] = (),
    headers: dict[str, str] | None = None,
) -> Response:
    return problem_response(status, detail, request.state.request_id, errors, headers)


def _invalid_request(request: Request, error: Exception) -> Response:
    """Names the fields at fault; the input itself, which may be a query, is left out."""
    found = cast("RequestValidationError", error).errors()
    errors = [_field_error(e) for e in found[:_MAX_ERRORS]]
    first = errors[0]
    return _respond(request, 422, f"{first.field}: {first.message}", errors)


def _field_error(error: dict[str, object]) -> FieldError:
    location = cast("tuple[int | str, ...]", error["loc"])[1:]
    if error["type"] == "json_invalid":
        return _NOT_JSON
    field = ".".join(str(part)[:64] for part in location) or "body"
    field = field.encode(errors="replace").decode()
    return FieldError(field=field, message=str(error["msg"]))


def _unreadable_body(request: Request, error: Exception) -> Response:
    """Answers FastAPI's 400 for what its parser gives up on: bytes that are not UTF-8, for one."""
    return _respond(request, 422, f"{_NOT_JSON.field}: {_NOT_JSON.message}", [_NOT_JSON])


def _bad_query(request: Request, error: Exception) -> Response:
    field, message = cast("QueryError", error).field, str(error)
    return _respond(request, 422, f"{field}: {message}", [FieldError(field=field, message=message)])


def _overloaded(request: Request, error: Exception) -> Response:
    return _respond(request, 429, "the service is busy: try again", headers={"Retry-After": "1"})


def _bad_index(request: Request, error: Exception) -> Response:
    return _respond(request, 503, f"the index was not loaded: {error}")


def _http_error(request: Request, error: Exception) -> Response:
    http = cast("HTTPException", error)
    headers = dict(http.headers) if http.headers else None
    return _respond(request, http.status_code, http.detail, headers=headers)
