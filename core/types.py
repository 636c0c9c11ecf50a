"""Documents, queries and hits, and the arrays that stand for vectors and rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
RowArray = NDArray[np.int64]

FilterValue = str | int | bool
Filter = Mapping[str, Sequence[FilterValue]]


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of the corpus.

    Attributes:
        id: Unique in an index.
        metadata: What it can be filtered by, and more.
        parent: In an index of chunks the id of the document that this is a chunk of.
        chunk: The number of the chunk, from 0.
        chunks: The number of chunks of the parent.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str | None = None
    chunk: int = 0
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the index.

    Attributes:
        text: The question as the user typed it.
        top_k: The number of hits wanted.
        filter: For each metadata field the accepted values; all fields must match.
        min_score: The lowest cosine similarity of a hit, or None for no limit.
        collapse: Whether each document is found once, by its best chunk.
    """

    text: str
    top_k: int = 10
    filter: Filter = field(default_factory=dict)
    min_score: float | None = None
    collapse: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found for a query; rank counts from 1, score is the cosine similarity."""

    id: str
    score: float
    rank: int
    title: str
    text: str
    metadata: Mapping[str, Any]
    parent: str | None = None
    chunk: int = 0
    chunks: int = 1
