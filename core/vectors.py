"""The vector rules: pool, then keep the first d dimensions, then scale to unit norm."""

import numpy as np
from numpy.typing import NDArray

from core.encoders import Pooling
from core.errors import VectorError
from core.types import FloatArray


def pool(tokens: FloatArray, mask: NDArray[np.integer], pooling: Pooling) -> FloatArray:
    """Reduces token vectors, float32 [n, length, dimension], to float32 [n, dimension].

    The mask, [n, length], is 1 for a token, 0 for padding on the right.

    Raises:
        VectorError: If a text has no token.
    """
    lengths = mask.sum(axis=1)
    if not (lengths > 0).all():
        raise VectorError("a text without tokens has no vector", code="no_tokens")
    if pooling == "cls":
        return np.ascontiguousarray(tokens[:, 0])
    if pooling == "last_token":
        return np.ascontiguousarray(tokens[np.arange(len(tokens)), lengths - 1])
    total = (tokens * mask[:, :, None]).sum(axis=1)
    mean: FloatArray = (total / lengths[:, None]).astype(np.float32)
    return mean


def truncate_normalize(vectors: FloatArray, dimension: int) -> FloatArray:
    """Keeps the first `dimension` dimensions, then scales to unit L2 norm.

    Truncating a Matryoshka embedding (arXiv 2205.13147) leaves a shorter vector, so the
    scaling comes last. Takes float32 [n, m], m ≥ dimension; returns float32 [n, dimension],
    C-contiguous.

    Raises:
        VectorError: If the vectors are too short, hold NaN or infinity, or are zero.
    """
    if vectors.ndim != 2 or vectors.shape[1] < dimension:
        message = f"vectors of shape {vectors.shape} cannot be truncated to {dimension} dimensions"
        raise VectorError(message, code="too_few_dimensions", dimension=dimension)
    kept = np.ascontiguousarray(vectors[:, :dimension], dtype=np.float32)
    # In float32 the squares of a finite vector can overflow, or vanish.
    norms = np.linalg.norm(kept.astype(np.float64), axis=1, keepdims=True)
    bad = ~(np.isfinite(norms) & (norms > 0)).ravel()
    if bad.any():
        row = int(bad.argmax())
        message = f"vector {row} of {len(bad)} is zero, NaN or infinite"
        raise VectorError(message, code="not_finite", row=row)
    unit: FloatArray = (kept / norms).astype(np.float32)
    return unit
