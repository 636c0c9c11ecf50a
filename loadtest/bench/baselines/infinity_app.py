"""Search application of FastAPI, FAISS and infinity's engine, which batches concurrent requests.

The engine runs in the application's process: with infinity's HTTP server each search would need
a second request, with the vector as JSON.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from common import Search, prompt
from common import search as find
from fastapi import FastAPI
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from starlette.concurrency import run_in_threadpool

# infinity finds the ONNX file of a local model only in the working directory.
engine = AsyncEmbeddingEngine.from_args(
    EngineArgs(
        model_name_or_path=".",
        engine="optimum",
        device="cpu",
        pooling_method="mean",
        trust_remote_code=False,
        # The graph is already fused; optimising it again fails.
        onnx_disable_optimize=True,
    )
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Starts the engine with the application and stops it with it."""
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/search")
async def search(body: Search) -> dict[str, Any]:
    """Returns the hits of a query."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    return await run_in_threadpool(find, np.stack(vectors), body.top_k)


@app.post("/encode")
async def encode(body: Search) -> list[float]:
    """Returns the vector of a query, to compare the systems' vectors."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    return [float(element) for element in vectors[0]]
