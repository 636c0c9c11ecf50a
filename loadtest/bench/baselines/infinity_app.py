"""infinity's engine, which batches what arrives together, behind FastAPI and beside FAISS.

The engine runs in the application's own process: its HTTP server would add a second hop, and a
vector as JSON, to each search.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from fastapi import FastAPI
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from pydantic import BaseModel
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
index = faiss.read_index(os.environ["BENCH_VECTORS"])
with Path(os.environ["BENCH_DOCUMENTS"]).open(encoding="utf-8") as lines:
    documents = [json.loads(line) for line in lines]
prompt = os.environ["BENCH_PROMPT"]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Runs the engine as long as the application."""
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


class Search(BaseModel):
    """A question."""

    query: str
    top_k: int = 10


@app.post("/search")
async def search(body: Search) -> dict[str, Any]:
    """Finds passages."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    scores, rows = await run_in_threadpool(index.search, np.stack(vectors), body.top_k)
    return {
        "hits": [
            {**documents[row], "score": float(score)}
            for score, row in zip(scores[0], rows[0], strict=True)
        ]
    }


@app.post("/encode")
async def encode(body: Search) -> list[float]:
    """The question's vector, to compare systems by."""
    vectors, _ = await engine.embed(sentences=[prompt + body.query])
    return [float(element) for element in vectors[0]]


@app.get("/ready")
def ready() -> bool:
    """Answers once the model is loaded."""
    return True
