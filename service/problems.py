"""Errors as `application/problem+json`; a table from exception to status."""

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from core.errors import IndexVersionError, QueryError
from service.breaker import UnavailableError
from service.engine import NotReadyError
from service.metrics import Rejection
from service.pipeline import DeadlineError, OverloadedError
from service.rate_limit import RateLimitedError
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


def retry_after(seconds: float) -> dict[str, str]:
    """Builds the header that tells a client when to come again, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def add_problem_handlers(app: FastAPI) -> None:
    """Teaches an application how each exception is answered.

    All handlers are coroutines: others would be run in threads, which under overload take the
    processors from those that encode.
    """
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(QueryError, _bad_query)
    app.add_exception_handler(OverloadedError, _overloaded)
    app.add_exception_handler(RateLimitedError, _rate_limited)
    app.add_exception_handler(DeadlineError, _too_late)
    app.add_exception_handler(NotReadyError, _not_ready)
    app.add_exception_handler(UnavailableError, _unavailable)
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


async def _invalid_request(request: Request, error: Exception) -> Response:
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
    return FieldError(field=field, message=str(error["msg"]))


async def _unreadable_body(request: Request, error: Exception) -> Response:
    """Answers FastAPI's 400 for what its parser gives up on: bytes that are not UTF-8, for one."""
    return _respond(request, 422, f"{_NOT_JSON.field}: {_NOT_JSON.message}", [_NOT_JSON])


async def _bad_query(request: Request, error: Exception) -> Response:
    field, message = cast("QueryError", error).field, str(error)
    return _respond(request, 422, f"{field}: {message}", [FieldError(field=field, message=message)])


def _reject(request: Request, reason: Rejection) -> None:
    request.app.state.service.metrics.rejections.labels(reason).inc()


async def _overloaded(request: Request, error: Exception) -> Response:
    _reject(request, "queue")
    return _respond(request, 429, "the service is busy: try again", headers=retry_after(1))


async def _rate_limited(request: Request, error: Exception) -> Response:
    _reject(request, "rate")
    wait = retry_after(cast("RateLimitedError", error).wait)
    return _respond(request, 429, "this key asks too often: try again", headers=wait)


async def _too_late(request: Request, error: Exception) -> Response:
    _reject(request, "deadline")
    return _respond(request, 504, "the deadline passed before the answer was ready")


async def _not_ready(request: Request, error: Exception) -> Response:
    return _respond(request, 503, str(error), headers=retry_after(1))


async def _unavailable(request: Request, error: Exception) -> Response:
    detail = "the vectors cannot be searched now: try again"
    return _respond(request, 503, detail, headers=retry_after(1))


async def _bad_index(request: Request, error: Exception) -> Response:
    return _respond(request, 503, f"the index was not loaded: {error}")


async def _http_error(request: Request, error: Exception) -> Response:
    http = cast("HTTPException", error)
    headers = dict(http.headers) if http.headers else None
    return _respond(request, http.status_code, http.detail, headers=headers)
