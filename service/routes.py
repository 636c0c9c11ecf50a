import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from core.errors import QueryError
from core.types import FloatArray, Query
from core.vectors import truncate_normalize
from service.api_keys import Role
from service.engine import Answer, Answers, check_text
from service.loaded_index import LoadedIndex
from service.metrics import Timings
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
_MAX_TIMEOUT_MS = 60_000
_CHALLENGE = {"WWW-Authenticate": "Bearer"}

router = APIRouter()
_bearer = HTTPBearer(auto_error=False, description="One of the keys in CARE_API_KEYS.")


async def _state(request: Request) -> State:
    state: State = request.app.state.service
    return state


StateOf = Annotated[State, Depends(_state)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
TimeoutMs = Annotated[
    int | None,
    Header(
        alias="X-Request-Timeout-Ms",
        ge=1,
        le=_MAX_TIMEOUT_MS,
        description="Time for the answer [ms]; past it comes 504.",
    ),
]


class _Allowed:
    """A dependency that lets a role in and returns the name of the key."""

    def __init__(self, role: Role) -> None:
        self._role = role

    async def __call__(self, request: Request, state: StateOf, credentials: Credentials) -> str:
        keys = state.keys
        if not keys.has(self._role):
            if self._role == "search":
                return "anonymous"
            raise HTTPException(401, "closed: CARE_API_KEYS has no admin key", _CHALLENGE)
        key = keys.find(credentials.credentials) if credentials else None
        if key is None:
            raise HTTPException(401, "the bearer key is missing or unknown", _CHALLENGE)
        if not key.allows(self._role):
            raise HTTPException(403, f"the key '{key.name}' has not the role {self._role}")
        request.state.key = key.name
        return key.name


Searcher = Annotated[str, Depends(_Allowed("search"))]
_ADMIN = [Depends(_Allowed("admin"))]
_SEARCHER = [Depends(_Allowed("search"))]


def _problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    return {status: {"model": Problem, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


_WORK = _problems(401, 403, 413, 422, 429, 503, 504)


@router.post("/search", response_model=SearchResponse, responses=_WORK)
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


@router.post("/search/batch", response_model=BatchResponse, responses=_WORK)
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


@router.post("/v1/embeddings", response_model=EmbeddingsResponse, responses=_WORK)
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
    return Query(body.query, body.top_k, body.filter, body.min_score)


def _json(content: Any) -> Response:
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


def _search_response(index: LoadedIndex, answer: Answer, body: SearchRequest) -> dict[str, Any]:
    fields = ("id", "score", "rank", "title", *dict.fromkeys(body.include))
    return {
        "hits": [{name: getattr(hit, name) for name in fields} for hit in answer.hits],
        "index": {"name": index.manifest.name, "version": index.manifest.version},
        "timings_ms": {name: round(s * 1000, 3) for name, s in asdict(answer.timings).items()},
        "cached": answer.cached,
    }


def _longest(answers: Answers) -> Timings:
    """Returns of each stage the longest time that a query spent in it."""
    all_timings = [asdict(answer.timings) for answer in answers.answers]
    return Timings(**{stage: max(t[stage] for t in all_timings) for stage in all_timings[0]})


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
        factory=manifest.factory,
        search_parameters=manifest.search_parameters,
        recall=manifest.recall,
        filters={
            field: loaded.filters.values(field, _MAX_FILTER_VALUES)
            for field in sorted(loaded.filters.fields)
        },
        created_at=manifest.created_at,
    )
