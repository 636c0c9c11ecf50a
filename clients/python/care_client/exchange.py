"""What a call of either client sends, and what it makes of the response; nothing waits here."""

import json
import math
import random
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from numbers import Integral, Real
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx2
from pydantic import BaseModel, TypeAdapter, ValidationError

from care_client.errors import (
    CareClientError,
    ConnectionFailedError,
    DeadlineError,
    InvalidRequestError,
    InvalidResponseError,
    error_class,
    invalid,
)
from care_client.models import SEARCH_REQUEST, FieldError, Problem, WriteResponse

M = TypeVar("M", bound=BaseModel)

URL = "http://127.0.0.1:8000"
# The default of CARE_MAX_BATCH; a service with a lower limit names it in its error.
BATCH = 64
# Documents of a request: two processors encode them within the default of CARE_TIMEOUT_MS.
DOCUMENTS = 50
MAX_RESPONSE_BYTES = 64 * 2**20
# Statuses after which an equal request may succeed; 502 is a proxy's.
_TRANSIENT = (429, 502, 503)
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
# The service ends a request itself at the deadline; its answer needs time to arrive [s].
_GRACE = 1.0
_LONGEST_DEADLINE_MS = 60_000
_LONGEST_TIMEOUT = 86_400


@dataclass(frozen=True, slots=True)
class Connection:
    """Where calls go, and how long [s, with all retries] and how often they are tried.

    Paths of the index begin with `prefix`, "" for the default one.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    timeout: float
    retries: int
    max_response_bytes: int
    prefix: str = ""

    @classmethod
    def to(
        cls,
        url: str,
        index: str | None,
        api_key: str | None,
        timeout: float,
        retries: int,
        max_response_bytes: int,
    ) -> Self:
        """Returns a connection of these arguments, which are checked."""
        number("timeout", timeout, Real, 0, _LONGEST_TIMEOUT)
        number("retries", retries, Integral, 0)
        number("max_response_bytes", max_response_bytes, Integral, 1)
        headers = {"Accept-Encoding": "identity"}  # what is read has then the size of the response
        if key := _key(api_key):
            headers["Authorization"] = f"Bearer {key}"
        prefix = "" if index is None else f"/indexes/{segment('index', index)}"
        return cls(_address(url), headers, timeout, retries, max_response_bytes, prefix)

    def of_index(self, path: str) -> str:
        """Returns the path of the index for that of the default index."""
        return self.prefix + path.removeprefix("/index") if self.prefix else path


@dataclass(frozen=True, slots=True)
class Call:
    """What a route is called with.

    Attributes:
        repeatable: Whether the request may be sent again after a failure.
        deadline: Whether the route reads `X-Request-Timeout-Ms`.
        headers: Further headers.
    """

    method: str
    path: str
    body: Any = None
    repeatable: bool = True
    deadline: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a call; retries send it again.

    Attributes:
        deadline: When the call ends for the service, in the time of `time.monotonic`.
    """

    connection: Connection
    call: Call
    id: str
    content: bytes | None
    deadline: float

    @classmethod
    def of(cls, connection: Connection, call: Call, timeout: float | None) -> Self:
        """Returns the request of a call that begins now; `timeout` is its own [s], if any."""
        content = None if call.body is None else _encoded(call.body)
        if timeout is None:
            timeout = connection.timeout
        number("timeout", timeout, Real, 0, _LONGEST_TIMEOUT)
        return cls(connection, call, uuid.uuid4().hex, content, time.monotonic() + timeout)

    @property
    def url(self) -> str:
        """Its address."""
        return self.connection.url + self.call.path

    @property
    def headers(self) -> dict[str, str]:
        """Its headers, with the time that the service has now."""
        headers = {**self.connection.headers, **self.call.headers, "X-Request-ID": self.id}
        if self.content is not None:
            headers["Content-Type"] = "application/json"
        if self.call.deadline:
            milliseconds = max(1, int((self.deadline - time.monotonic()) * 1000))
            headers["X-Request-Timeout-Ms"] = str(min(milliseconds, _LONGEST_DEADLINE_MS))
        return headers

    @property
    def end(self) -> float:
        """When its response must be complete, in the time of `time.monotonic`."""
        return self.deadline + _GRACE

    @property
    def timeout(self) -> float:
        """The time that is left until then [s]."""
        return self.end - time.monotonic()


@dataclass(slots=True)
class Answer:
    """A response to a request, whose body is added part by part."""

    status: int
    headers: Mapping[str, str]
    request: Request
    body: bytearray = field(default_factory=bytearray)

    @property
    def too_long(self) -> bool:
        """Whether the body is longer than the client allows."""
        return len(self.body) > self.request.connection.max_response_bytes

    def add(self, chunk: bytes) -> bool:
        """Adds a part of the body; returns whether the next is wanted, TimeoutError if too late."""
        self.body += chunk
        if self.request.timeout < 0:
            raise TimeoutError
        return not self.too_long

    def text(self) -> str:
        """Returns the body as text."""
        return self.body.decode("utf-8", "replace")


Reply = Answer | Exception


def wait_or_raise(request: Request, reply: Reply, retries: int) -> float:
    """Returns the wait before a request is sent again [s]; raises the error if it must not be.

    `reply` may be the error of the transport; `retries` are those before this one.
    """
    error, transient = _failure(reply, request.id)
    wait = error.retry_after or 0.0
    if not error.retry_after:
        backoff = min(_FIRST_BACKOFF * 2**retries, _LONGEST_BACKOFF)
        wait = random.uniform(0.5, 1) * backoff
    over = time.monotonic() + wait >= request.deadline
    last = retries == request.connection.retries
    if last or over or not (transient and request.call.repeatable):
        raise error
    return wait


def number(name: str, value: float, kind: type, least: float, most: float = math.inf) -> None:
    """Checks a numeric argument.

    Raises:
        InvalidRequestError: If it is no number of the kind, or outside the limits; a time is
            more than the least.
    """
    inside = isinstance(value, kind) and (least < value if kind is Real else least <= value)
    if not (inside and value <= most):
        what = "number above" if kind is Real else "whole number from"
        raise invalid(name, f"must be a {what} {least}" + (f" up to {most}" * (most < math.inf)))


def read(model: type[M], response: Answer) -> M:
    """Returns the body of a response; InvalidResponseError if it breaks the contract."""
    try:
        return model.model_validate_json(response.body)
    except ValidationError:
        # Not chained, because the original error quotes the body.
        message = f"the response is no {model.__name__}: is this the address of the service?"
        code, status = "invalid_response", response.status
        raise InvalidResponseError(
            message, code=code, status=status, request_id=_request_id(response)
        ) from None


def checked(adapter: TypeAdapter[Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body without what is None; InvalidRequestError for what JSON cannot have."""
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
    except ValueError:
        # A field that this version does not know; the original error can quote it.
        raise invalid("options", "have a value that JSON cannot have") from None


def search_bodies(
    queries: Iterable[str | Mapping[str, Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the body of each query of a batch; options of its own replace the others."""
    if isinstance(queries, str | bytes | Mapping) or not isinstance(queries, Iterable):
        raise invalid("queries", "is no list of queries")
    return [
        checked(
            SEARCH_REQUEST,
            {**options, **(query if isinstance(query, Mapping) else {"query": query})},
        )
        for query in queries
    ]


def moved(error: InvalidRequestError, before: int) -> InvalidRequestError:
    """Returns the error of a batch before which so many queries or documents were sent."""

    def placed(text: str) -> str:
        found = re.match(r"(queries|documents)\.(\d+)", text)
        return f"{found[1]}.{int(found[2]) + before}{text[found.end() :]}" if found else text

    error.args = (placed(error.args[0]),)
    error.errors = [each.model_copy(update={"field": placed(each.field)}) for each in error.errors]
    return error


def conditional(if_match: str | None, *, only_new: bool = False) -> dict[str, Any]:
    """Returns the fields of a call that a document must meet; such a call is not repeated."""
    if if_match is not None and not (isinstance(if_match, str) and if_match.isascii()):
        raise invalid("if_match", "is no etag of a document")
    headers = {} if if_match is None else {"If-Match": if_match}
    if only_new:
        headers["If-None-Match"] = "*"
    return {"headers": headers, "repeatable": not headers}


def document_bodies(documents: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns documents as a list; InvalidRequestError if they are no list of mappings."""
    if isinstance(documents, str | bytes | Mapping) or not isinstance(documents, Iterable):
        raise invalid("documents", "is no list of documents")
    listed = list(documents)
    for position, document in enumerate(listed):
        if not isinstance(document, Mapping):
            raise invalid(f"documents.{position}", "is no mapping with _id and text")
    return listed


def smaller_batch(error: InvalidRequestError, sent: int) -> int:
    """Returns how many documents to send in place of `sent`; raises any other error."""
    limit = error.errors[0].limit if error.errors else None
    if error.code == "batch_too_large" and limit and limit < sent:
        return limit
    if error.code == "body_too_long" and sent > 1:
        return sent // 2
    raise error


def added_up(total: WriteResponse, response: WriteResponse, before: int) -> WriteResponse:
    """Returns the sums of two results; `before` documents were sent before those of the second."""
    rejected = [
        one.model_copy(update={"position": one.position + before}) for one in response.rejected
    ]
    counts = ("added", "replaced", "deleted", "unchanged")
    return response.model_copy(
        update={
            **{name: getattr(total, name) + getattr(response, name) for name in counts},
            "missing": total.missing + response.missing,
            "rejected": total.rejected + rejected,
        }
    )


def segment(name: str, text: str) -> str:
    """Returns the text of an argument as one segment of a path."""
    if not isinstance(text, str):
        raise invalid(name, "is no text")
    # httpx2 would resolve the segments "." and "..". No stored text has an unpaired surrogate.
    return quote(text, safe="", errors="surrogatepass").replace(".", "%2E")


def parameters(**values: str | int | None) -> str:
    """Returns the query of an address, with its `?`, for the arguments that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, str | int):
            raise invalid(name, "is neither text nor a whole number")
    return "?" + urlencode(given, errors="surrogatepass") if given else ""


def _encoded(body: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, default=dict).encode()
    except (TypeError, ValueError):
        reason = "has an unpaired surrogate, a number that is not finite, or a value JSON lacks"
        if isinstance(body, Sequence):
            body = {f"documents.{position}": document for position, document in enumerate(body)}
        if len(body) > 1:
            for name, value in body.items():
                _encoded({name: value})
        raise invalid(next(iter(body)), reason) from None


def _address(url: str) -> str:
    try:
        address = httpx2.URL(url)
        address.host.encode("idna")
        valid = (
            isinstance(url, str)
            and address.scheme in ("http", "https")
            and address.host
            and (address.port is None or 0 < address.port < 65_536)
            and not address.query
            and not address.fragment
        )
    except (httpx2.InvalidURL, TypeError, ValueError):
        valid = False
    if not valid:
        # Not quoted, because it can contain a password.
        message = "the address of the service is invalid: use http://host:port"
        raise InvalidRequestError(message, code="invalid_address")
    return url.rstrip("/")


def _key(api_key: str | None) -> str:
    """Returns a key as a header can have it, without the line end of a file."""
    if api_key is None:
        return ""
    if not isinstance(api_key, str) or not (key := api_key.strip()).isascii():
        raise invalid("api_key", "is no ASCII text")
    if not key.isprintable():
        raise invalid("api_key", "has a control character")
    return key


def _failure(reply: Reply, request_id: str) -> tuple[CareClientError, bool]:
    """Returns the error of a reply, and whether an equal request may succeed."""
    if isinstance(reply, CareClientError):
        return reply, False
    if isinstance(reply, httpx2.TimeoutException | TimeoutError):
        message = "the service did not respond in time"
        return DeadlineError(message, code="deadline_exceeded", request_id=request_id), False
    if isinstance(reply, httpx2.InvalidURL | httpx2.LocalProtocolError):
        message = f"the request is no valid HTTP ({type(reply).__name__})"
        return InvalidRequestError(message, code="invalid_request", request_id=request_id), False
    if not isinstance(reply, Answer):
        message = f"the service cannot be reached ({type(reply).__name__})"
        failed = ConnectionFailedError(message, code="connection_failed", request_id=request_id)
        return failed, isinstance(reply, httpx2.NetworkError | httpx2.RemoteProtocolError)
    status = reply.status
    if reply.too_long:
        message = "the response is longer than max_response_bytes of the client"
        code, request_id = "response_too_long", _request_id(reply, request_id)
        long = InvalidResponseError(message, code=code, status=status, request_id=request_id)
        return long, False
    try:
        problem = Problem.model_validate_json(reply.body)
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


def _request_id(response: Answer, sent: str = "") -> str:
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
