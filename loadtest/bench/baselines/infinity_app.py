"""infinity's engine, which batches what arrives together, behind FastAPI and beside FAISS.

The engine runs in the application's own process: its HTTP server would add a second hop, and a
vector as JSON, to each search.
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

# Of a local model, infinity finds the ONNX file only where it runs in its folder.
engine = AsyncEmbeddingEngine.from_args(
    EngineArgs(
        model_name_or_path=".",
        engine="optimum",
        device="cpu",
        pooling_method="mean",
        trust_remote_code=False,
        # The graph is fused already, and optimising it again fails on fused operators.
        onnx_disable_optimize=True,
    )
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Runs the engine as long as the application."""
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/search")
async def search(body: Search) -> dict[str, Any]:
    """Finds passages."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    return await run_in_threadpool(find, np.stack(vectors), body.top_k)


@app.post("/encode")
async def encode(body: Search) -> list[float]:
    """Returns the question's vector, to compare systems by."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    return [float(element) for element in vectors[0]]
