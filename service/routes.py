import secrets
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from core.errors import QueryError
from core.types import Query
from service.engine import Answer, Answers, Engine
from service.loaded_index import LoadedIndex
from service.metrics import Metrics
from service.problems import MEDIA_TYPE
from service.schemas import (
    BatchRequest,
    BatchResponse,
    Health,
    HitResponse,
    IndexReference,
    IndexResponse,
    Problem,
    SearchRequest,
    SearchResponse,
    Timings,
)
from service.settings import Settings

PAGE = Path(__file__).parent / "page"

_MAX_FILTER_VALUES = 100

router = APIRouter()
_bearer = HTTPBearer(auto_error=False, description="The token in CARE_ADMIN_TOKEN.")


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


EngineOf = Annotated[Engine, Depends(_engine)]
SettingsOf = Annotated[Settings, Depends(_settings)]


def _require_admin(
    settings: SettingsOf,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    challenge = {"WWW-Authenticate": "Bearer"}
    if not settings.admin_token:
        raise HTTPException(
            401, "closed: the service was started without CARE_ADMIN_TOKEN", challenge
        )
    given = credentials.credentials if credentials else ""
    if not secrets.compare_digest(given.encode(), settings.admin_token.get_secret_value().encode()):
        raise HTTPException(401, "the bearer token is missing or wrong", challenge)


def _problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    return {status: {"model": Problem, "content": {MEDIA_TYPE: {}}} for status in (*statuses, 500)}


@router.post("/search", responses=_problems(413, 422, 429), response_model_exclude_unset=True)
async def search(body: SearchRequest, engine: EngineOf) -> SearchResponse:
    """Finds the documents nearest to a query."""
    answers = await engine.search([_query(body)])
    return _search_response(answers, answers.answers[0], body)


@router.post("/search/batch", responses=_problems(413, 422, 429), response_model_exclude_unset=True)
async def search_batch(body: BatchRequest, engine: EngineOf, settings: SettingsOf) -> BatchResponse:
    """Answers several queries from one index version, in order."""
    # More than may be in flight would be answered with 429 for ever.
    limit = min(settings.max_batch, settings.max_in_flight)
    if len(body.queries) > limit:
        raise QueryError("queries", f"holds {len(body.queries)} queries; the limit is {limit}")
    answers = await engine.search([_query(query) for query in body.queries], batch=True)
    return BatchResponse(
        results=[
            _search_response(answers, answer, query)
            for answer, query in zip(answers.answers, body.queries, strict=True)
        ]
    )


@router.get("/index", responses=_problems())
async def index(engine: EngineOf, settings: SettingsOf) -> IndexResponse:
    """Describes the active index version."""
    return _index_response(engine.index, settings)


@router.post("/index/reload", responses=_problems(401, 503), dependencies=[Depends(_require_admin)])
async def reload_index(engine: EngineOf, settings: SettingsOf) -> IndexResponse:
    """Loads the version that CURRENT names; if it is not sound, the old one keeps serving."""
    return _index_response(await engine.reload(), settings)


@router.get("/health/live", responses=_problems())
async def live() -> Health:
    """Answers as long as the process does."""
    return Health(status="live")


@router.get("/health/ready", responses=_problems())
async def ready(engine: EngineOf) -> Health:
    """Answers once a real encode and search have succeeded."""
    await engine.check()
    return Health(status="ready")


@router.get("/metrics", response_class=Response, responses=_problems())
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(_metrics(request).registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The search page."""
    return FileResponse(PAGE / "index.html")


def _query(body: SearchRequest) -> Query:
    return Query(body.query, body.top_k, body.filter, body.min_score)


def _search_response(answers: Answers, answer: Answer, body: SearchRequest) -> SearchResponse:
    optional = set(body.include)
    hits = []
    for hit in answer.hits:
        fields = {name: getattr(hit, name) for name in ("id", "score", "rank", "title", *optional)}
        hits.append(HitResponse(**fields))
    manifest = answers.index.manifest
    timings = answer.timings
    return SearchResponse(
        hits=hits,
        index=IndexReference(name=manifest.name, version=manifest.version),
        timings_ms=Timings(
            encode=_ms(timings.encode),
            search=_ms(timings.search),
            fetch=_ms(timings.fetch),
            total=_ms(timings.total),
        ),
        cached=answer.cached,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _index_response(loaded: LoadedIndex, settings: Settings) -> IndexResponse:
    manifest = loaded.manifest
    return IndexResponse(
        name=manifest.name,
        version=manifest.version,
        pair=settings.pair,
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
