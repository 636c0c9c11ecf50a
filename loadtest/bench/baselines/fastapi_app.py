"""An application of FastAPI that returns the same hits for each query: what HTTP costs alone."""

import json
import os
from pathlib import Path

from fastapi import FastAPI, Response
from pydantic import BaseModel
from pydantic_core import to_json

hits = json.loads(Path(os.environ["BENCH_HITS"]).read_text(encoding="utf-8"))
app = FastAPI()


class Search(BaseModel):
    """Body of a request."""

    query: str
    top_k: int = 10


@app.post("/search")
async def search(body: Search) -> Response:
    """Returns the hits."""
    content = to_json({"hits": hits[: body.top_k]})
    return Response(content, media_type="application/json")
