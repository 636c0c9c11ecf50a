"""What all routes share: the state of the application, API keys, rate limits and deadlines."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param

from service import schemas
from service.answers import AnswerBudget
from service.api_keys import ApiKeys, Role
from service.engine import Engine
from service.metrics import Metrics
from service.problems import MEDIA_TYPE, RequestError
from service.rate_limit import RateLimiter
from service.settings import Settings

# Headers that browsers add to cross-origin requests, and proxies to all requests.
_PROXY_HEADERS = ("origin", "forwarded", "x-forwarded-for")


@dataclass(frozen=True, slots=True)
class State:
    """The objects of one application that its routes use; `pair` is the name of the pair."""

    settings: Settings
    pair: str
    metrics: Metrics
    engine: Engine
    keys: ApiKeys
    limiter: RateLimiter | None
    answers: AnswerBudget


def get_state(request: Request) -> State:
    """Returns the state of the application that handles a request."""
    return cast("State", request.app.state.service)


class RequireRole(HTTPBearer):
    """Dependency: the request carries a bearer key with a role; OpenAPI documents the key.

    Without any key in `CARE_API_KEYS`, searching is open to everyone. Administration is then open
    to clients on this machine, if the service listens on a loopback address.
    """

    def __init__(self, role: Role) -> None:
        super().__init__(scheme_name="HTTPBearer", description="A key listed in CARE_API_KEYS.")
        self._role = role

    def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Stores the name of the key in the request's state.

        Raises:
            RequestError: If the key is missing or unknown, or lacks the role.
        """
        state = get_state(request)
        is_open = self._role == "search" or _is_local(request, state.settings.host)
        if not state.keys and is_open:
            return
        if self._role == "admin" and not state.keys.has("admin"):
            message = "this route needs a key with the role admin; CARE_API_KEYS lists no such key"
            raise RequestError("no_admin_key", message)
        scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
        key = state.keys.find(secret) if scheme.lower() == "bearer" else None
        if key is None:
            message = "the API key is missing or unknown: send 'Authorization: Bearer <key>'"
            raise RequestError("unauthorized", message)
        if not key.allows(self._role):
            message = f"the key '{key.name}' lacks the role {self._role}"
            raise RequestError("forbidden", message, key=key.name, role=self._role)
        request.state.key = key.name


class Anyone:
    """Dependency: anyone may call the route."""

    def __call__(self, request: Request) -> None:
        """Accepts a request."""


# Who may call a route: each has one of these as its dependency.
Roles = (RequireRole, Anyone)


def _is_local(request: Request, host: str) -> bool:
    """Returns whether a client on this machine connects to a loopback address without a proxy."""
    peer = request.client.host if request.client else ""
    direct = not any(name in request.headers for name in _PROXY_HEADERS)
    return direct and _is_loopback(host) and _is_loopback(peer)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def problem_responses(*statuses: int, model: type = schemas.Problem) -> dict[int | str, Any]:
    """Returns the OpenAPI description of the errors with these statuses, and of 500."""
    return {status: {"model": model, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


# The error statuses of routes that encode texts.
ENCODING_ERRORS = (400, 401, 403, 413, 415, 422, 429, 503, 504)

_about = "Deadline of the request [ms]; after it the response is 504. Default: CARE_TIMEOUT_MS."
_header = Header(alias="X-Request-Timeout-Ms", ge=1, le=60_000, description=_about)
Timeout = Annotated[int | None, _header]


@asynccontextmanager
async def admitted(
    request: Request, queries: int, timeout_ms: int | None, answer: int
) -> AsyncIterator[float]:
    """Charges the rate limit of the key for queries, then yields the deadline of the request.

    The deadline is on the clock of the event loop [s]. The block is cancelled if the client
    disconnects, and charges the budget of answers until it ends.

    Args:
        request: The request.
        queries: Number of queries, or of texts to encode.
        timeout_ms: The time-out that the client asks for [ms], if any.
        answer: Estimated size of the answer [bytes].

    Raises:
        RequestError: If the rate limit is exceeded, or the budget of answers.
    """
    state = get_state(request)
    key = getattr(request.state, "key", "anonymous")
    if state.limiter and (wait := await state.limiter.admit(key, queries)):
        message = f"rate limit exceeded: retry after {wait:.3f} s"
        raise RequestError("rate_limited", message, retry_after=wait)
    work = asyncio.current_task()
    assert work

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        with state.answers.charged(answer):
            yield request.state.arrived + (timeout_ms or state.settings.timeout_ms) / 1000
    finally:
        watching.cancel()
