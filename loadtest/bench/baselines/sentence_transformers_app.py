"""What most people write: FastAPI, sentence-transformers and FAISS in one function."""

import json
import os
from pathlib import Path
from typing import Any

import faiss
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

app = FastAPI()
model = SentenceTransformer(os.environ["BENCH_MODEL"], device="cpu")
index = faiss.read_index(os.environ["BENCH_VECTORS"])
with Path(os.environ["BENCH_DOCUMENTS"]).open(encoding="utf-8") as lines:
    documents = [json.loads(line) for line in lines]
prompt = os.environ["BENCH_PROMPT"]


class Search(BaseModel):
    """A question."""

    query: str
    top_k: int = 10


@app.post("/search")
def search(body: Search) -> dict[str, Any]:
    """Finds passages."""
    vector = model.encode([prompt + body.query], normalize_embeddings=True)
    scores, rows = index.search(vector, body.top_k)
    return {
        "hits": [
            {**documents[row], "score": float(score)}
            for score, row in zip(scores[0], rows[0], strict=True)
        ]
    }


@app.post("/encode")
def encode(body: Search) -> list[float]:
    """The question's vector, to compare systems by."""
    vector: list[float] = model.encode([prompt + body.query], normalize_embeddings=True)[0].tolist()
    return vector


@app.get("/ready")
def ready() -> bool:
    """Answers once the model is loaded."""
    return True
