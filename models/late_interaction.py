"""Late interaction: MaxSim of token vectors, pooling of a document's tokens, and their codecs.

A token vector is the projected state of one token in the last layer, with unit norm. The score of a
document is the mean over the tokens of the query of the largest dot product with a token of the
document. ColBERT (arXiv 2004.12832, equation 3) sums instead; the order of the documents of a query
is the same, but the mean does not depend on the length of the query.
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from core.choices import Codec as Codec
from core.types import FloatArray, RowArray

CODECS: tuple[Codec, ...] = get_args(Codec)
_BITS: dict[Codec, int] = {"fp16": 16, "int8": 8, "2bit": 2, "1bit": 1}

# Codecs divide values by 1 / √dimension, their standard deviation in vectors of unit norm, before
# they are rounded. An 8-bit integer is 32 times that, so it reaches ±4 standard deviations.
_INT8_SCALE = 32.0
# The quantiser of four levels with the least squared error for a normal distribution
# (Max, 1960, table 1): values between the levels -1.510, -0.4528, 0.4528 and 1.510.
_LEVELS = np.array([-1.510, -0.4528, 0.4528, 1.510], dtype=np.float32)
_BOUNDS = np.array([-0.9816, 0.0, 0.9816], dtype=np.float32)
_BYTES = np.arange(256, dtype=np.uint8)
# The values that each byte stands for, float32 [256, dimensions of a byte].
_VALUES: dict[Codec, FloatArray] = {
    "2bit": _LEVELS[_BYTES[:, None] >> np.array([6, 4, 2, 0], np.uint8) & 3],
    "1bit": np.unpackbits(_BYTES[:, None], axis=1).astype(np.float32) * 2 - 1,
}


def max_sim(query: FloatArray, documents: Sequence[FloatArray]) -> FloatArray:
    """Returns the scores of documents for a query.

    Args:
        query: float32 [tokens, k], unit norm; at least one token.
        documents: The token vectors of each document, float32 [tokens, k]; at least one token each.

    Returns:
        float32 [documents], between -1 and 1.
    """
    if not documents:
        return np.empty(0, dtype=np.float32)
    lengths = np.array([len(document) for document in documents])
    return max_sim_of_rows(query, np.concatenate(documents), lengths)


def max_sim_of_rows(query: FloatArray, documents: FloatArray, lengths: RowArray) -> FloatArray:
    """Returns the scores of documents as `max_sim`, given their token vectors one after another.

    Args:
        query: float32 [tokens, k], unit norm; at least one token.
        documents: float32 [all tokens, k], unit norm.
        lengths: int64 [documents], number of tokens of each document, at least one.

    Returns:
        float32 [documents], between -1 and 1.
    """
    similarities = documents @ query.T
    best = np.maximum.reduceat(similarities, np.cumsum(lengths) - lengths, axis=0)
    scores: FloatArray = best.mean(axis=1, dtype=np.float32)
    return scores


def pool_tokens(vectors: FloatArray, factor: int) -> FloatArray:
    """Replaces similar token vectors of a document by their normalised means.

    This is the hierarchical pooling of "Reducing the footprint of multi-vector retrieval with
    minimal performance impact via token pooling" (arXiv 2409.14683): clusters by Ward's method.

    Args:
        vectors: float32 [tokens, k], unit norm.
        factor: Tokens per cluster on average; 1 keeps all tokens.

    Returns:
        float32 [⌈tokens / factor⌉, k], unit norm.
    """
    clusters = _ward(vectors, -(-len(vectors) // factor))
    return normalized(np.stack([vectors[rows].mean(axis=0) for rows in clusters]))


def _ward(vectors: FloatArray, count: int) -> list[list[int]]:
    """Merges rows into `count` clusters, each time the two whose merge adds the least variance.

    The squared distances of a merged cluster follow from those of its parts (Lance and Williams,
    1967), so the vectors are compared only once.
    """
    squares = (vectors * vectors).sum(axis=1)
    distances = squares[:, None] + squares - 2 * vectors @ vectors.T
    np.fill_diagonal(distances, np.inf)
    sizes = np.ones(len(vectors), dtype=np.float32)
    clusters = [[row] for row in range(len(vectors))]
    for _ in range(len(vectors) - count):
        a, b = np.unravel_index(distances.argmin(), distances.shape)
        total = sizes[a] + sizes[b] + sizes
        merged = (sizes[a] + sizes) * distances[a] + (sizes[b] + sizes) * distances[b]
        merged = (merged - sizes * distances[a, b]) / total
        merged[[a, b]] = np.inf
        distances[a], distances[:, a] = merged, merged
        distances[b], distances[:, b] = np.inf, np.inf
        sizes[a] += sizes[b]
        clusters[a] += clusters[b]
        clusters[b] = []
    return [rows for rows in clusters if rows]


def encode_tokens(vectors: FloatArray, codec: Codec) -> NDArray[np.uint8]:
    """Returns the bytes of token vectors, uint8 [tokens, `bytes_per_token`].

    Args:
        vectors: float32 [tokens, k], unit norm; k is a multiple of 8. The codecs with 1 and 2 bits
            assume dimensions of equal variance.
        codec: One of `CODECS`.
    """
    scaled = vectors * np.float32(np.sqrt(vectors.shape[1]))
    match codec:
        case "fp16":
            return np.ascontiguousarray(vectors, np.float16).view(np.uint8)
        case "int8":
            integers: NDArray[np.int8]
            integers = np.rint(scaled * _INT8_SCALE).clip(-127, 127).astype(np.int8)
            return integers.view(np.uint8)
        case "2bit":
            levels = np.searchsorted(_BOUNDS, scaled).astype(np.uint8)
            pairs = np.stack([levels >> 1, levels & 1], axis=-1)
            packed: NDArray[np.uint8] = np.packbits(pairs.reshape(len(vectors), -1), axis=1)
            return packed
        case "1bit":
            return np.packbits(scaled > 0, axis=1)


def decode_tokens(encoded: NDArray[np.uint8], codec: Codec) -> FloatArray:
    """Decodes what `encode_tokens` returned; returns float32 [tokens, k] of unit norm."""
    match codec:
        case "fp16":
            vectors = encoded.view(np.float16).astype(np.float32)
        case "int8":
            vectors = encoded.view(np.int8).astype(np.float32)
        case _:
            vectors = _VALUES[codec].take(encoded, axis=0).reshape(len(encoded), -1)
    return normalized(vectors)


def bytes_per_token(dimension: int, codec: Codec) -> int:
    """Returns the size of an encoded token vector; `dimension` is a multiple of 8."""
    return dimension * _BITS[codec] // 8


def normalized(vectors: FloatArray) -> FloatArray:
    """Returns rows of unit norm; rows of zeros stay zero."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: FloatArray = (vectors / np.where(norms > 0, norms, 1)).astype(np.float32, copy=False)
    return unit
