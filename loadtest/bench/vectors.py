"""Synthetic vectors that are as hard to search as real embeddings of questions and answers.

A corpus is a mixture of topics around a common mean direction, like embeddings of texts on one
subject. The centre of a topic is Gaussian in 192 shared directions with decreasing weights. A
document deviates from its centre along 32 directions of its topic, plus a little noise in all
dimensions. Topics differ in size, and their number grows with the square root of the corpus. A
query is a document moved by 0.8 times the spread of its topic.

The parameters were chosen to match 15,000 medical passages and questions in the space of
multilingual-e5-small (384 dimensions). Values of real embeddings, synthetic ones in brackets:

- length of the mean vector 0.94 [0.94], cosine of two random documents 0.88 [0.88]
- cosine of a document and its 1st, 10th, 100th neighbour 0.96, 0.95, 0.94 [0.95, 0.94, 0.92]
- intrinsic dimension at 100 neighbours 21 [27], participation ratio of the covariance 52 [83]
- recall@10 of HNSW16 at efSearch 16, 32, 64, 128: 0.86, 0.93, 0.96, 0.98
  [0.85, 0.93, 0.97, 0.99]
- recall@10 of IVF256 at nprobe 1, 4, 16, 64: 0.45, 0.75, 0.91, 0.98
  [0.53, 0.71, 0.89, 0.99]
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core.files import atomic
from core.types import FloatArray, RowArray

CHUNK_ROWS = 50_000

_DIRECTIONS = 192
_LOCAL_DIRECTIONS = 32
_MEAN = 0.94
_WITHIN = 1.2
_NOISE = 0.3
_QUERY_MOVE = np.float32(0.8)
# Independent streams of random numbers.
_TOPICS, _DOCUMENTS, _QUERIES = 0, 1, 2


class SyntheticVectors:
    """Generator of documents and queries of unit norm; equal arguments give equal vectors.

    Args:
        count: Number of documents.
        dimension: Dimensions of the vectors, more than 192.
        seed: Seed of all random numbers.

    Raises:
        ValueError: If there are too few dimensions or no documents.
    """

    def __init__(self, count: int, dimension: int, seed: int = 0) -> None:
        if dimension <= _DIRECTIONS or count < 1:
            limits = f"dimension must be above {_DIRECTIONS} and count at least 1"
            raise ValueError(f"{limits}, not {dimension} and {count}")
        self.count = count
        self.dimension = dimension
        self._seed = seed
        random = self._random(_TOPICS)
        basis = np.linalg.qr(random.standard_normal((dimension, _DIRECTIONS + 1)))[0].T
        self._mean, self._directions = basis[0].astype(np.float32), basis[1:].astype(np.float32)
        weights = (np.arange(_DIRECTIONS) + 6.0) ** -0.9
        self._weights = (weights / np.linalg.norm(weights)).astype(np.float32)
        topics = max(1, round(8 * np.sqrt(count)))
        centres = random.standard_normal((topics, _DIRECTIONS), dtype=np.float32)
        self._centres = self._weights * centres
        order = random.random((topics, _DIRECTIONS)).argsort(axis=1)
        self._local = order[:, :_LOCAL_DIRECTIONS]
        shares = (np.arange(topics) + 20.0) ** -0.7
        self._shares = shares / shares.sum()

    def chunks(self) -> Iterator[tuple[int, FloatArray]]:
        """Yields the first row and the vectors of each chunk, float32 [≤ 50,000, dimension]."""
        for chunk, start in enumerate(range(0, self.count, CHUNK_ROWS)):
            random = self._random(_DOCUMENTS, chunk)
            _, latent = self._documents(random, min(CHUNK_ROWS, self.count - start))
            yield start, self._embed(random, latent)

    def queries(self, number: int) -> FloatArray:
        """Returns queries near evenly spaced documents, float32 [number, dimension]."""
        rows = np.linspace(0, self.count - 1, number).astype(np.int64)
        parts = []
        for chunk, start in enumerate(range(0, self.count, CHUNK_ROWS)):
            here = rows[(rows >= start) & (rows < start + CHUNK_ROWS)] - start
            size = min(CHUNK_ROWS, self.count - start)
            topics, latent = self._documents(self._random(_DOCUMENTS, chunk), size)
            random = self._random(_QUERIES, chunk)
            moves = self._deviations(random, topics[here])
            moves += self._weights * random.standard_normal(moves.shape, dtype=np.float32)
            parts.append(self._embed(random, latent[here] + _QUERY_MOVE * moves))
        return np.concatenate(parts)

    def _random(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *stream])

    def _documents(self, random: np.random.Generator, number: int) -> tuple[RowArray, FloatArray]:
        topics = random.choice(len(self._shares), number, p=self._shares)
        return topics, self._centres[topics] + self._deviations(random, topics)

    def _deviations(self, random: np.random.Generator, topics: RowArray) -> FloatArray:
        steps = random.standard_normal((len(topics), _LOCAL_DIRECTIONS), dtype=np.float32)
        steps *= np.float32(_WITHIN / _LOCAL_DIRECTIONS**0.5)
        deviations = np.zeros((len(topics), _DIRECTIONS), dtype=np.float32)
        np.put_along_axis(deviations, self._local[topics], steps, 1)
        return deviations

    def _embed(self, random: np.random.Generator, latent: FloatArray) -> FloatArray:
        vectors = random.standard_normal((len(latent), self.dimension), dtype=np.float32)
        vectors *= np.float32(_NOISE / self.dimension**0.5)
        vectors += latent @ self._directions
        # Scales the deviations so that the mean of all normalised vectors has the length _MEAN.
        variance = 1 + _WITHIN**2 + _NOISE**2
        vectors *= np.float32(((1 - _MEAN**2) / variance) ** 0.5 / _MEAN)
        vectors += self._mean
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def write_vectors(synthetic: SyntheticVectors, path: Path) -> None:
    """Writes all documents atomically as one `.npy` file, float32 [count, dimension]."""
    shape = (synthetic.count, synthetic.dimension)
    with atomic(path) as temporary:
        array = np.lib.format.open_memmap(temporary, "w+", np.dtype(np.float32), shape)
        for start, chunk in synthetic.chunks():
            array[start : start + len(chunk)] = chunk
        array.flush()
