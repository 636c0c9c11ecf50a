"""Shared parts of the compared applications: index, documents, request and response."""

import json
import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from pydantic import BaseModel

index = faiss.read_index(os.environ["BENCH_VECTORS"])
prompt = os.environ["BENCH_PROMPT"]
with Path(os.environ["BENCH_DOCUMENTS"]).open(encoding="utf-8") as lines:
    documents = [json.loads(line) for line in lines]


class Search(BaseModel):
    """Body of a request."""

    query: str
    top_k: int = 10


def search(vectors: Any, top_k: int) -> dict[str, Any]:
    """Searches with one vector, float32 [1, dimension], and returns the response."""
    scores, rows = index.search(np.asarray(vectors), top_k)
    return {
        "hits": [
            {**documents[row], "score": float(score)}
            for score, row in zip(scores[0], rows[0], strict=True)
        ]
    }
