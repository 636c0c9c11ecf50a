"""Canaries: a few documents whose vectors a query encoder must retrieve.

The name of an embedding space can be wrong, so the vectors are compared too. If a query encoder
shares the space of the index, the vector of a document's own text is nearest to that document's
vector. Otherwise the expected hit rate is one in the number of canaries.
"""

import base64
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from core.encoders import Encoder
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.manifest import Canary
from core.types import FloatArray

MAX_CANARIES = 16
# Minimum share of canaries that an approximate index returns for their own vectors.
MIN_INDEX_RECALL = 0.75
# Minimum share of canaries that a query encoder retrieves. A small encoder confuses
# near-duplicates, which can be frequent. An encoder of another space retrieves 1 in 16 by chance,
# and 8 of 16 with a probability of 3e-6.
_MIN_QUERY_RECALL = 0.5
_CANDIDATES = 16


def canary_candidates(count: int) -> list[int]:
    """Returns up to 256 evenly spaced row numbers of `count` documents, ascending."""
    return _evenly_spaced(count, MAX_CANARIES * _CANDIDATES)


def choose_canaries(lengths: Sequence[int]) -> list[int]:
    """Returns the ascending positions in `lengths` of up to 16 candidates that become canaries.

    The service encodes all canaries when it starts, so the shortest of about 16 neighbouring
    candidates is chosen, by the lengths of their texts in any unit.
    """
    starts = [*_evenly_spaced(len(lengths), MAX_CANARIES), len(lengths)]
    return [min(range(a, b), key=lengths.__getitem__) for a, b in pairwise(starts)]


def make_canaries(texts: Sequence[str], vectors: FloatArray) -> list[Canary]:
    """Returns canaries of n texts and their document vectors, float32 [n, dimension]."""
    return [
        Canary(text=text, vector=base64.b64encode(vector.astype("<f4").tobytes()).decode())
        for text, vector in zip(texts, vectors, strict=True)
    ]


def canary_vectors(canaries: Sequence[Canary]) -> FloatArray:
    """Returns the document vectors of the canaries, float32 [n, dimension].

    Raises:
        IndexVersionError: If a vector is not valid base64 of finite numbers, or their lengths
            differ.
    """
    try:
        decoded = [np.frombuffer(base64.b64decode(c.vector), dtype="<f4") for c in canaries]
        vectors = np.stack(decoded)
        if not np.isfinite(vectors).all():
            raise ValueError("not all numbers are finite")
        return vectors
    except ValueError as error:
        message = f"the canaries of the index are damaged ({error}): build the index again"
        raise IndexVersionError(message, code="bad_canaries") from error


def check_canaries(encoder: Encoder, canaries: Sequence[Canary]) -> None:
    """Encodes each canary as a query and searches for its document vector among all canaries.

    Raises:
        EmbeddingSpaceError: If fewer than half of the queries rank their own vector first, or the
            dimensions of index and encoder differ.
    """
    vectors = canary_vectors(canaries)
    if vectors.shape[1] != encoder.spec.dimension:
        raise EmbeddingSpaceError(
            f"the index has {vectors.shape[1]} dimensions and the query encoder "
            f"{encoder.spec.model} has {encoder.spec.dimension}: use the pair that built the index",
            code="dimension_mismatch",
            index=vectors.shape[1],
            encoder=encoder.spec.dimension,
        )
    queries = np.concatenate([encoder.encode([canary.text]).vectors for canary in canaries])
    scores = queries @ vectors.T
    own = scores.diagonal()
    found = float((own >= scores.max(axis=1)).mean())
    if found < _MIN_QUERY_RECALL:
        message = (
            f"the query encoder {encoder.spec.model} retrieves only {found:.0%} of the canaries of "
            "the index, so it has another embedding space: use the pair that built the index"
        )
        raise EmbeddingSpaceError(message, code="canaries_not_found", found=found)


def _evenly_spaced(count: int, limit: int) -> list[int]:
    number = min(count, limit)
    return [i * count // number for i in range(number)]
