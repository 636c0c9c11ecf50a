"""Canaries: a few documents whose vectors a query encoder must be able to find.

Names of embedding spaces can be wrong; vectors cannot. A query encoder that shares the
index's space places a document's own text nearest to that document's vector. One that
does not finds it by chance only, once in the number of canaries.
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
# What the vectors themselves must find in an index of approximations.
MIN_FOUND = 0.75
# What a query encoder must find. A small one confuses near-duplicates, of which a corpus may be
# full; a foreign one finds 1 in 16 by chance, and half of 16 three times in a million.
_MIN_SHARED = 0.5
_CANDIDATES = 16


def canary_candidates(count: int) -> list[int]:
    """Returns up to 256 row numbers spread evenly over `count` documents, ascending."""
    return _spread(count, MAX_CANARIES * _CANDIDATES)


def choose_canaries(lengths: Sequence[int]) -> list[int]:
    """Chooses up to 16 canaries by the lengths of candidates' texts, in any unit.

    Each start of a service encodes them all: of about sixteen neighbours the shortest is taken.
    Positions ascend.
    """
    starts = [*_spread(len(lengths), MAX_CANARIES), len(lengths)]
    return [min(range(a, b), key=lengths.__getitem__) for a, b in pairwise(starts)]


def make_canaries(texts: Sequence[str], vectors: FloatArray) -> list[Canary]:
    """Packs texts and their document vectors, float32 [n, dimension]."""
    return [
        Canary(text=text, vector=base64.b64encode(vector.astype("<f4").tobytes()).decode())
        for text, vector in zip(texts, vectors, strict=True)
    ]


def canary_vectors(canaries: Sequence[Canary]) -> FloatArray:
    """Returns float32 [n, dimension], the document vectors of the canaries.

    Raises:
        IndexVersionError: If they are not base64 of float32 vectors of one length.
    """
    try:
        return np.stack([np.frombuffer(base64.b64decode(c.vector), dtype="<f4") for c in canaries])
    except ValueError as error:
        message = f"the index's canaries are damaged: {error}"
        raise IndexVersionError(message, code="bad_canaries") from error


def check_canaries(encoder: Encoder, canaries: Sequence[Canary]) -> None:
    """Encodes each canary as a query and looks for its vector among all canaries.

    Raises:
        EmbeddingSpaceError: If fewer than half find themselves.
    """
    vectors = canary_vectors(canaries)
    if vectors.shape[1] != encoder.spec.dimension:
        raise EmbeddingSpaceError(
            f"the index has {vectors.shape[1]} dimensions, "
            f"the query encoder {encoder.spec.dimension}",
            code="dimension_mismatch",
            index=vectors.shape[1],
            encoder=encoder.spec.dimension,
        )
    queries = np.concatenate([encoder.encode([canary.text]).vectors for canary in canaries])
    scores = queries @ vectors.T
    own = scores.diagonal()
    found = float((own >= scores.max(axis=1)).mean())
    if found < _MIN_SHARED:
        message = (
            f"only {found:.0%} of the index's canaries are found by the query encoder "
            f"{encoder.spec.model}: it does not share the index's embedding space"
        )
        raise EmbeddingSpaceError(message, code="canaries_not_found", found=found)


def _spread(count: int, most: int) -> list[int]:
    number = min(count, most)
    return [i * count // number for i in range(number)]
