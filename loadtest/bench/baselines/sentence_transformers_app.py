"""What most people write: FastAPI, sentence-transformers and FAISS; runs in the model's folder."""

from typing import Any

from common import Search, prompt
from common import search as find
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer

app = FastAPI()
model = SentenceTransformer(".", device="cpu")


@app.post("/search")
def search(body: Search) -> dict[str, Any]:
    """Finds passages."""
    vectors = model.encode([prompt + body.query], normalize_embeddings=True)
    return find(vectors, body.top_k)


@app.post("/encode")
def encode(body: Search) -> list[float]:
    """Returns the question's vector, to compare systems by."""
    vector: list[float] = model.encode([prompt + body.query], normalize_embeddings=True)[0].tolist()
    return vector
