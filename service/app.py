"""The application: what it is made of, put together at start."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan

from core.breaker import Breaker
from core.encoders import QueryEncoder
from core.errors import PairError
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.pairs import load_pair
from service.api_keys import ApiKeys
from service.cache import QueryKeys
from service.engine import Engine
from service.logs import log_failure
from service.metrics import Metrics
from service.middleware import Limits, RequestContext
from service.problems import add_problem_handlers
from service.rate_limit import RateLimiter
from service.routes import PAGE, ROUTERS, State
from service.settings import Settings
from service.tracing import make_tracer
from stores.registry import MilvusAddress, VectorStores

if TYPE_CHECKING:
    from service.redis_tier import RedisCache, RedisGuard


def load_query_encoder(settings: Settings) -> OnnxEncoder:
    """Loads the query side of the configured pair and runs each shape that matters once.

    Raises:
        PairError: If the pair is unknown, not exported, or its files are missing or wrong.
        ProviderError: If the configured provider is not installed.
    """
    pair = load_pair(settings.pair)
    if pair.query.format != "onnx":
        found = f"the query side of '{pair.name}' is a checkpoint, and the service runs ONNX"
        export = f"python -m training.export --pair {settings.pair} --out FOLDER"
        message = f"{found}: export it by {export}, then set CARE_PAIR=FOLDER/pair.toml"
        raise PairError(message, code="pair_not_exported", pair=settings.pair)
    provider = ProviderOptions(name=settings.provider, cache=settings.tensorrt_cache)
    encoder = OnnxEncoder(pair.query, pair.folder, settings.encode_threads, provider)
    encoder.warm_up()
    return encoder


def create_app(settings: Settings, encoder: QueryEncoder | None = None) -> FastAPI:
    """Builds the application, with the active index loaded and checked; else raises `CareError`.

    Settings are checked before anything that takes long. An encoder that is given stands for
    that of the configured pair.
    """
    metrics = Metrics()
    keys = ApiKeys.parse(_plain(settings.api_keys))
    pair = load_pair(settings.pair)
    tracer = make_tracer()
    guard, redis = _redis(settings, metrics)
    milvus = _plain(settings.milvus_uri), _plain(settings.milvus_token)
    address = MilvusAddress(*milvus, settings.milvus_timeout_ms / 1000)
    store = VectorStores(address).get(settings.store)
    store.active_version(settings.indexes, settings.index)
    encoder = encoder or load_query_encoder(settings)
    query_keys = QueryKeys(_plain(settings.cache_secret) or secrets.token_hex(32), encoder.spec)
    engine = Engine(settings, store, pair.name, encoder, metrics, query_keys, redis)
    rate = settings.rate_limit
    limiter = RateLimiter(rate, settings.rate_burst, guard) if rate else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_failure)
        watching = loop.create_task(engine.watch(settings.watch_seconds))
        yield
        watching.cancel()
        await engine.close()
        if guard:
            await guard.close()
        if tracer:
            await asyncio.to_thread(tracer.close)

    app = _with_routes(lifespan)
    app.state.service = State(settings, pair.name, metrics, engine, keys, limiter)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    add_problem_handlers(app)
    # The last one added is the outermost.
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID", "X-Request-Timeout-Ms"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    app.add_middleware(Limits, settings=settings, metrics=metrics)
    app.add_middleware(RequestContext, metrics=metrics, tracer=tracer)
    metrics.register_routes(
        {
            route.path: [route.status_code or 200, *(int(code) for code in route.responses)]
            for router in ROUTERS
            for route in router.routes
            if isinstance(route, APIRoute)
        }
    )
    return app


def openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI document of the service."""
    return _with_routes().openapi()


def _with_routes(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    title, about = "CARE retrieval", "Search in Chinese medical text."
    app = FastAPI(title=title, description=about, version="1", lifespan=lifespan, redoc_url=None)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _plain(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""


def _redis(settings: Settings, metrics: Metrics) -> "tuple[RedisGuard | None, RedisCache | None]":
    if settings.redis_url is None:
        return None, None
    # Its client takes a fifth of a second to import.
    from service.redis_tier import RedisCache, RedisGuard

    breaker = Breaker()
    metrics.redis_breaker.set_function(lambda: breaker.state)
    url, timeout = _plain(settings.redis_url), settings.redis_timeout_ms / 1000
    guard = RedisGuard(url, timeout, breaker, lambda kind: metrics.redis_errors.labels(kind).inc())
    secret = _plain(settings.cache_secret).encode()
    return guard, RedisCache(guard, secret, settings.cache_ttl_seconds)
