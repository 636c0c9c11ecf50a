import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from core.errors import QueryError
from core.types import FloatArray, Query
from core.vectors import truncate_normalize
from service.api_keys import Role
from service.direct_route import direct
from service.engine import Answer, Answers, check_text
from service.loaded_index import LoadedIndex
from service.metrics import STAGES, Timings
from service.problems import MEDIA_TYPE
from service.rate_limit import RateLimitedError
from service.schemas import (
    BatchRequest,
    BatchResponse,
    EmbeddingsRequest,
    EmbeddingsResponse,
    Health,
    IndexResponse,
    Problem,
    SearchRequest,
    SearchResponse,
)
from service.state import State

PAGE = Path(__file__).parent / "page"

_MAX_FILTER_VALUES = 100
_TIMEOUT = "X-Request-Timeout-Ms"
_MAX_TIMEOUT_MS = 60_000
_CHALLENGE = {"WWW-Authenticate": "Bearer"}

_bearer = HTTPBearer(auto_error=False, description="One of the keys in CARE_API_KEYS.")


async def _state(request: Request) -> State:
    state: State = request.app.state.service
    return state


StateOf = Annotated[State, Depends(_state)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
TimeoutMs = Annotated[
    int | None,
    Header(
        alias=_TIMEOUT,
        ge=1,
        le=_MAX_TIMEOUT_MS,
        description="Time for the answer [ms]; past it comes 504.",
    ),
]


def _allow(request: Request, role: Role) -> str:
    """Returns the name of the key that a request carries, if it may do what a role does."""
    keys = request.app.state.service.keys
    if not keys.has(role):
        if role == "search":
            return "anonymous"
        raise HTTPException(401, "closed: CARE_API_KEYS has no admin key", _CHALLENGE)
    scheme, secret = get_authorization_scheme_param(request.headers.get("authorization"))
    key = keys.find(secret) if scheme.lower() == "bearer" else None
    if key is None:
        raise HTTPException(401, "the bearer key is missing or unknown", _CHALLENGE)
    if not key.allows(role):
        raise HTTPException(403, f"the key '{key.name}' has not the role {role}")
    request.state.key = key.name
    return str(key.name)


async def _searcher(request: Request, _: Credentials) -> str:
    return _allow(request, "search")


async def _administrator(request: Request, _: Credentials) -> str:
    return _allow(request, "admin")


Searcher = Annotated[str, Depends(_searcher)]
_SEARCHER = [Depends(_searcher)]
_ADMIN = [Depends(_administrator)]


def _timeout_ms(request: Request) -> int | None:
    given = request.headers.get(_TIMEOUT)
    if given is None:
        return None
    if given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= _MAX_TIMEOUT_MS:
        return int(given[:9])
    message = f"is not a whole number from 1 to {_MAX_TIMEOUT_MS}"
    raise RequestValidationError([{"type": "timeout", "loc": ("header", _TIMEOUT), "msg": message}])


def _prepare(request: Request) -> dict[str, Any]:
    return {
        "state": request.app.state.service,
        "key": _allow(request, "search"),
        "timeout_ms": _timeout_ms(request),
    }


router = APIRouter()
hot_router = APIRouter(route_class=direct(_prepare))


def _problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    return {status: {"model": Problem, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


_WORK = _problems(401, 403, 413, 422, 429, 503, 504)


@hot_router.post("/search", response_model=SearchResponse, responses=_WORK)
async def search(
    request: Request,
    body: SearchRequest,
    state: StateOf,
    key: Searcher,
    timeout_ms: TimeoutMs = None,
) -> Response:
    """Finds the documents nearest to a query."""
    await _admit(state, key, 1)
    async with _while_connected(request):
        answers = await state.engine.search([_query(body)], _deadline(request, state, timeout_ms))
    (answer,) = answers.answers
    request.state.timings = answer.timings
    return _json(_search_response(answers.index, answer, body))


@hot_router.post("/search/batch", response_model=BatchResponse, responses=_WORK)
async def search_batch(
    request: Request,
    body: BatchRequest,
    state: StateOf,
    key: Searcher,
    timeout_ms: TimeoutMs = None,
) -> Response:
    """Answers several queries from one index version, in order."""
    _check_number(body.queries, state, "queries")
    await _admit(state, key, len(body.queries))
    async with _while_connected(request):
        answers = await state.engine.search(
            [_query(query) for query in body.queries],
            _deadline(request, state, timeout_ms),
            batch=True,
        )
    request.state.timings = _longest(answers)
    results = [
        _search_response(answers.index, answer, query)
        for answer, query in zip(answers.answers, body.queries, strict=True)
    ]
    return _json({"results": results})


@hot_router.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=_WORK)
async def embeddings(
    request: Request,
    body: EmbeddingsRequest,
    state: StateOf,
    key: Searcher,
    timeout_ms: TimeoutMs = None,
) -> Response:
    """Encodes texts as queries; the interface is OpenAI's."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    settings, dimension = state.settings, state.engine.index.manifest.encoder.dimension
    _check_number(texts, state, "input")
    if body.model not in (None, settings.pair):
        raise QueryError("model", f"is unknown; this service has '{settings.pair}'")
    if body.dimensions and body.dimensions > dimension:
        raise QueryError("dimensions", f"is {body.dimensions}; the encoder has {dimension}")
    texts = [check_text(text, settings.max_query_chars, "input") for text in texts]
    await _admit(state, key, len(texts))
    async with _while_connected(request):
        encoded = await state.engine.embed(texts, _deadline(request, state, timeout_ms))
    tokens = sum(count for _, count in encoded)
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": _embedding(vector, body.dimensions or dimension, body.encoding_format),
        }
        for i, (vector, _) in enumerate(encoded)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": settings.pair, "usage": usage})


@router.get("/index", responses=_problems(401, 403, 503), dependencies=_SEARCHER)
async def index(state: StateOf) -> IndexResponse:
    """Describes the active index version."""
    return _index_response(state.engine.index, state)


@router.post("/index/reload", responses=_problems(401, 403, 503), dependencies=_ADMIN)
async def reload_index(state: StateOf) -> IndexResponse:
    """Loads the version that CURRENT names; if it is not sound, the old one keeps serving."""
    return _index_response(await state.engine.reload(), state)


@router.get("/health/live", responses=_problems())
async def live() -> Health:
    """Answers as long as the process does."""
    return Health(status="live")


@router.get("/health/ready", responses=_problems(503))
async def ready(state: StateOf) -> Health:
    """Answers once a real encode and search have succeeded."""
    await state.engine.check()
    return Health(status="ready")


@router.get("/metrics", response_class=Response, responses=_problems())
async def metrics(state: StateOf) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The search page."""
    return FileResponse(PAGE / "index.html")


@asynccontextmanager
async def _while_connected(request: Request) -> AsyncIterator[None]:
    """Cancels what is inside once the client has gone."""
    work = asyncio.current_task()
    assert work

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def _admit(state: State, key: str, queries: int) -> None:
    if state.limiter and (wait := await state.limiter.admit(key, queries)):
        raise RateLimitedError(wait)


def _deadline(request: Request, state: State, timeout_ms: int | None) -> float:
    arrived: float = request.state.arrived
    return arrived + (timeout_ms or state.settings.timeout_ms) / 1000


def _check_number(items: list[Any], state: State, field: str) -> None:
    limit = state.settings.max_batch
    if len(items) > limit:
        raise QueryError(field, f"holds {len(items)} texts; the limit is {limit}")


def _query(body: SearchRequest) -> Query:
    return Query(body.query, body.top_k, body.filter, body.min_score, body.collapse)


def _json(content: Any) -> Response:
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


def _search_response(index: LoadedIndex, answer: Answer, body: SearchRequest) -> dict[str, Any]:
    fields = ("id", "score", "rank", "title", *dict.fromkeys(body.include))
    if index.documents.chunked:
        fields += ("parent", "chunk", "chunks")
    return {
        "hits": [{name: getattr(hit, name) for name in fields} for hit in answer.hits],
        "index": {"name": index.manifest.name, "version": index.manifest.version},
        "timings_ms": answer.timings.milliseconds(),
        "cached": answer.cached,
    }


def _longest(answers: Answers) -> Timings:
    """Returns of each stage the longest time that a query spent in it."""
    timings = [answer.timings for answer in answers.answers]
    return Timings(*(max(getattr(t, stage) for t in timings) for stage in STAGES))


def _embedding(vector: FloatArray, dimension: int, encoding: str) -> list[float] | str:
    vector = truncate_normalize(vector[None], dimension)[0]
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _index_response(loaded: LoadedIndex, state: State) -> IndexResponse:
    manifest = loaded.manifest
    return IndexResponse(
        name=manifest.name,
        version=manifest.version,
        pair=state.settings.pair,
        embedding_space=manifest.encoder.embedding_space,
        dimension=manifest.encoder.dimension,
        count=manifest.count,
        documents=manifest.corpus.documents,
        chunking=manifest.chunking,
        factory=manifest.factory,
        search_parameters=manifest.search_parameters,
        recall=manifest.recall,
        filters={
            field: loaded.filters.values(field, _MAX_FILTER_VALUES)
            for field in sorted(loaded.filters.fields)
        },
        created_at=manifest.created_at,
    )
