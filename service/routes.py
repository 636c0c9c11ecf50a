"""The routes, by who may ask them; FastAPI documents what `DirectRoute` reads."""

import asyncio
import base64
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Header, Request
from fastapi.security import HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, Response

from core.errors import QueryError
from core.types import Query
from core.vectors import truncate_normalize
from service import schemas
from service.api_keys import ApiKeys, Role
from service.direct_route import DirectRoute
from service.engine import Engine, check_text
from service.metrics import STAGES, Metrics, Timings
from service.problems import MEDIA_TYPE, RequestError
from service.rate_limit import RateLimiter
from service.search import LoadedIndex
from service.settings import Settings

PAGE = Path(__file__).parent / "page"

_MAX_FILTER_VALUES = 100
# What a browser sends with the requests of another page, and a proxy with all.
_NOT_DIRECT = ("origin", "forwarded", "x-forwarded-for")


@dataclass(frozen=True, slots=True)
class State:
    """What routes work with; one for each application. `pair` is the name of the pair."""

    settings: Settings
    pair: str
    metrics: Metrics
    engine: Engine
    keys: ApiKeys
    limiter: RateLimiter | None


def _state(request: Request) -> State:
    return cast("State", request.app.state.service)


class _Allowed(HTTPBearer):
    """Lets requests pass whose bearer key has a role, and documents that key.

    Without any key in `CARE_API_KEYS` everybody may search, and whoever asks from this machine
    may administrate a service that listens on loopback alone.
    """

    def __init__(self, role: Role) -> None:
        super().__init__(scheme_name="HTTPBearer", description="One of the keys in CARE_API_KEYS.")
        self._role = role

    def __call__(self, request: Request) -> None:  # type: ignore[override]
        """Notes the name of the key; raises `RequestError` without one that has the role."""
        state = _state(request)
        is_open = self._role == "search" or _is_local(request, state.settings.host)
        if not state.keys and is_open:
            return
        if self._role == "admin" and not state.keys.has("admin"):
            raise RequestError("no_admin_key", "closed: CARE_API_KEYS has no admin key")
        scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
        key = state.keys.find(secret) if scheme.lower() == "bearer" else None
        if key is None:
            raise RequestError("unauthorized", "the bearer key is missing or unknown")
        if not key.allows(self._role):
            message = f"the key '{key.name}' lacks the role {self._role}"
            raise RequestError("forbidden", message, key=key.name, role=self._role)
        request.state.key = key.name


def _is_local(request: Request, host: str) -> bool:
    """Returns whether a request comes from this machine, straight, to a loopback address."""
    peer = request.client.host if request.client else ""
    direct = not any(name in request.headers for name in _NOT_DIRECT)
    return direct and _is_loopback(host) and _is_loopback(peer)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _problems(*statuses: int, model: type = schemas.Problem) -> dict[int | str, Any]:
    return {status: {"model": model, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


_ASKED = (400, 401, 403, 413, 415, 422, 429, 503, 504)

# A route is closed unless it is put among the open ones.
searching = APIRouter(route_class=DirectRoute, dependencies=[Depends(_Allowed("search"))])
administrating = APIRouter(route_class=DirectRoute, dependencies=[Depends(_Allowed("admin"))])
everybody = APIRouter(route_class=DirectRoute)
ROUTERS = (searching, administrating, everybody)

_about = "Time for the answer [ms]; past it comes 504."
_header = Header(alias="X-Request-Timeout-Ms", ge=1, le=60_000, description=_about)
Timeout = Annotated[int | None, _header]


@searching.post("/search", response_model=schemas.SearchResponse, responses=_problems(*_ASKED))
async def search(request: Request, body: schemas.SearchRequest, timeout_ms: Timeout = None) -> Any:
    """Finds the documents nearest to a query."""
    (answer,) = await _answers(request, [body], timeout_ms, batch=False)
    return answer


@searching.post("/search/batch", response_model=schemas.BatchResponse, responses=_problems(*_ASKED))
async def search_batch(
    request: Request, body: schemas.BatchRequest, timeout_ms: Timeout = None
) -> Any:
    """Answers several queries from one index version, in order."""
    _check_number(len(body.queries), _state(request), "queries")
    return {"results": await _answers(request, body.queries, timeout_ms, batch=True)}


@searching.post(
    "/v1/embeddings",
    response_model=schemas.EmbeddingsResponse,
    responses=_problems(*_ASKED, model=schemas.OpenAIProblem),
)
async def embeddings(
    request: Request, body: schemas.EmbeddingsRequest, timeout_ms: Timeout = None
) -> Any:
    """Encodes texts as queries; the interface is OpenAI's."""
    state = _state(request)
    texts = [body.input] if isinstance(body.input, str) else body.input
    dimension = state.engine.index.manifest.encoder.dimension
    _check_number(len(texts), state, "input")
    if body.model not in (None, state.pair):
        message = f"is unknown; this service has '{state.pair}'"
        raise QueryError("model", message, code="unknown_model", model=state.pair)
    if body.dimensions and body.dimensions > dimension:
        message = f"is {body.dimensions}; the encoder has {dimension}"
        raise QueryError("dimensions", message, code="too_many_dimensions", limit=dimension)
    texts = [check_text(text, state.settings.max_query_chars, "input") for text in texts]
    async with _admitted(request, len(texts), timeout_ms) as deadline:
        vectors, tokens = await state.engine.embed(texts, deadline)
    kept = truncate_normalize(vectors, body.dimensions or dimension)
    if body.encoding_format == "base64":
        shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in kept]
    else:
        shown = kept.tolist()
    data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": state.pair, "usage": usage}


@searching.get(
    "/v1/models",
    response_model=schemas.ModelsResponse,
    responses=_problems(401, 403, 503, model=schemas.OpenAIProblem),
)
async def models(request: Request) -> Any:
    """Names the model of `/v1/embeddings`; the interface is OpenAI's."""
    state = _state(request)
    created = int(state.engine.index.manifest.created_at.timestamp())
    model = {"id": state.pair, "object": "model", "created": created, "owned_by": "care"}
    return {"object": "list", "data": [model]}


@searching.get("/index", response_model=schemas.IndexResponse, responses=_problems(401, 403, 503))
async def index(request: Request) -> Any:
    """Describes the active index version."""
    state = _state(request)
    return _index_response(state.engine.index, state)


@administrating.post(
    "/index/reload", response_model=schemas.IndexResponse, responses=_problems(401, 403, 503)
)
async def reload_index(request: Request) -> Any:
    """Loads the version that CURRENT names; if it is not sound, the old one keeps serving."""
    state = _state(request)
    return _index_response(await state.engine.reload(), state)


@everybody.get("/health/live", response_model=schemas.Health, responses=_problems())
async def live() -> Any:
    """Answers as long as the process does."""
    return {"status": "live"}


@everybody.get("/health/ready", response_model=schemas.Health, responses=_problems(503))
async def ready(request: Request) -> Any:
    """Answers once a real encode and search have succeeded."""
    await _state(request).engine.check()
    return {"status": "ready"}


@everybody.get("/metrics", response_class=Response, responses=_problems())
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    registry = _state(request).metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@everybody.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> FileResponse:
    """The search page."""
    return FileResponse(PAGE / "index.html")


@asynccontextmanager
async def _admitted(request: Request, queries: int, timeout_ms: int | None) -> AsyncIterator[float]:
    """Charges the key for queries, then yields the deadline; ends the block if the client goes."""
    state = _state(request)
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
        yield request.state.arrived + (timeout_ms or state.settings.timeout_ms) / 1000
    finally:
        watching.cancel()


def _check_number(count: int, state: State, field: str) -> None:
    limit = state.settings.max_batch
    if count > limit:
        message = f"holds {count} texts; the limit is {limit}"
        raise QueryError(field, message, code="batch_too_large", limit=limit)


async def _answers(
    request: Request, bodies: list[schemas.SearchRequest], timeout_ms: int | None, *, batch: bool
) -> list[dict[str, Any]]:
    queries = [Query(b.query, b.top_k, b.filter, b.min_score, b.collapse) for b in bodies]
    async with _admitted(request, len(queries), timeout_ms) as deadline:
        index, found = await _state(request).engine.search(queries, deadline, batch=batch)
    slowest = (max(getattr(timings, stage) for _, timings in found) for stage in STAGES)
    request.state.timings = Timings(*slowest)
    chunk = ("parent", "chunk", "chunks") if index.documents.chunked else ()
    version = {"name": index.manifest.name, "version": index.manifest.version}
    answers = []
    for (result, timings), body in zip(found, bodies, strict=True):
        fields = ("id", "score", "rank", "title", *dict.fromkeys(body.include), *chunk)
        hits = [{name: getattr(hit, name) for name in fields} for hit in result.hits]
        answer = {"hits": hits, "index": version, "timings_ms": timings, "cached": result.cached}
        answers.append(answer)
    return answers


def _index_response(loaded: LoadedIndex, state: State) -> schemas.IndexResponse:
    manifest = loaded.manifest
    return schemas.IndexResponse(
        **dict(manifest),
        pair=state.pair,
        embedding_space=manifest.encoder.embedding_space,
        dimension=manifest.encoder.dimension,
        documents=manifest.corpus.documents,
        filters={
            field: loaded.filters.values(field, _MAX_FILTER_VALUES)
            for field in sorted(loaded.filters.fields)
        },
    )
