"""Errors of requests: each code has a status of HTTP and, if they are counted, a reason."""

from collections.abc import Sequence
from typing import Any

from core.errors import CareError, IndexVersionError
from service.observe.metrics import Rejection
from service.schemas import FieldError

_STATUSES = {
    "cors_refused": 400,
    "invalid_content_encoding": 400,
    "invalid_http": 400,
    "invalid_json": 400,
    "unauthorized": 401,
    "no_admin_key": 401,
    "forbidden": 403,
    "index_not_served": 403,
    "needs_key": 403,
    "outside_grant": 403,
    "model_not_found": 404,
    "unknown_document": 404,
    "unknown_index": 404,
    "unknown_write": 404,
    "index_busy": 409,
    "index_exists": 409,
    "index_has_alias": 409,
    "index_is_alias": 409,
    "index_protected": 409,
    "old_full_text": 409,
    "other_encoder": 409,
    "other_writer": 409,
    "document_changed": 412,
    "body_too_long": 413,
    "url_too_long": 414,
    "unsupported_content_encoding": 415,
    "unsupported_media_type": 415,
    "expectation_failed": 417,
    "bad_index_name": 422,
    "invalid_record": 422,
    "invalid_request": 422,
    "overloaded": 429,
    "rate_limited": 429,
    "headers_too_long": 431,
    "shutting_down": 503,
    "encoding_failed": 503,
    "writer_unavailable": 503,
    "self_test_failed": 503,
    "too_many_requests": 503,
    "deadline_exceeded": 504,
    "quota_exceeded": 507,
    "too_many_changes": 507,
}
_REJECTIONS: dict[str, Rejection] = {
    "unauthorized": "key",
    "overloaded": "queue",
    "rate_limited": "rate",
    "deadline_exceeded": "deadline",
}


class RequestError(CareError):
    """A request cannot be served; the code determines the HTTP status.

    `errors` are the invalid fields of the request; under `rejection` metrics count it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        errors: Sequence[FieldError] = (),
        rejection: Rejection | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, code=code, **fields)
        self.status = _STATUSES[code]
        self.rejection = rejection or _REJECTIONS.get(code)
        self.errors = errors


def is_request_error(code: str) -> bool:
    """Returns whether a code has a status of HTTP."""
    return code in _STATUSES


def unknown_index() -> RequestError:
    """Returns the error for an index that does not exist, or that the key may not see."""
    message = "there is no index of this name, or the key may not search it"
    return RequestError("unknown_index", message)


def shown(error: Exception) -> CareError:
    """Returns an error that clients and other processes may see; of an unexpected one its kind."""
    if isinstance(error, CareError):
        return error
    return IndexVersionError(f"an unexpected error: {type(error).__name__}", code="internal_error")
