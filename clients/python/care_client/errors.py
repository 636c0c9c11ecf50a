"""Errors of the client: one family, whose codes are those of the service."""

from collections.abc import Sequence
from typing import Any

from care_client.models import FieldError


class CareClientError(Exception):
    """A call failed. No message contains a query.

    Attributes:
        code: Stable identifier: of the service, or `client_closed`, `connection_failed`,
            `deadline_exceeded`, `http_not_shareable`, `invalid_address`, `invalid_environment`,
            `invalid_request`, `invalid_response`, `response_too_long`, and `http_STATUS` for a
            response of something else.
        status: HTTP status, if there was a response.
        errors: The invalid fields of the request, if any.
        request_id: Id of the request, which the log of the service has too.
        retry_after: Wait that the service asks for [s], if it does.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        errors: Sequence[FieldError] = (),
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.errors = list(errors)
        self.request_id = request_id
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call __init__ with the message alone, without the code.
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        request = f", request {self.request_id}" if self.request_id else ""
        return f"{super().__str__()} [{self.code}{request}]"


class ConnectionFailedError(CareClientError):
    """The service cannot be reached, or the connection broke."""


class DeadlineError(CareClientError):
    """The time-out of the call passed, here or in the service (504)."""


class InvalidRequestError(CareClientError):
    """The request is wrong (400, 404, 413, 415, 422), or an argument; `errors` names fields."""


class AccessError(CareClientError):
    """The API key is missing or unknown (401), or lacks the role (403)."""


class UnavailableError(CareClientError):
    """The service is overloaded (429) or cannot answer now (503)."""


class ServerError(CareClientError):
    """Another status: 500, or a response of something that is not the service."""


class InvalidResponseError(CareClientError):
    """The body of a response is not what the contract says, or too long."""


def invalid(field: str, reason: str) -> InvalidRequestError:
    """Returns the error of an argument; the reason has no value of it."""
    errors = [FieldError(field=field, code="value_error", message=reason)]
    return InvalidRequestError(f"{field}: {reason}", code="invalid_request", errors=errors)


def error_class(status: int) -> type[CareClientError]:
    """Returns the class of the error for a status."""
    if status in (401, 403):
        return AccessError
    if status in (429, 503):
        return UnavailableError
    if status == 504:
        return DeadlineError
    return InvalidRequestError if 400 <= status < 500 else ServerError
