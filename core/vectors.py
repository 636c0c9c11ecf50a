"""Vector post-processing: truncation to the first d dimensions, normalisation."""

import numpy as np

from core.errors import VectorError
from core.types import FloatArray


def truncate_normalize(vectors: FloatArray, dimension: int) -> FloatArray:
    """Truncates vectors to their first `dimension` dimensions and scales them to unit L2 norm.

    The norm of a truncated Matryoshka embedding (arXiv 2205.13147) is below 1, so the vectors are
    scaled after truncation.

    Args:
        vectors: float32 [n, m] with m ≥ dimension.

    Returns:
        float32 [n, dimension], C-contiguous.

    Raises:
        VectorError: If vectors have fewer dimensions, contain NaN or infinity, or are zero.
    """
    if vectors.ndim != 2 or vectors.shape[1] < dimension:
        message = f"vectors of shape {vectors.shape} cannot be truncated to {dimension} dimensions"
        raise VectorError(message, code="too_few_dimensions", dimension=dimension)
    truncated = np.ascontiguousarray(vectors[:, :dimension], dtype=np.float32)
    # In float32, the squares of finite values can overflow or underflow.
    norms = np.linalg.norm(truncated.astype(np.float64), axis=1, keepdims=True)
    bad = ~(np.isfinite(norms) & (norms > 0)).ravel()
    if bad.any():
        row = int(bad.argmax())
        message = f"vector {row} of {len(bad)} is zero or contains NaN or infinity"
        raise VectorError(message, code="not_finite", row=row)
    unit: FloatArray = (truncated / norms).astype(np.float32)
    return unit
