"""Exact search in vectors on disk, on the processor or a GPU."""

import numpy as np
import torch

from core.rows import blocks
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from stores.exact import exact_search

# Documents and queries that are compared at a time: 0.5 GB of scores.
_DOCUMENTS, _QUERIES = 16_384, 8_192


def search(
    queries: FloatArray, documents: ShardedVectors, k: int, device: torch.device
) -> tuple[FloatArray, RowArray]:
    """Finds the k documents with the largest inner product with each query, float32 [q, d].

    Returns scores, float32 [q, k], descending, and rows, int64 [q, k].
    """
    chunks = documents.chunks(_DOCUMENTS)
    if device.type == "cpu":
        return exact_search(queries, chunks, k)
    scores = torch.full((len(queries), k), -torch.inf, device=device)
    rows = torch.full((len(queries), k), -1, device=device)
    vectors = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
    for first, chunk in chunks:
        part = torch.from_numpy(chunk).to(device)
        for some in blocks(len(queries), _QUERIES):
            found = (vectors[some] @ part.T).topk(min(k, len(part)))
            best = torch.cat([scores[some], found.values], dim=1).topk(k)
            both = torch.cat([rows[some], found.indices + first], dim=1)
            rows[some] = both.gather(1, best.indices)
            scores[some] = best.values
    return scores.cpu().numpy(), rows.cpu().numpy()
