"""The routes for search, index, health and pages, on one router for each role."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi import Path as PathParameter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.responses import FileResponse, Response

from search.hits import QueryResult
from search.snapshot import Snapshot
from service import schemas
from service.access.guards import (
    ENCODING_ERRORS,
    Anyone,
    RequireRole,
    State,
    Timeout,
    admitted,
    charge_rate,
    client_of,
    get_state,
    problem_responses,
    visible_to,
)
from service.observe.metrics import STAGES, Timings
from service.routes.answers import are_short, batch_json, search_json, sent_in_parts, size_of_hits
from service.routes.direct_route import routes_for
from service.routes.documents import before, counts_within, document_json, find

PAGE = Path(__file__).parent / "page"

search_routes = routes_for(Depends(RequireRole("search")), tags=["search"])
admin_routes = routes_for(Depends(RequireRole("admin")), tags=["administration"])
public_routes = routes_for(Depends(Anyone()), tags=["monitoring"])


@search_routes.post(
    "/search",
    response_model=schemas.SearchResponse,
    responses=problem_responses(*ENCODING_ERRORS),
)
async def search(request: Request, body: schemas.SearchRequest, timeout_ms: Timeout = None) -> Any:
    """Returns the documents nearest to a query."""
    return await _search(request, [body], timeout_ms, batch=False)


@search_routes.post(
    "/search/batch",
    response_model=schemas.BatchResponse,
    responses=problem_responses(*ENCODING_ERRORS),
)
async def search_batch(
    request: Request, body: schemas.BatchRequest, timeout_ms: Timeout = None
) -> Any:
    """Searches for several queries in one index version; results are in the order of queries."""
    return await _search(request, body.queries, timeout_ms, batch=True)


# A slash of an id arrives as one, encoded or not.
@search_routes.get(
    "/documents/{id:path}",
    response_model=schemas.DocumentResponse,
    responses=problem_responses(401, 403, 404, 422, 429, 503, 504),
)
async def document(
    request: Request,
    id: Annotated[
        str,
        PathParameter(
            description="Id of a hit, of its `parent`, or of any document, percent-encoded."
        ),
    ],
    timeout_ms: Timeout = None,
) -> Any:
    """Returns a document or chunk by its id; of a document that is split, its chunks."""
    engine = get_state(request).engine
    await charge_rate(request, 1)
    index = engine.index
    with admitted(request, timeout_ms, 0) as deadline:
        rows = await find(engine, index, id, visible_to(request), deadline)
    request.scope["state"]["hits"] = 1
    pieces = document_json(index, rows, id)
    return _sent(request, pieces, size_of_hits(index, len(rows)))


@search_routes.get(
    "/index", response_model=schemas.IndexResponse, responses=problem_responses(401, 403, 503)
)
async def index(request: Request) -> Any:
    """Describes the index version that is served."""
    state, within = get_state(request), visible_to(request)
    loaded = state.engine.index
    if not within:
        return _index_response(loaded, state)
    with admitted(request, None, 0) as deadline:
        counted = await before(deadline, state.engine.run(counts_within, loaded, within))
    return _index_response(loaded, state, **counted)


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
    page = await get_state(request).metrics.page()
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@public_routes.get("/", include_in_schema=False)
async def search_page() -> FileResponse:
    """Returns the search page."""
    return FileResponse(PAGE / "index.html")


@public_routes.get("/docs", include_in_schema=False)
async def api_page() -> FileResponse:
    """Returns the page that shows the OpenAPI document with Swagger UI."""
    return FileResponse(PAGE / "docs.html")


async def _search(
    request: Request, bodies: list[schemas.SearchRequest], timeout_ms: int | None, *, batch: bool
) -> bytes | AsyncGenerator[bytes, None]:
    """Returns the JSON of the response or, if it is long, what generates its parts."""
    engine = get_state(request).engine
    await charge_rate(request, len(bodies))
    queries = [body.as_query() for body in bodies]
    within, client = visible_to(request), client_of(request.scope)
    checked = await engine.checked(queries, within, batch=batch, client=client)
    included = [list(dict.fromkeys(body.include)) for body in bodies]
    index, include = checked.index, included[0]
    if not batch and (known := engine.recall(checked, include)):
        hits, entry, timings = known
        request.scope["state"].update(timings=timings, hits=len(entry.rows[1]))
        how: dict[str, Any] = {"cached": True, "answerable": entry.answerable}
        return b"".join(search_json([hits], index, timings, checked.queries[0], **how))
    # A hit's evidence is at most as long as its text.
    size = size_of_hits(index, sum(q.top_k * (1 + q.evidence) for q in checked.queries))
    with admitted(request, timeout_ms, size) as deadline:
        results = await engine.search(checked, deadline)
    found = sum(len(result.hits) for result, _ in results)
    request.scope["state"].update(timings=_slowest(results), hits=found)
    short = are_short(result for result, _ in results)
    if batch:
        pieces = batch_json(index, results, included, checked.queries)
    else:
        ((result, timings),) = results
        hits_json: Iterable[bytes] = result.hits.json(include)
        if short:
            hits_json = [hits := b"".join(hits_json)]
            if not result.overflow and not result.failed:
                engine.remember(checked, include, hits)
        pieces = search_json(hits_json, index, timings, checked.queries[0], **result.how)
    return b"".join(pieces) if short else _sent(request, pieces, size)


async def _sent(
    request: Request, pieces: Iterator[bytes], size: int
) -> AsyncGenerator[bytes, None]:
    """Yields JSON in parts, as they are sent."""
    with admitted(request, None, size):
        async for part in sent_in_parts(pieces, get_state(request).engine.run):
            yield part


def _slowest(results: Sequence[tuple[QueryResult, Timings]]) -> Timings:
    """Returns the longest time of the queries in each stage."""
    if len(results) == 1:
        return results[0][1]
    return Timings(*(max(getattr(timings, stage) for _, timings in results) for stage in STAGES))


def _index_response(loaded: Snapshot, state: State, **counted: Any) -> bytes:
    """Returns an `IndexResponse`; `counted` has what is other than for the whole index."""
    manifest = loaded.manifest
    of_index = {
        "documents": manifest.corpus.documents,
        "filters": loaded.segment.filter_values,
        "filter_field_count": len(loaded.segment.filters.fields),
    }
    fields: dict[str, Any] = {**dict(manifest), **of_index, **counted}
    # Not validated: its values are those of the loaded files.
    response = schemas.IndexResponse.model_construct(
        **fields,
        active=state.engine.served.is_active,
        pair=state.pair,
        embedding_space=manifest.encoder.embedding_space,
        dimension=manifest.encoder.dimension,
        modes=list(loaded.modes),
        reranker=state.engine.reranker,
        answerable_thresholds=loaded.answerable_thresholds,
    )
    return to_json(response)
