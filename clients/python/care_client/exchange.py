"""One call of the service as a generator of steps, which a client of either kind takes.

A step is a request to send or a time to wait. The generator gets the response or the transport's
error of each request, decides about retries and returns the response of the last one.
"""

import json
import math
import random
import time
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from care_client.errors import (
    CareClientError,
    ConnectionFailedError,
    DeadlineError,
    InvalidRequestError,
    InvalidResponseError,
    error_class,
)
from care_client.models import FieldError, Problem

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# Statuses after which an equal request may succeed; 502 is a proxy's.
_TRANSIENT = (429, 502, 503)
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
# The service ends a request itself at the deadline; its answer needs time to arrive [s].
_GRACE = 1.0
_LONGEST_DEADLINE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Send:
    """Arguments of `httpx2.Client.request`."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause before a retry [s]."""

    seconds: float


Step = Send | Wait
Reply = httpx2.Response | httpx2.RequestError | None
Plan = Generator[Step, Reply, T]


@dataclass(frozen=True, slots=True)
class Call:
    """What a route is called with.

    Attributes:
        repeatable: Whether the request may be sent again after a failure.
        deadline: Whether the route reads `X-Request-Timeout-Ms`.
    """

    method: str
    path: str
    body: Any = None
    repeatable: bool = True
    deadline: bool = False


@dataclass(frozen=True, slots=True)
class Connection:
    """Where calls go, and how long and how often they are tried.

    Attributes:
        timeout: Time of a call with all its retries [s].
        retries: Maximum number of retries.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    retries: int

    def exchange(self, call: Call, timeout: float | None) -> Plan[httpx2.Response]:
        """Returns the response of a call with status 200.

        Raises:
            CareClientError: If the call failed, after the retries that it allows.
        """
        request_id = uuid.uuid4().hex
        headers = {**self.headers, "X-Request-ID": request_id}
        content = None
        if call.body is not None:
            content = json.dumps(call.body, ensure_ascii=False).encode()
            headers["Content-Type"] = "application/json"
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        for retry in range(self.retries + 1):
            left = end - time.monotonic()
            if call.deadline:
                milliseconds = min(max(1, int(left * 1000)), _LONGEST_DEADLINE_MS)
                headers["X-Request-Timeout-Ms"] = str(milliseconds)
            url = self.url + call.path
            reply = yield Send(call.method, url, dict(headers), content, max(left, 0) + _GRACE)
            if isinstance(reply, httpx2.Response) and reply.status_code == 200:
                return reply
            error, transient = _failure(reply, request_id)
            wait = error.retry_after or 0.0
            if not error.retry_after:
                backoff = min(_FIRST_BACKOFF * 2**retry, _LONGEST_BACKOFF)
                wait = random.uniform(0.5, 1) * backoff
            over = time.monotonic() + wait >= end
            if retry == self.retries or over or not (transient and call.repeatable):
                raise error
            yield Wait(wait)
        raise AssertionError("the last attempt returns or raises")


def read(model: type[M], response: httpx2.Response) -> M:
    """Returns the body of a response.

    Raises:
        InvalidResponseError: If it is not what the contract says.
    """
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        # Not chained, because the original error quotes the body.
        message = f"the response is no {model.__name__}: is this the address of the service?"
        code, status = "invalid_response", response.status_code
        raise InvalidResponseError(
            message, code=code, status=status, request_id=_request_id(response, "")
        ) from None


def checked(adapter: TypeAdapter[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request body without the fields that are None.

    Raises:
        InvalidRequestError: If a field has a wrong type.
    """
    given = {name: field for name, field in value.items() if field is not None}
    try:
        valid = adapter.validate_python(given)
        return dict(adapter.dump_python(valid, mode="json"))
    except ValidationError as error:
        errors = [
            FieldError(
                field=".".join(map(str, each["loc"])), code=each["type"], message=each["msg"]
            )
            for each in error.errors(include_input=False, include_url=False)
        ]
        message = "; ".join(f"{each.field}: {each.message}" for each in errors)
        raise InvalidRequestError(message, code="invalid_request", errors=errors) from None


def _failure(reply: Reply, request_id: str) -> tuple[CareClientError, bool]:
    """Returns the error of a reply, and whether an equal request may succeed."""
    if isinstance(reply, httpx2.TimeoutException):
        message = "the service did not respond in time"
        return DeadlineError(message, code="deadline_exceeded", request_id=request_id), False
    if not isinstance(reply, httpx2.Response):
        message = f"the service cannot be reached ({type(reply).__name__})"
        failed = ConnectionFailedError(message, code="connection_failed", request_id=request_id)
        return failed, isinstance(reply, httpx2.NetworkError | httpx2.RemoteProtocolError)
    status = reply.status_code
    try:
        problem = Problem.model_validate_json(reply.content)
    except ValidationError:
        problem = Problem(status=status, code=f"http_{status}", detail=f"status {status}")
    error = error_class(status)(
        problem.detail,
        code=problem.code,
        status=status,
        errors=problem.errors,
        request_id=problem.request_id or _request_id(reply, request_id),
        retry_after=_retry_after(reply.headers.get("Retry-After")),
    )
    return error, status in _TRANSIENT


def _request_id(response: httpx2.Response, sent: str) -> str:
    return str(response.headers.get("X-Request-ID", sent))


def _retry_after(header: str | None) -> float | None:
    """Returns the wait in a `Retry-After` header, which is a number or a date [s]."""
    if not header:
        return None
    try:
        if header.strip().isdecimal():
            return float(header)
        wait = parsedate_to_datetime(header).timestamp() - time.time()
        return max(0.0, wait) if math.isfinite(wait) else None
    except ValueError:
        return None
