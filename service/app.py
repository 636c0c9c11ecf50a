"""The application: created from the settings, with its encoder, index, routes and middleware."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan

from core.breaker import Breaker
from core.encoders import QueryEncoder
from core.errors import IndexVersionError, PairError, required_packages
from core.versions import IndexFolder, read_manifest
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.pairs import load_pair
from search.snapshot import Snapshot, check_space, open_version
from service.access.guards import Access, RequireKey, State
from service.access.limits import LimitRequests
from service.access.rate_limit import Buckets
from service.catalog import Catalog
from service.http.context import RequestContext
from service.http.cors import Cors, Preflight
from service.limits import AnswerBudget, Usages
from service.observe.audit import AuditLog
from service.observe.logs import log_failure
from service.observe.metrics import Metrics, RedisError
from service.observe.tracing import Tracer, make_tracer
from service.pipeline.cache import MemoryCache
from service.pipeline.engine import Engine
from service.pipeline.served_index import DAMAGE, Served, ServedIndex, open_store
from service.routes.answer import answer_routes
from service.routes.application import Application
from service.routes.indexes import create_routes, delete_routes
from service.routes.openai import openai_routes
from service.routes.search import PAGE, admin_routes, list_routes, public_routes, search_routes
from service.routes.writes import write_routes
from service.settings import Settings, plain
from service.writes import Writes

_LOG = logging.getLogger("care.service")

ROUTERS = (
    *(search_routes, answer_routes, write_routes, list_routes, openai_routes, admin_routes),
    *(create_routes, delete_routes, public_routes),
)

if TYPE_CHECKING:
    from service.pipeline.redis_tier import RedisGuard
    from service.pipeline.rerank_server import RerankServer


@dataclass(frozen=True, slots=True)
class Shared:
    """What a worker shares with the others of a service."""

    is_first: bool  # whether this worker logs and counts what happens to all
    metrics: Metrics  # of this worker; their page is that of all
    usages: Usages  # what all take of their limits
    buckets: Buckets  # the rates of API keys
    secret: str  # of the keys of caches, if the settings have none
    # Makes an empty memory cache, which knows what all have found.
    cache: Callable[[int, int], MemoryCache]
    # Returns the version that all serve, which is opened by the function that it gets.
    serve: Callable[[Callable[..., Snapshot]], Served]
    # Lets the other workers load the active version of an index that they have open, or one with at
    # least this number.
    tell_others: Callable[[str, int | None], Coroutine[Any, Any, None]]
    writer: str  # the socket of the writer process, if there is one
    # Shows that the event loop of this worker runs, until it is cancelled.
    beat: Callable[[], Coroutine[Any, Any, None]]


def load_query_encoder(settings: Settings, name: str | None = None) -> OnnxEncoder:
    """Loads the query encoder of a pair, by default the configured one, and runs its warm-up."""
    name = name or settings.pair
    pair = load_pair(name, settings.pairs)
    if pair.query.format != "onnx":
        message = (
            f"the query encoder of '{pair.name}' is a checkpoint, and the service runs ONNX: "
            f"export it with 'care export --pair {name} --out {settings.pairs}/NAME', "
            "then set CARE_PAIR=NAME"
        )
        raise PairError(message, code="pair_not_exported", pair=name)
    provider = ProviderOptions(
        name=settings.provider,
        cache=settings.tensorrt_cache,
        batch_tokens=settings.batch_tokens,
    )
    encoder = OnnxEncoder(pair.query, pair.folder, settings.encode_threads, provider)
    encoder.warm_up()
    return encoder


def create_app(
    settings: Settings,
    encoder: QueryEncoder | None = None,
    overflow: QueryEncoder | None = None,
    shared: "Shared | None" = None,
    writer: str = "",
) -> FastAPI:
    """Creates the application with its engine; all settings are checked before an encoder loads.

    CareError if a setting is wrong, or the encoder or the index cannot be loaded.

    Args:
        encoder: A query encoder to use instead of the configured pair's.
        overflow: One to use for a full queue, instead of that of `overflow_pair`.
        shared: What this process shares with other workers, if there are any.
        writer: The socket of the writer process of a service without workers; without one,
            documents cannot be written.
    """
    if shared:
        metrics = shared.metrics
    else:
        metrics = Metrics()
        metrics.workers.set(1)
    redis = _redis(settings, metrics)
    access = Access.of(settings, redis, shared.buckets if shared else None)
    tracer = make_tracer()
    audit = AuditLog(settings.audit_file) if settings.audit_file else None
    catalog = build_catalog(settings, metrics, redis, encoder, overflow, shared)
    try:
        writer = shared.writer if shared else writer
        writes = Writes(writer, catalog.follow, metrics) if writer else None
        return build_app(settings, metrics, catalog, access, tracer, shared, audit, writes)
    except BaseException:
        catalog.stop()  # its threads would keep the process alive
        raise


def build_catalog(
    settings: Settings,
    metrics: Metrics,
    redis: "RedisGuard | None" = None,
    encoder: QueryEncoder | None = None,
    overflow: QueryEncoder | None = None,
    shared: "Shared | None" = None,
) -> Catalog:
    """Loads the query encoders and the default index, and starts the threads.

    The arguments are those of `create_app`; `redis` holds the cache that replicas share.
    """
    pair = load_pair(settings.pair, settings.pairs)
    reranker = None
    if settings.rerank_url:
        breaker = Breaker("the server of CARE_RERANK_URL")
        metrics.follow(metrics.rerank_breaker, lambda: breaker.state)
        reranker = make_reranker(settings, breaker)
    store = open_store(settings)
    index = IndexFolder(settings.indexes, settings.index)
    store.fetch(settings.indexes)
    version = store.active_version(index)
    try:
        manifest = read_manifest(index.version(version))
        check_space(manifest, encoder.spec if encoder else pair.query)
        if settings.overflow_pair:
            spec = load_pair(settings.overflow_pair, settings.pairs).query
            check_space(manifest, spec, "CARE_OVERFLOW_PAIR")
    except IndexVersionError as error:
        # In place of a damaged version the engine serves the last whole one.
        if error.code not in DAMAGE:
            raise
    encoder = encoder or load_query_encoder(settings)
    if settings.overflow_pair and not overflow:
        overflow = load_query_encoder(settings, settings.overflow_pair)
    cache = None
    if redis:
        from service.pipeline.redis_tier import RedisCache

        secret = plain(settings.cache_secret).encode()
        cache = RedisCache(redis, secret, settings.cache_ttl_seconds)
    of_workers: dict[str, Any] = {}
    if shared:
        of_workers = {"usages": shared.usages, "make_cache": shared.cache, "secret": shared.secret}
    encoders = [(pair, encoder, overflow)]
    for name in settings.other_pairs:
        other = load_pair(name, settings.pairs), load_query_encoder(settings, name), None
        encoders.append(other)
    openings, engines = {}, {}
    for one, its_encoder, its_overflow in encoders:
        space = its_encoder.spec.embedding_space
        if space in openings:
            message = f"CARE_OTHER_PAIRS: '{one.name}' has the embedding space of another pair"
            raise PairError(message, code="same_space", pair=one.name)
        also = [its_overflow] if its_overflow else []
        openings[space] = partial(
            open_version, encoder=its_encoder, store=store, others=also, pair=one
        )
    opening = openings[encoder.spec.embedding_space]
    served: Served
    if shared:
        served = shared.serve(opening)
    else:
        served = ServedIndex(index, partial(store.active_version, index), opening, metrics)
    for one, its_encoder, its_overflow in encoders:
        parts = one, its_encoder, its_overflow, metrics, cache, reranker
        engines[its_encoder.spec.embedding_space] = Engine(settings, *parts, **of_workers)
    tell_others = shared.tell_others if shared else None
    return Catalog(settings, served, engines, openings, store, tell_others)


def build_app(
    settings: Settings,
    metrics: Metrics,
    catalog: Catalog,
    access: Access,
    tracer: Tracer | None = None,
    shared: "Shared | None" = None,
    audit: AuditLog | None = None,
    writes: Writes | None = None,
) -> FastAPI:
    """Creates the application around a catalog, which it closes: its routes and middleware."""
    engine = catalog.default.engine
    chat = None
    if settings.chat_url:
        with required_packages("CARE_CHAT_URL", "pip install 'care-retrieval[chat]'"):
            from service.pipeline.chat_server import ChatServer
        address, timeout = plain(settings.chat_url), settings.chat_timeout_ms / 1000
        chat = ChatServer(address, settings.chat_model, plain(settings.chat_key), timeout)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_failure)
        tasks = [
            loop.create_task(catalog.served.watch(settings.watch_seconds)),
            loop.create_task(catalog.watch()),
            loop.create_task(catalog.glance()),
        ]
        quiet = shared is not None and not shared.is_first
        tasks += (loop.create_task(file.follow(metrics, quiet=quiet)) for file in access.files)
        if shared:
            tasks.append(loop.create_task(shared.beat()))
        yield
        if writes:
            await writes.close()
        for task in tasks:
            task.cancel()
        await catalog.close()
        if chat:
            await chat.close()
        if tracer:
            await asyncio.to_thread(tracer.close)
        if audit:
            audit.close()

    app = _with_routes(lifespan)
    app.mount("/page/swagger", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    # The last one added is the outermost. Preflight requests of browsers carry no key.
    routes = [route for router in ROUTERS for route in router.routes]
    app.add_middleware(
        LimitRequests,
        settings=settings,
        limits=engine.limits,
        metrics=metrics,
        usages=engine.usages,
    )
    app.add_middleware(RequireKey, routes=routes)
    cors = Cors(settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(Preflight, cors=cors)
    app.add_middleware(RequestContext, metrics=metrics, tracer=tracer, cors=cors, audit=audit)
    metrics.register_routes(
        {
            route.path_format: [route.status_code or 200, *(int(code) for code in route.responses)]
            for route in routes
            if isinstance(route, APIRoute)
        }
    )
    answers = AnswerBudget(engine.limits.answer_bytes, engine.usages.answer_bytes)
    app.state.service = State(
        settings,
        engine.pair.name,
        metrics,
        engine,
        catalog,
        access,
        answers,
        chat,
        writes,
    )
    return app


def openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI document of the service."""
    return _with_routes().openapi()


def _with_routes(lifespan: Lifespan[FastAPI] | None = None) -> Application:
    app = Application(
        title="CARE retrieval",
        description="Search in Chinese medical text.",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect is to the scheme and host that the request names, and can so leave TLS.
        redirect_slashes=False,
    )
    # Not by `include_router`, which wraps each route.
    app.router.routes.extend(route for router in ROUTERS for route in router.routes)
    return app


def _redis(settings: Settings, metrics: Metrics) -> "RedisGuard | None":
    if settings.redis_url is None:
        return None
    # Its client takes a fifth of a second to import.
    from service.pipeline.redis_tier import RedisGuard

    breaker, writes = Breaker("Redis"), Breaker("writes to Redis")
    metrics.follow(metrics.redis_breaker, lambda: breaker.state)
    metrics.follow(metrics.redis_write_breaker, lambda: writes.state)
    url, timeout = plain(settings.redis_url), settings.redis_timeout_ms / 1000

    def count(kind: RedisError) -> None:
        metrics.redis_errors.labels(kind).inc()

    return RedisGuard(url, timeout, breaker, writes, count)


def make_reranker(settings: Settings, breaker: Breaker) -> "RerankServer":
    """Returns the client of the server of `CARE_RERANK_URL`, which is set."""
    with required_packages("CARE_RERANK_URL", "pip install 'care-retrieval[rerank]'"):
        from service.pipeline.rerank_server import RerankServer
    url, key = plain(settings.rerank_url), plain(settings.rerank_key)
    timeout = settings.rerank_timeout_ms / 1000
    return RerankServer(
        url, settings.rerank_model, key, timeout, breaker, settings.rerank_truncate_tokens
    )
