"""What all routes share: the state of the application, API keys, rate limits and deadlines."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast
from urllib.parse import urlsplit

from fastapi import Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from core.loopback import is_loopback
from core.types import Conjunction
from service import schemas
from service.access.api_keys import ApiKeys
from service.access.grants import EVERYTHING, Caller, Grant, Role
from service.access.key_file import FollowedFile, KeyFile
from service.access.rate_limit import Buckets, RateLimiter
from service.access.tokens import Tokens
from service.catalog import Catalog, Opened
from service.errors import RequestError, unknown_index
from service.http.exchange import exchange_of
from service.http.problems import MEDIA_TYPE, problem_response
from service.limits import AnswerBudget
from service.observe.metrics import Metrics
from service.pipeline.engine import Engine
from service.settings import Settings, plain
from service.writes import Writes

if TYPE_CHECKING:
    from service.pipeline.chat_server import ChatServer
    from service.pipeline.redis_tier import RedisGuard

_LOG = logging.getLogger("care.service")

# Subjects of tokens, and indexes, have these many rates each: those of one bucket share its rate.
_BUCKETS = 1 << 13

# Headers that proxies add to requests.
_PROXY_HEADERS = ("forwarded", "x-forwarded-for")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask for what, and how much."""

    keys: ApiKeys
    tokens: Tokens | None  # what verifies signed tokens, if they are accepted
    files: Sequence[FollowedFile[Any]]  # the files that keys and tokens are verified by
    limiter: RateLimiter | None  # limits the rate of each key, if rates are limited
    index_limiter: RateLimiter | None  # limits that of each index, if it is limited

    @classmethod
    def of(
        cls,
        settings: Settings,
        redis: "RedisGuard | None" = None,
        buckets: Buckets | None = None,
    ) -> Self:
        """Reads the keys; `redis` shares rates among replicas, `buckets` among their workers."""
        files: list[FollowedFile[Any]] = []
        if settings.api_keys_file:
            key_file = KeyFile(settings.api_keys_file, settings.index)
            files.append(key_file)
            keys = key_file.keys
        else:
            keys = ApiKeys.parse(plain(settings.api_keys), settings.index)
        tokens = None
        if settings.token_keys:
            token_file = token_key_file(settings, settings.token_keys)
            files.append(token_file)
            tokens = token_file.keys
        # Replicas of a service have the same secret and the same index.
        secret = sha256(plain(settings.cache_secret).encode()).digest()
        limiter = partial(
            RateLimiter,
            guard=redis,
            service=blake2b(settings.index.encode(), key=secret, digest_size=8).hexdigest(),
            largest=max(settings.max_batch, settings.max_embeddings, settings.max_documents),
            buckets=buckets,
        )
        of_keys = of_indexes = None
        if settings.rate_limit:
            of_keys = limiter(settings.rate_limit, settings.rate_burst)
        if settings.index_rate_limit:
            of_indexes = limiter(settings.index_rate_limit, settings.index_rate_burst)
        return cls(keys, tokens, files, of_keys, of_indexes)

    @property
    def is_open(self) -> bool:
        """Whether the service has neither keys nor tokens."""
        return not self.keys and self.tokens is None


def token_key_file(settings: Settings, path: Path) -> FollowedFile[Tokens]:
    """Reads the keys of `CARE_TOKEN_KEYS`."""
    how = settings.token_algorithms, settings.token_audience, settings.token_issuer
    return FollowedFile(path, lambda content: Tokens(content, *how), "CARE_TOKEN_KEYS")


@dataclass(frozen=True, slots=True)
class State:
    """The objects of one application that its routes use."""

    settings: Settings
    pair: str
    metrics: Metrics
    engine: Engine  # of the default index
    catalog: Catalog
    access: Access
    answers: AnswerBudget
    chat: "ChatServer | None"  # what writes answers, if anything
    writes: Writes | None  # what changes documents, if anything


def get_state(request: Request) -> State:
    """Returns the state of the application that handles a request."""
    return cast("State", request.scope["app"].state.service)


def writes_of(request: Request) -> Writes:
    """Returns what sends writes; RequestError if the service has no writer process."""
    writes = get_state(request).writes
    if writes is None:
        message = "this service has no process that writes documents"
        raise RequestError("writer_unavailable", message)
    return writes


def index_name(request: Request) -> str:
    """Returns the name of the index that a request is about.

    The path names it, or an alias; other paths are about the default index. An alias that changes
    while the request is handled changes nothing for it. RequestError if it is no name of an index.
    """
    of_request: dict[str, Any] = request.scope["state"]
    if "index" not in of_request:
        catalog, name = get_state(request).catalog, request.path_params.get("index")
        of_request["index"] = catalog.default_name if name is None else catalog.real_name(name)
    index: str = of_request["index"]
    return index


async def opened_index(request: Request, timeout_ms: int | None = None) -> Opened:
    """Returns the index that a request is about, and opens it if needed; see `Catalog.open`."""
    catalog = get_state(request).catalog
    if "index" not in request.path_params:
        return catalog.default
    return await catalog.open(index_name(request), deadline_of(request, timeout_ms))


# Paths that need no key: probes, pages and the files of the pages. All others need one.
_OPEN = frozenset({"/", "/docs", "/health/live", "/health/ready"})
_OPEN_FILES = "/page/"


class RequireKey:
    """Middleware: a request carries a known key or a valid token, if any is configured.

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
            access = state.access
            if not access.is_open and not _is_open(scope["state"]["path"], state.settings):
                try:
                    scope["state"]["caller"] = caller = find_caller(access, Headers(scope=scope))
                except RequestError as error:
                    state.metrics.rejections.labels(error.rejection).inc()
                    matching = (r for r in self._routes if r.matches(scope)[0] is not Match.NONE)
                    scope["route"] = next(matching, None)
                    await problem_response(error, scope)(scope, receive, send)
                    return
                scope["state"]["key"] = caller.name
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> str:
    """Returns who sends a request, for a share of what is limited: its key, else its address.

    Behind a proxy all clients without keys have the address of the proxy.
    """
    if name := scope["state"].get("key"):
        return f"key {name}"
    return scope["client"][0] if scope.get("client") else ""


def find_caller(access: Access, headers: Mapping[str, str]) -> Caller:
    """Returns who has the key or token in the header Authorization.

    RequestError if it is missing, unknown or not valid, or has expired.
    """
    scheme, secret = get_authorization_scheme_param(headers.get("authorization"))
    caller = None
    if scheme.lower() == "bearer":
        # A token has three parts, and a key has no dots.
        known = access.tokens if access.tokens and secret.count(".") == 2 else access.keys
        caller = known.find(secret)
    if caller is None:
        message = "the API key is missing or unknown: send 'Authorization: Bearer <key>'"
        raise RequestError("unauthorized", message)
    return caller


def check_role(request: Request, role: Role, index: str | None) -> Grant:
    """Returns what grants a request a role in an index; RequestError if nothing does.

    Without any key, searching is open to everyone. All else is then open to clients on this
    machine, if the service listens on a loopback address. Otherwise the caller that `RequireKey`
    has found must have the role; with None for the index, in any index.
    """
    state = get_state(request)
    if state.access.is_open:
        if role == "search" or _is_local(request, state.settings.host):
            return EVERYTHING
        message = (
            f"without keys, what needs the role {role} is open only to programs on the machine of "
            "the service, and to its pages there: set CARE_API_KEYS (see care key)"
        )
        raise RequestError("needs_key", message, role=role)
    caller: Caller | None = request.scope["state"].get("caller")
    if caller and (grant := _granted(state, caller, index, role)):
        return grant
    if "index" in request.path_params and not (caller and _granted(state, caller, index, "search")):
        raise unknown_index()
    if role == "admin" and not (state.access.tokens or state.access.keys.has("admin")):
        message = "this route needs a key with the role admin; none is configured"
        raise RequestError("no_admin_key", message)
    name = caller.name if caller else ""
    message = f"the key '{name}' lacks the role {role}"
    raise RequestError("forbidden", message, key=name, role=role)


def check_again(request: Request, role: Role) -> None:
    """Checks the key and its role in the index, as before a long request; raises `RequestError`."""
    of_request, access = request.scope["state"], get_state(request).access
    if not access.is_open:
        of_request["caller"] = find_caller(access, request.headers)
    of_request["grant"] = check_role(request, role, index_name(request))


def may(request: Request, role: Role, index: str) -> bool:
    """Returns whether something grants a request a role in an index."""
    try:
        check_role(request, role, index)
    except RequestError:
        return False
    return True


def _granted(state: State, caller: Caller, index: str | None, role: Role) -> Grant | None:
    grant = caller.grant(index, role)
    if grant is None and index == state.catalog.default_name:
        # CARE_INDEX may be an alias, which entries without grants name.
        grant = caller.grant(state.settings.index, role)
    return grant


def visible_to(request: Request) -> Conjunction:
    """Returns what bounds the documents of a request: the filter of its grant."""
    grant: Grant = request.scope["state"]["grant"]
    return grant.filter


class RequireRole(HTTPBearer):
    """Dependency: the caller has a role in the index of the request; OpenAPI documents the key.

    With `anywhere`, a role in any index suffices. The grant is stored in the state of the request.
    """

    def __init__(self, role: Role, *, anywhere: bool = False) -> None:
        super().__init__(
            scheme_name="HTTPBearer",
            description="A key of CARE_API_KEYS or CARE_API_KEYS_FILE, or a signed token.",
        )
        self._role = role
        self._anywhere = anywhere

    def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Checks the role; raises `RequestError`."""
        index = None if self._anywhere else index_name(request)
        request.scope["state"]["grant"] = check_role(request, self._role, index)
        # Last: whether an index exists is not looked up for those who may not search it.
        if index and "index" in request.path_params:
            get_state(request).catalog.check(index)


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
    """Returns whether a client on this machine connects to a loopback address without a proxy.

    Of a page, its origin and the name by which it calls the service must be loopback addresses too:
    pages of other sites run in browsers on this machine, under names that can mean any address.
    """
    direct = not any(name in request.headers for name in _PROXY_HEADERS)
    client = request.client.host if request.client else ""
    named = f"//{request.headers.get('host', '')}", request.headers.get("origin", "//localhost")
    return direct and all(map(is_loopback, (host, client, *map(_host_of, named))))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def problem_responses(
    *statuses: int, model: type[schemas.Problem] = schemas.Problem
) -> dict[int | str, Any]:
    """Returns the OpenAPI description of the errors with these statuses, and of 500.

    It refers to the schema that `Application.openapi` adds: FastAPI would make a validator of each
    status of each route, which is a fifth of what the service imports in time.
    """
    schema = {"$ref": schemas.SCHEMA.format(model=model.__name__)}
    return {status: {"content": {MEDIA_TYPE: {"schema": schema}}} for status in (*statuses, 500)}


# The error statuses of routes that encode texts.
ENCODING_ERRORS = (400, 401, 403, 413, 415, 422, 429, 503, 504)

_about = "Deadline of the request [ms]; after it the response is 504. Default: CARE_TIMEOUT_MS."
_header = Header(alias="X-Request-Timeout-Ms", ge=1, le=60_000, description=_about)
Timeout = Annotated[int | None, _header]


async def charge_rate(request: Request, queries: int) -> None:
    """Charges the rate limits of the key and of the index for queries, texts or documents."""
    access = get_state(request).access
    if access.limiter:
        await _charge(access.limiter, _bucket(request.scope), queries)
    index = request.scope["state"].get("index")
    if access.index_limiter and index:
        await _charge(access.index_limiter, _numbered("index", index), queries)


async def _charge(limiter: RateLimiter, name: str, queries: int) -> None:
    if wait := await limiter.admit(name, queries):
        message = f"rate limit exceeded: retry after {wait:.3f} s"
        raise RequestError("rate_limited", message, retry_after=wait)


def _bucket(scope: Scope) -> str:
    """Returns the name of what is charged; it is one of a bounded number of names."""
    name: str = scope["state"].get("key", "anonymous")
    return _numbered("token", name) if ":" in name else name


def _numbered(kind: str, name: str) -> str:
    number = int.from_bytes(blake2b(name.encode(), digest_size=4).digest())
    return f"{kind}:{number % _BUCKETS}"


def deadline_of(request: Request, timeout_ms: int | None) -> float:
    """Returns the deadline of a request on the clock of the event loop [s].

    `timeout_ms` is what the client asks for, if anything.
    """
    timeout: int = timeout_ms or get_state(request).settings.timeout_ms
    arrived: float = request.scope["state"]["arrived"]
    return arrived + timeout / 1000


@contextmanager
def admitted(request: Request, timeout_ms: int | None, answer: int) -> Iterator[float]:
    """Yields the deadline of a request that waits, on the clock of the event loop [s].

    The block is cancelled if the client disconnects, and charges the budget of answers until it
    ends: RequestError if that is exceeded. `timeout_ms` is what the client asks for, if anything;
    `answer` is the estimated size of the answer [bytes].
    """
    state = get_state(request)
    of_request = request.scope["state"]
    deadline = deadline_of(request, timeout_ms)
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
