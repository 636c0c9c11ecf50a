from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles

from core.types import Encoder
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from service.engine import Engine
from service.metrics import Metrics
from service.middleware import BodyLimit, RequestContext
from service.problems import add_problem_handlers
from service.routes import PAGE, router
from service.settings import Settings


def load_query_encoder(settings: Settings) -> OnnxEncoder:
    """Loads the query side of the configured pair.

    Raises:
        PairError: If the pair is unknown or its files are missing or wrong.
    """
    pair = load_pair(settings.pair)
    return OnnxEncoder(pair.query, pair.folder, settings.threads)


def create_app(settings: Settings, encoder: Encoder) -> FastAPI:
    """Builds the application around an encoder, with the active index loaded and checked.

    Raises:
        IndexVersionError: If the index cannot be served.
    """
    metrics = Metrics()
    engine = Engine(settings, encoder, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(
        title="CARE retrieval",
        description="Search in Chinese medical text.",
        version="1",
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.settings = settings
    app.state.metrics = metrics
    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    add_problem_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestContext, metrics=metrics)
    metrics.register_routes(
        {
            route.path: [route.status_code or 200, *(int(code) for code in route.responses)]
            for route in router.routes
            if isinstance(route, APIRoute)
        }
    )
    return app
