"""The responses to errors, as `application/problem+json`."""

import math
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from core.breaker import UnavailableError
from core.errors import CareError, IndexVersionError, QueryError
from service.errors import RequestError
from service.schemas import FieldError, OpenAIError, OpenAIProblem, Problem

MEDIA_TYPE = "application/problem+json"
# An error body lists at most this many errors, and has at most this size [bytes].
_MAX_ERRORS = 16
_MAX_BYTES = 4096
# Fields and messages are cut to these many characters.
_MAX_FIELD = 96
_MAX_MESSAGE = 256

# Takes the place of the id of a request.
_ID = "request-id"

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


# Errors of which the response says what is wrong; others are unexpected.
EXPECTED = (HTTPException, RequestError, QueryError, IndexVersionError, UnavailableError)


def problem_response(error: Exception, scope: Scope) -> Response:
    """Returns the response for an error; for an unexpected one it contains no details."""
    status, code, detail = 500, "internal_error", "an unexpected error"
    errors: Sequence[FieldError] = ()
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, dict(error.headers or {})
        code = HTTPStatus(status).name.lower()
    elif isinstance(error, RequestError):
        status, code, detail, errors = error.status, error.code, str(error), error.errors
        if status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if code == "unsupported_content_encoding":
            headers["Accept-Encoding"] = "gzip, deflate"
    elif isinstance(error, QueryError):
        status, code, detail = 422, error.code, f"{error.field}: {error}"
        limit = error.fields.get("limit")
        errors = [FieldError(field=error.field, code=code, message=str(error), limit=limit)]
    elif isinstance(error, IndexVersionError | UnavailableError):
        status, code, detail = 503, error.code, str(error)
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        wait = error.fields.get("retry_after", 1) if isinstance(error, CareError) else 1
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    openai = f"{scope['state']['path']}/".startswith("/v1/")
    if not errors and not openai:
        before, after = _around_id(status, code, detail)
        content = before + scope["state"]["request_id"].encode() + after
        return Response(content, status, headers, MEDIA_TYPE)
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=code,
        detail=detail[: _MAX_FIELD + _MAX_MESSAGE],
        request_id=scope["state"]["request_id"],
        errors=[_cut(each) for each in errors[:_MAX_ERRORS]],
    )
    if openai:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = _OPENAI_TYPES.get(status, kind)
        first = problem.errors[0] if errors else None
        param, code = (first.field, first.code) if first else (None, code)
        error_object = OpenAIError(message=problem.detail, type=kind, param=param, code=code)
        problem = OpenAIProblem(**dict(problem), error=error_object)
    while len(content := problem.model_dump_json().encode()) > _MAX_BYTES and problem.errors:
        problem.errors.pop()
    return Response(content, status, headers, MEDIA_TYPE)


@lru_cache(maxsize=64)
def _around_id(status: int, code: str, detail: str) -> tuple[bytes, bytes]:
    """Returns the content of an error without fields, before and after the id of the request.

    Under overload most answers are the same error.
    """
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=code,
        detail=detail[: _MAX_FIELD + _MAX_MESSAGE],
        request_id=_ID,
    )
    before, _, after = problem.model_dump_json().rpartition(_ID)
    return before.encode(), after.encode()


def _cut(error: FieldError) -> FieldError:
    short = {"field": error.field[:_MAX_FIELD], "message": error.message[:_MAX_MESSAGE]}
    return error.model_copy(update=short)
