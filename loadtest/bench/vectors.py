"""Synthetic vectors that are as hard to search as real embeddings of questions and answers.

A corpus is a mixture of topics around one common direction, as encoders place texts of one
subject. A topic's centre is a Gaussian over 192 shared directions, the early ones more
important than the late. A document leaves its centre along 32 directions of its topic and
by a little noise in all dimensions. Topics differ in size and grow in number with the
square root of the corpus. A query is a document moved by 0.8 of the spread of its topic.

The figures were chosen beside 15,000 medical passages and questions in the space of
multilingual-e5-small (384 dimensions), synthetic ones in brackets:

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
# Streams of random numbers that do not depend on each other.
_TOPICS, _DOCUMENTS, _QUERIES = 0, 1, 2


class SyntheticVectors:
    """Documents and queries of unit norm; the same arguments yield the same vectors."""

    def __init__(self, count: int, dimension: int, seed: int = 0) -> None:
        if dimension <= _DIRECTIONS or count < 1:
            need = f"over {_DIRECTIONS} dimensions and at least one document"
            raise ValueError(f"need {need}, not {dimension} and {count}")
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
        """Yields the first row and the vectors, float32 [≤ 50,000, dimension], of each chunk."""
        for chunk, start in enumerate(range(0, self.count, CHUNK_ROWS)):
            random = self._random(_DOCUMENTS, chunk)
            _, places = self._documents(random, min(CHUNK_ROWS, self.count - start))
            yield start, self._embed(random, places)

    def queries(self, number: int) -> FloatArray:
        """Returns float32 [number, dimension], queries spread evenly over the documents."""
        rows = np.linspace(0, self.count - 1, number).astype(np.int64)
        parts = []
        for chunk, start in enumerate(range(0, self.count, CHUNK_ROWS)):
            here = rows[(rows >= start) & (rows < start + CHUNK_ROWS)] - start
            size = min(CHUNK_ROWS, self.count - start)
            topics, places = self._documents(self._random(_DOCUMENTS, chunk), size)
            random = self._random(_QUERIES, chunk)
            moves = self._leave_centre(random, topics[here])
            moves += self._weights * random.standard_normal(moves.shape, dtype=np.float32)
            parts.append(self._embed(random, places[here] + _QUERY_MOVE * moves))
        return np.concatenate(parts)

    def _random(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *stream])

    def _documents(self, random: np.random.Generator, number: int) -> tuple[RowArray, FloatArray]:
        topics = random.choice(len(self._shares), number, p=self._shares)
        return topics, self._centres[topics] + self._leave_centre(random, topics)

    def _leave_centre(self, random: np.random.Generator, topics: RowArray) -> FloatArray:
        steps = random.standard_normal((len(topics), _LOCAL_DIRECTIONS), dtype=np.float32)
        steps *= np.float32(_WITHIN / _LOCAL_DIRECTIONS**0.5)
        places = np.zeros((len(topics), _DIRECTIONS), dtype=np.float32)
        np.put_along_axis(places, self._local[topics], steps, 1)
        return places

    def _embed(self, random: np.random.Generator, places: FloatArray) -> FloatArray:
        vectors = random.standard_normal((len(places), self.dimension), dtype=np.float32)
        vectors *= np.float32(_NOISE / self.dimension**0.5)
        vectors += places @ self._directions
        # Scaled so that the mean of all vectors, once of unit norm, has the length _MEAN.
        variance = 1 + _WITHIN**2 + _NOISE**2
        vectors *= np.float32(((1 - _MEAN**2) / variance) ** 0.5 / _MEAN)
        vectors += self._mean
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def write_vectors(synthetic: SyntheticVectors, path: Path) -> None:
    """Writes all documents as one `.npy` file, float32 [count, dimension]; whole or not at all."""
    shape = (synthetic.count, synthetic.dimension)
    with atomic(path) as temporary:
        array = np.lib.format.open_memmap(temporary, "w+", np.dtype(np.float32), shape)
        for start, chunk in synthetic.chunks():
            array[start : start + len(chunk)] = chunk
        array.flush()
