import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Lifespan

from core.errors import PairError
from core.types import QueryEncoder
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.pairs import load_pair
from service.api_keys import ApiKeys
from service.breaker import Breaker
from service.cache import QueryKeys
from service.engine import Engine
from service.logs import log_failure
from service.metrics import Metrics
from service.middleware import Limits, RequestContext
from service.problems import add_problem_handlers
from service.rate_limit import RateLimiter
from service.routes import PAGE, hot_router, router
from service.settings import Settings
from service.state import State
from service.tracing import make_tracer

if TYPE_CHECKING:
    from service.redis_tier import RedisCache, RedisGuard

_PREFIX = "care:"
_ROUTERS = (hot_router, router)


def load_query_encoder(settings: Settings) -> OnnxEncoder:
    """Loads the query side of the configured pair and runs each shape that matters once.

    Raises:
        PairError: If the pair is unknown, its query side is not exported, or its files are
            missing or wrong.
        ProviderError: If the configured provider is not installed.
    """
    pair = load_pair(settings.pair)
    if pair.query.format != "onnx":
        raise PairError(
            f"the query side of '{pair.name}' is a checkpoint, and the service runs ONNX: export "
            f"it by python -m models.export --pair {settings.pair} --out FOLDER, then set "
            "CARE_PAIR=FOLDER/pair.toml"
        )
    provider = ProviderOptions(name=settings.provider, cache=settings.tensorrt_cache)
    encoder = OnnxEncoder(pair.query, pair.folder, settings.encode_threads, provider)
    encoder.warm_up()
    return encoder


def create_app(settings: Settings, encoder: QueryEncoder) -> FastAPI:
    """Builds the application around an encoder, with the active index loaded and checked.

    Raises:
        IndexVersionError: If the index cannot be served.
        CareError: If a setting cannot be used.
    """
    metrics = Metrics()
    keys = ApiKeys.parse(settings.api_keys.get_secret_value() if settings.api_keys else "")
    tracer = make_tracer()
    secret = settings.cache_secret.get_secret_value() if settings.cache_secret else None
    guard, redis = _redis(settings, metrics, secret)
    engine = Engine(
        settings,
        encoder,
        metrics,
        QueryKeys(secret or secrets.token_hex(32), encoder.spec),
        redis,
    )
    limiter = (
        RateLimiter(settings.rate_limit, settings.rate_burst, guard, f"{_PREFIX}rate:")
        if settings.rate_limit
        else None
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(log_failure)
        yield
        await engine.close()
        if guard:
            await guard.close()
        if tracer:
            await asyncio.to_thread(tracer.close)

    app = _with_routes(lifespan)
    app.state.service = State(settings, metrics, engine, keys, limiter)
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
    app.add_middleware(
        Limits,
        max_bytes=settings.max_body_bytes,
        max_requests=settings.max_requests,
        timeout=settings.timeout_ms / 1000,
        metrics=metrics,
    )
    app.add_middleware(RequestContext, metrics=metrics, tracer=tracer)
    metrics.register_routes(
        {
            route.path: [route.status_code or 200, *(int(code) for code in route.responses)]
            for part in _ROUTERS
            for route in part.routes
            if isinstance(route, APIRoute)
        }
    )
    return app


def openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI document of the service."""
    return _with_routes().openapi()


def _with_routes(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    app = FastAPI(
        title="CARE retrieval",
        description="Search in Chinese medical text.",
        version="1",
        lifespan=lifespan,
        redoc_url=None,
    )
    for part in _ROUTERS:
        app.include_router(part)
    return app


def _redis(
    settings: Settings, metrics: Metrics, secret: str | None
) -> "tuple[RedisGuard, RedisCache | None] | tuple[None, None]":
    if settings.redis_url is None:
        return None, None
    # Its client takes a fifth of a second to import.
    from service.redis_tier import RedisCache, RedisGuard

    breaker = Breaker()
    metrics.redis_breaker.set_function(lambda: breaker.state)
    guard = RedisGuard(
        settings.redis_url.get_secret_value(),
        settings.redis_timeout_ms / 1000,
        breaker,
        lambda kind: metrics.redis_errors.labels(kind).inc(),
    )
    if secret is None:
        return guard, None
    return guard, RedisCache(guard, secret.encode(), f"{_PREFIX}query:", settings.cache_ttl_seconds)
