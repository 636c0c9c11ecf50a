"""The routes for search, index, health and pages, on one router for each role."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi import Path as PathParameter
from fastapi import Query as QueryParameter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.responses import FileResponse, Response

from core.versions import IndexFolder
from search.hits import QueryResult
from search.version_files import version_bytes
from service import schemas
from service.access.guards import (
    ENCODING_ERRORS,
    Anyone,
    RequireRole,
    Timeout,
    admitted,
    charge_rate,
    client_of,
    deadline_of,
    get_state,
    index_name,
    may,
    opened_index,
    problem_responses,
    visible_to,
)
from service.catalog import Opened
from service.document_schemas import DocumentResponse, DocumentsResponse
from service.observe.metrics import STAGES, Timings
from service.routes.answers import are_short, batch_json, search_json, sent_in_parts, size_of_hits
from service.routes.direct_route import routes_for
from service.routes.documents import (
    before,
    counts_within,
    document_json,
    filter_fields,
    find,
    listed_after,
    tag_of,
)

PAGE = Path(__file__).parent / "page"
DocumentId = Annotated[
    str,
    PathParameter(description="Id of a hit, of its `parent`, or of any document, percent-encoded."),
]
IndexName = Annotated[str, PathParameter(description="Name or alias of an index.")]
_limit = "Most documents of the response, at most 100; 20 by default."
Limit = Annotated[int, QueryParameter(ge=1, le=100, description=_limit)]
After = Annotated[
    str | None,
    QueryParameter(
        description="Id of the document, or a chunk of it, that the list begins behind."
    ),
]

# The errors of routes that read documents, and of those that describe an index that they name.
_READING = (401, 403, 404, 422, 429, 503, 504)
_OF_INDEX = problem_responses(401, 403, 404, 422, 503, 504)

search_routes = routes_for(Depends(RequireRole("search")), tags=["search"])
list_routes = routes_for(Depends(RequireRole("search", anywhere=True)), tags=["search"])
admin_routes = routes_for(Depends(RequireRole("admin")), tags=["administration"])
public_routes = routes_for(Depends(Anyone()), tags=["monitoring"])


def both(
    router: APIRouter, method: str, path: str, *statuses: int, **options: Any
) -> Callable[[Any], Any]:
    """Declares a route of the default index, and the same one of an index that the path names.

    `statuses` are those of errors; an index that the path names can be unknown, which is 404.
    """
    answers = options.pop("responses", {})

    def declare(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(*, index: str, **given: Any) -> Any:
            return await endpoint(**given)

        of_index: Any = answer
        of_index.__name__, of_index.__doc__ = endpoint.__name__, endpoint.__doc__
        signature = inspect.signature(endpoint)
        name = inspect.Parameter("index", inspect.Parameter.KEYWORD_ONLY, annotation=IndexName)
        parameters = [p.replace(kind=name.kind) for p in signature.parameters.values()]
        of_index.__signature__ = signature.replace(parameters=[*parameters, name])
        of_index.__annotations__ = {**endpoint.__annotations__, "index": IndexName}
        for prefix, function, more in (("", endpoint, ()), ("/indexes/{index}", of_index, (404,))):
            options["responses"] = answers | problem_responses(*statuses, *more)
            router.add_api_route(f"{prefix}{path}", function, methods=[method], **options)
        return endpoint

    return declare


@both(search_routes, "POST", "/search", *ENCODING_ERRORS, response_model=schemas.SearchResponse)
async def search(request: Request, body: schemas.SearchRequest, timeout_ms: Timeout = None) -> Any:
    """Returns the documents nearest to a query."""
    return await _search(request, [body], timeout_ms, batch=False)


@both(
    search_routes, "POST", "/search/batch", *ENCODING_ERRORS, response_model=schemas.BatchResponse
)
async def search_batch(
    request: Request, body: schemas.BatchRequest, timeout_ms: Timeout = None
) -> Any:
    """Searches for several queries in one index version; results are in the order of queries."""
    return await _search(request, body.queries, timeout_ms, batch=True)


# A slash of an id arrives as one, encoded or not.
@both(search_routes, "GET", "/documents/{id:path}", *_READING, response_model=DocumentResponse)
async def document(request: Request, id: DocumentId, timeout_ms: Timeout = None) -> Any:
    """Returns a document or chunk by its id; of a document that is split, its chunks."""
    await charge_rate(request, 1)
    opened = await opened_index(request, timeout_ms)
    index = opened.snapshot
    with admitted(request, timeout_ms, 0) as deadline:
        rows = await find(opened.engine, index, id, visible_to(request), deadline)
        tag = await before(deadline, opened.engine.run(tag_of, index, rows, id))
    if tag:
        request.scope["state"]["answer_headers"] = [(b"etag", b'"%b"' % tag.encode())]
    request.scope["state"]["hits"] = 1
    return _sent(request, document_json(index, rows, id), size_of_hits(index, len(rows)))


@search_routes.get(
    "/index", response_model=schemas.IndexResponse, responses=problem_responses(401, 403, 503)
)
async def index(request: Request) -> Any:
    """Describes the version of the default index that is served."""
    return await _index(request)


@search_routes.get("/indexes/{index}", response_model=schemas.IndexResponse, responses=_OF_INDEX)
async def one_index(request: Request, index: IndexName, timeout_ms: Timeout = None) -> Any:
    """Describes the version of an index that is served."""
    return await _index(request, timeout_ms)


@list_routes.get(
    "/indexes", response_model=schemas.IndexesResponse, responses=problem_responses(401, 403, 503)
)
async def indexes(request: Request) -> Any:
    """Lists the indexes that the key may search."""
    catalog = get_state(request).catalog
    names = await asyncio.to_thread(catalog.names)
    return {
        "indexes": [
            {"name": name, "aliases": aliases, "default": name == catalog.default_name}
            for name, aliases in names.items()
            if may(request, "search", name)
        ]
    }


@admin_routes.get(
    "/index/versions",
    response_model=schemas.VersionsResponse,
    responses=problem_responses(401, 403, 503),
)
async def versions(request: Request) -> Any:
    """Lists the versions of the default index on disk."""
    return await _versions(request)


@admin_routes.get(
    "/indexes/{index}/versions", response_model=schemas.VersionsResponse, responses=_OF_INDEX
)
async def versions_of_index(request: Request, index: IndexName, timeout_ms: Timeout = None) -> Any:
    """Lists the versions of an index on disk."""
    return await _versions(request, timeout_ms)


@both(admin_routes, "GET", "/documents", *_READING, response_model=DocumentsResponse)
async def documents(
    request: Request, limit: Limit = 20, after: After = None, timeout_ms: Timeout = None
) -> Any:
    """Lists the documents of an index, in the order of its corpus.

    A document that is replaced moves to the end. So if documents are written between two pages,
    the next one can leave documents out, or its `after` be unknown.
    """
    await charge_rate(request, 1)
    opened = await opened_index(request, timeout_ms)
    with admitted(request, timeout_ms, size_of_hits(opened.snapshot, limit)) as deadline:
        listing = opened.engine.run(listed_after, opened.snapshot, after, limit)
        found, following = await before(deadline, listing)
    manifest = opened.snapshot.manifest
    return {
        "documents": [document._asdict() for document in found],
        "next": following,
        "total": manifest.corpus.documents,
        "index": {"name": manifest.name, "version": manifest.version},
    }


@admin_routes.post(
    "/index/reload",
    response_model=schemas.IndexResponse,
    responses=problem_responses(401, 403, 503),
)
async def reload_index(request: Request) -> Any:
    """Loads the active version and serves it. If it fails its checks, the old one stays."""
    return await _reload(request)


@admin_routes.post(
    "/indexes/{index}/reload", response_model=schemas.IndexResponse, responses=_OF_INDEX
)
async def reload_one_index(request: Request, index: IndexName, timeout_ms: Timeout = None) -> Any:
    """Loads the active version of an index and serves it. If it fails, the old one stays."""
    return await _reload(request, timeout_ms)


@public_routes.get("/health/live", response_model=schemas.Health, responses=problem_responses())
async def live() -> Any:
    """Returns 200 while the process runs."""
    return {"status": "live"}


@public_routes.get("/health/ready", response_model=schemas.Health, responses=problem_responses(503))
async def ready(request: Request) -> Any:
    """Returns 200 if a text has just been encoded and searched for, else 503."""
    state = get_state(request)
    await state.engine.check(state.catalog.served.index)
    return {"status": "ready"}


@public_routes.get("/metrics", response_class=Response, responses=problem_responses(401))
async def metrics(request: Request) -> Response:
    """Returns the metrics in the text format of Prometheus.

    Series by index are among them if there are no keys, or for a key with the role admin
    in all indexes.
    """
    state = get_state(request)
    # A grant in "*" is one in all indexes.
    page = await state.metrics.page(with_indexes=state.access.is_open or may(request, "admin", "*"))
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
    await charge_rate(request, len(bodies))
    opened = await opened_index(request, timeout_ms)
    engine, index = opened.engine, opened.snapshot
    engine.metrics.queried(index.manifest.name, len(bodies))
    queries = [body.as_query() for body in bodies]
    within, client = visible_to(request), client_of(request.scope)
    checked = await engine.checked(index, queries, within, batch=batch, client=client)
    included = [list(dict.fromkeys(body.include)) for body in bodies]
    include = included[0]
    if not batch and (known := engine.recall(checked, include)):
        hits, entry, timings = known
        request.scope["state"].update(timings=timings, hits=len(entry.rows[1]))
        how: dict[str, Any] = {"cached": True, "answerable": entry.answerable}
        return b"".join(search_json([hits], index, timings, checked.queries[0], **how))
    if not batch:
        engine.check_room(checked)
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


async def _index(request: Request, timeout_ms: int | None = None) -> bytes:
    opened, within = await opened_index(request, timeout_ms), visible_to(request)
    if not within:
        return await described(opened, deadline_of(request, timeout_ms))
    with admitted(request, timeout_ms, 0) as deadline:
        counting = opened.engine.run(counts_within, opened.snapshot, within)
        counted = await before(deadline, counting)
    return _index_response(opened, **counted)


async def _versions(request: Request, timeout_ms: int | None = None) -> Any:
    opened = await opened_index(request, timeout_ms)
    served = opened.snapshot.manifest
    folder = IndexFolder(get_state(request).settings.indexes, served.name)

    def listed() -> list[dict[str, Any]]:
        active = get_state(request).catalog.active_version(folder)
        return [
            {
                "version": one.version,
                "active": one.version == active,
                "served": one.version == served.version,
                "created_at": one.created_at,
                "documents": one.corpus.documents,
                "count": one.count,
                "bytes": version_bytes(folder.version(one.version), one),
            }
            for one in folder.manifests()
        ]

    found = await before(deadline_of(request, timeout_ms), opened.engine.run(listed))
    return {"name": served.name, "versions": found}


async def _reload(request: Request, timeout_ms: int | None = None) -> bytes:
    catalog = get_state(request).catalog
    deadline = deadline_of(request, timeout_ms)
    return await described(await catalog.reload(index_name(request), deadline), deadline)


async def described(opened: Opened, deadline: float) -> bytes:
    """Returns the response that describes an index; a thread counts the values of its filters."""
    filters = opened.snapshot.segment.filters
    if not filters.is_counted:
        await before(deadline, opened.engine.run(filters.frequent_values))
    return _index_response(opened)


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


def _index_response(opened: Opened, **counted: Any) -> bytes:
    """Returns an `IndexResponse`; `counted` has what is other than for the whole index."""
    loaded, engine = opened.snapshot, opened.engine
    manifest = loaded.manifest
    of_index = {
        "documents": manifest.corpus.documents,
        **filter_fields(loaded.segment.filter_values),
        "filter_field_count": len(loaded.segment.filters.fields),
    }
    fields: dict[str, Any] = {**dict(manifest), **of_index, **counted}
    # Not validated: its values are those of the loaded files.
    response = schemas.IndexResponse.model_construct(
        **fields,
        active=opened.is_active,
        pair=engine.pair.name,
        embedding_space=manifest.encoder.embedding_space,
        dimension=manifest.encoder.dimension,
        modes=list(loaded.modes),
        reranker=engine.reranker(loaded),
        answerable_thresholds=loaded.answerable_thresholds,
    )
    return to_json(response)
