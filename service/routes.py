"""The routes for search, index, health and pages, on one router for each role."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, Response

from core.errors import QueryError
from core.types import Query
from service import schemas
from service.access import (
    ENCODING_ERRORS,
    RequireRole,
    State,
    Timeout,
    admitted,
    get_state,
    problem_responses,
)
from service.direct_route import DirectRoute
from service.metrics import STAGES, Timings
from service.search import LoadedIndex

PAGE = Path(__file__).parent / "page"

search_routes = APIRouter(
    route_class=DirectRoute, dependencies=[Depends(RequireRole("search"))], tags=["search"]
)
admin_routes = APIRouter(
    route_class=DirectRoute, dependencies=[Depends(RequireRole("admin"))], tags=["administration"]
)
public_routes = APIRouter(route_class=DirectRoute, tags=["monitoring"])


@search_routes.post(
    "/search",
    response_model=schemas.SearchResponse,
    responses=problem_responses(*ENCODING_ERRORS),
)
async def search(request: Request, body: schemas.SearchRequest, timeout_ms: Timeout = None) -> Any:
    """Returns the documents nearest to a query."""
    (response,) = await _search(request, [body], timeout_ms, batch=False)
    return response


@search_routes.post(
    "/search/batch",
    response_model=schemas.BatchResponse,
    responses=problem_responses(*ENCODING_ERRORS),
)
async def search_batch(
    request: Request, body: schemas.BatchRequest, timeout_ms: Timeout = None
) -> Any:
    """Searches for several queries in one index version; results are in the order of queries."""
    limit = get_state(request).settings.max_batch
    if len(body.queries) > limit:
        message = f"contains {len(body.queries)} queries; the limit is {limit} (CARE_MAX_BATCH)"
        raise QueryError("queries", message, code="batch_too_large", limit=limit)
    return {"results": await _search(request, body.queries, timeout_ms, batch=True)}


@search_routes.get(
    "/index", response_model=schemas.IndexResponse, responses=problem_responses(401, 403, 503)
)
async def index(request: Request) -> Any:
    """Describes the index version that is served."""
    state = get_state(request)
    return _index_response(state.engine.index, state)


@admin_routes.post(
    "/index/reload",
    response_model=schemas.IndexResponse,
    responses=problem_responses(401, 403, 503),
)
async def reload_index(request: Request) -> Any:
    """Loads the active version and serves it. If it fails its checks, the old one stays."""
    state = get_state(request)
    return _index_response(await state.engine.served.reload(), state)


@public_routes.get("/health/live", response_model=schemas.Health, responses=problem_responses())
async def live() -> Any:
    """Returns 200 while the process runs."""
    return {"status": "live"}


@public_routes.get("/health/ready", response_model=schemas.Health, responses=problem_responses(503))
async def ready(request: Request) -> Any:
    """Returns 200 if a text has just been encoded and searched for, else 503."""
    await get_state(request).engine.check()
    return {"status": "ready"}


@public_routes.get("/metrics", response_class=Response, responses=problem_responses(401))
async def metrics(request: Request) -> Response:
    """Returns the metrics in the text format of Prometheus."""
    registry = get_state(request).metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@public_routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def search_page() -> FileResponse:
    """Returns the search page."""
    return FileResponse(PAGE / "index.html")


@public_routes.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
async def api_page() -> FileResponse:
    """Returns the page that shows the OpenAPI document with Swagger UI."""
    return FileResponse(PAGE / "docs.html")


async def _search(
    request: Request, bodies: list[schemas.SearchRequest], timeout_ms: int | None, *, batch: bool
) -> list[dict[str, Any]]:
    queries = [Query(b.query, b.top_k, b.filter, b.min_score, b.collapse) for b in bodies]
    async with admitted(request, len(queries), timeout_ms) as deadline:
        index, results = await get_state(request).engine.search(queries, deadline, batch=batch)
    slowest = (max(getattr(timings, stage) for _, timings in results) for stage in STAGES)
    request.state.timings = Timings(*slowest)
    chunk = ("parent", "chunk", "chunks") if index.documents.chunked else ()
    version = {"name": index.manifest.name, "version": index.manifest.version}
    responses = []
    for (result, timings), body in zip(results, bodies, strict=True):
        fields = ("id", "score", "rank", "title", *dict.fromkeys(body.include), *chunk)
        hits = [{name: getattr(hit, name) for name in fields} for hit in result.hits]
        response = {"hits": hits, "index": version, "timings_ms": timings, "cached": result.cached}
        responses.append(response)
    return responses


def _index_response(loaded: LoadedIndex, state: State) -> schemas.IndexResponse:
    manifest = loaded.manifest
    return schemas.IndexResponse(
        **dict(manifest),
        active=state.engine.served.is_active,
        pair=state.pair,
        embedding_space=manifest.encoder.embedding_space,
        dimension=manifest.encoder.dimension,
        documents=manifest.corpus.documents,
        filters=loaded.filter_values,
        filter_field_count=len(loaded.filters.fields),
    )
