"""What all routes share: the state of the application, API keys, rate limits and deadlines."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from fastapi import Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from core.loopback import is_loopback
from service import schemas
from service.access.api_keys import ApiKey, ApiKeys, Role
from service.access.key_file import KeyFile
from service.access.rate_limit import Buckets, RateLimiter
from service.errors import RequestError
from service.http.exchange import exchange_of
from service.http.problems import MEDIA_TYPE, problem_response
from service.limits import AnswerBudget
from service.observe.metrics import Metrics
from service.pipeline.engine import Engine
from service.settings import Settings, plain

if TYPE_CHECKING:
    from service.pipeline.chat_server import ChatServer
    from service.pipeline.redis_tier import RedisGuard

_LOG = logging.getLogger("care.service")

# Headers that browsers add to cross-origin requests, and proxies to all requests.
_PROXY_HEADERS = ("origin", "forwarded", "x-forwarded-for")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what, and how much."""

    keys: ApiKeys
    key_file: KeyFile | None  # the file that they are read from, if there is one
    limiter: RateLimiter | None  # limits the rate of each key, if rates are limited

    @classmethod
    def of(
        cls,
        settings: Settings,
        redis: "RedisGuard | None" = None,
        buckets: Buckets | None = None,
    ) -> Self:
        """Reads the keys; `redis` shares rates among replicas, `buckets` among their workers."""
        key_file = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
        keys = key_file.keys if key_file else ApiKeys.parse(plain(settings.api_keys))
        limiter = None
        if settings.rate_limit:
            # Replicas of a service have the same secret and the same index.
            secret = sha256(plain(settings.cache_secret).encode()).digest()
            limiter = RateLimiter(
                settings.rate_limit,
                settings.rate_burst,
                redis,
                service=blake2b(settings.index.encode(), key=secret, digest_size=8).hexdigest(),
                largest=max(settings.max_batch, settings.max_embeddings),
                buckets=buckets,
            )
        return cls(keys, key_file, limiter)


@dataclass(frozen=True, slots=True)
class State:
    """The objects of one application that its routes use."""

    settings: Settings
    pair: str
    metrics: Metrics
    engine: Engine
    keys: ApiKeys
    limiter: RateLimiter | None
    answers: AnswerBudget
    chat: "ChatServer | None" = None  # what writes answers, if anything


def get_state(request: Request) -> State:
    """Returns the state of the application that handles a request."""
    return cast("State", request.scope["app"].state.service)


# Paths that need no key: probes, pages and the files of the pages. All others need one.
_OPEN = frozenset({"/", "/docs", "/health/live", "/health/ready"})
_OPEN_FILES = "/page/"


class RequireKey:
    """Middleware: a request carries a known bearer key, if any key is configured.

    It runs before routing, so that it covers each route, file and unknown path: 401 precedes 404.
    Open are the paths of `_OPEN` and `_OPEN_FILES`, and `/metrics` by `CARE_OPEN_METRICS`. The name
    of the key is stored in the state of the request for logs and rate limits. Metrics and logs name
    rejected requests by `routes`, those of the application.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = cast("State", scope["app"].state.service)
            if state.keys and not _is_open(scope["state"]["path"], state.settings):
                try:
                    scope["state"]["api_key"] = key = find_key(state, Headers(scope=scope))
                except RequestError as error:
                    state.metrics.rejections.labels(error.rejection).inc()
                    matching = (r for r in self._routes if r.matches(scope)[0] is not Match.NONE)
                    scope["route"] = next(matching, None)
                    await problem_response(error, scope)(scope, receive, send)
                    return
                scope["state"]["key"] = key.name
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> str:
    """Returns who sends a request, for a share of what is limited: its key, else its address.

    Behind a proxy all clients without keys have the address of the proxy.
    """
    if name := scope["state"].get("key"):
        return f"key {name}"
    return scope["client"][0] if scope.get("client") else ""


def find_key(state: State, headers: Mapping[str, str]) -> ApiKey:
    """Returns the key in the header Authorization; RequestError if it is missing or unknown."""
    scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
    key = state.keys.find(secret) if scheme.lower() == "bearer" else None
    if key is None:
        message = "the API key is missing or unknown: send 'Authorization: Bearer <key>'"
        raise RequestError("unauthorized", message)
    return key


def check_role(request: Request, role: Role) -> None:
    """Checks that a request may use the routes of a role; RequestError if it may not.

    Without any key, searching is open to everyone. Administration is then open to clients on this
    machine, if the service listens on a loopback address. Otherwise the key that `RequireKey` has
    found must have the role.
    """
    state = get_state(request)
    if not state.keys and (role == "search" or _is_local(request, state.settings.host)):
        return
    if role == "admin" and not state.keys.has("admin"):
        message = "this route needs a key with the role admin; none is configured"
        raise RequestError("no_admin_key", message)
    key: ApiKey | None = request.scope["state"].get("api_key")
    if key is None or not key.allows(role):
        name = key.name if key else ""
        message = f"the key '{name}' lacks the role {role}"
        raise RequestError("forbidden", message, key=name, role=role)


class RequireRole(HTTPBearer):
    """Dependency: the key of the request has a role; OpenAPI documents the key."""

    def __init__(self, role: Role) -> None:
        super().__init__(
            scheme_name="HTTPBearer",
            description="A key listed in CARE_API_KEYS or CARE_API_KEYS_FILE.",
        )
        self._role = role

    def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Checks the role; raises `RequestError`."""
        check_role(request, self._role)


class Anyone:
    """Dependency: anyone may call the route, with a key if its path needs one."""

    def __call__(self, request: Request) -> None:
        """Accepts a request."""


# Who may call a route: each has one of these as its dependency.
Roles = (RequireRole, Anyone)


def _is_open(path: str, settings: Settings) -> bool:
    if path == "/metrics":
        return settings.open_metrics
    return path in _OPEN or path.startswith(_OPEN_FILES)


def _is_local(request: Request, host: str) -> bool:
    """Returns whether a client on this machine connects to a loopback address without a proxy."""
    direct = not any(name in request.headers for name in _PROXY_HEADERS)
    client = request.client.host if request.client else ""
    return direct and is_loopback(host) and is_loopback(client)


def problem_responses(*statuses: int, model: type = schemas.Problem) -> dict[int | str, Any]:
    """Returns the OpenAPI description of the errors with these statuses, and of 500."""
    return {status: {"model": model, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


# The error statuses of routes that encode texts.
ENCODING_ERRORS = (400, 401, 403, 413, 415, 422, 429, 503, 504)

_about = "Deadline of the request [ms]; after it the response is 504. Default: CARE_TIMEOUT_MS."
_header = Header(alias="X-Request-Timeout-Ms", ge=1, le=60_000, description=_about)
Timeout = Annotated[int | None, _header]


async def charge_rate(request: Request, queries: int) -> None:
    """Charges the rate limit of the key for queries, or for texts to encode."""
    limiter = get_state(request).limiter
    if limiter and (
        wait := await limiter.admit(request.scope["state"].get("key", "anonymous"), queries)
    ):
        message = f"rate limit exceeded: retry after {wait:.3f} s"
        raise RequestError("rate_limited", message, retry_after=wait)


@contextmanager
def admitted(request: Request, timeout_ms: int | None, answer: int) -> Iterator[float]:
    """Yields the deadline of a request that waits, on the clock of the event loop [s].

    The block is cancelled if the client disconnects, and charges the budget of answers until it
    ends: RequestError if that is exceeded. `timeout_ms` is what the client asks for, if anything;
    `answer` is the estimated size of the answer [bytes].
    """
    state = get_state(request)
    of_request = request.scope["state"]
    deadline = of_request["arrived"] + (timeout_ms or state.settings.timeout_ms) / 1000
    work = asyncio.current_task()
    assert work

    def leave() -> None:
        of_request["client_left"]()
        work.cancel()

    with state.answers.charged(answer), _watched(request, leave):
        yield deadline


@contextmanager
def _watched(request: Request, leave: Callable[[], None]) -> Iterator[None]:
    """Calls `leave` if the client disconnects within the block."""
    if exchange := exchange_of(request.scope):
        exchange.on_disconnect(leave)
        try:
            yield
        finally:
            exchange.on_disconnect(None)
        return

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        leave()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
