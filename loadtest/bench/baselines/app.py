"""Search applications of FastAPI and FAISS around other encoders, for `make bench-peers`.

BENCH_PEER is the name of a function here. It runs with the Python of its own environment, in the
folder of its model.
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel


class Search(BaseModel):
    """Body of a request."""

    query: str
    top_k: int = 10


def fastapi() -> FastAPI:
    """Returns the same hits for each query: what HTTP costs alone."""
    from pydantic_core import to_json

    hits = _documents()
    app = FastAPI()

    @app.post("/search")
    async def search(body: Search) -> Response:
        return Response(to_json({"hits": hits[: body.top_k]}), media_type="application/json")

    return app


def sentence_transformers() -> FastAPI:
    """Encodes each query with sentence-transformers, in a thread."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(".", device="cpu")
    find, prompt = _index()
    app = FastAPI()

    def vectors(body: Search) -> Any:
        return model.encode([prompt + body.query], normalize_embeddings=True)

    @app.post("/search")
    def search(body: Search) -> dict[str, Any]:
        return find(vectors(body), body.top_k)

    @app.post("/encode")
    def encode(body: Search) -> list[float]:
        return vectors(body)[0].tolist()

    return app


def infinity() -> FastAPI:
    """Encodes with infinity's engine, which batches concurrent requests.

    The engine runs in the application's process: with infinity's HTTP server each search would
    need a second request, with the vector as JSON.
    """
    import numpy as np
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
    find, prompt = _index()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/search")
    async def search(body: Search) -> dict[str, Any]:
        vectors, _ = await engine.embed(sentences=[prompt + body.query])
        return await run_in_threadpool(find, np.stack(vectors), body.top_k)

    @app.post("/encode")
    async def encode(body: Search) -> list[float]:
        vectors, _ = await engine.embed(sentences=[prompt + body.query])
        return [float(element) for element in vectors[0]]

    return app


def _documents() -> list[Any]:
    with Path(os.environ["BENCH_DOCUMENTS"]).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _index() -> Any:
    """Returns a search by a vector, float32 [1, dimension], and the prompt of queries."""
    import faiss
    import numpy as np

    index, documents = faiss.read_index(os.environ["BENCH_VECTORS"]), _documents()

    def find(vectors: Any, top_k: int) -> dict[str, Any]:
        scores, rows = index.search(np.asarray(vectors), top_k)
        hits = zip(scores[0], rows[0], strict=True)
        return {"hits": [{**documents[row], "score": float(score)} for score, row in hits]}

    return find, os.environ["BENCH_PROMPT"]


app = globals()[os.environ["BENCH_PEER"]]()
