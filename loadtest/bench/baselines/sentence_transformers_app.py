"""A typical search application of FastAPI, sentence-transformers and FAISS.

It runs in the folder of the model.
"""

from typing import Any

from common import Search, prompt
from common import search as find
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer

app = FastAPI()
model = SentenceTransformer(".", device="cpu")


@app.post("/search")
def search(body: Search) -> dict[str, Any]:
    """Returns the hits of a query."""
    vectors = model.encode([prompt + body.query], normalize_embeddings=True)
    return find(vectors, body.top_k)


@app.post("/encode")
def encode(body: Search) -> list[float]:
    """Returns the vector of a query, to compare the systems' vectors."""
    vector: list[float] = model.encode([prompt + body.query], normalize_embeddings=True)[0].tolist()
    return vector
