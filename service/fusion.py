"""The channels of a search, dense and lexical, and the fusion of what they find."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from core.types import FloatArray, RowArray
from stores.base import ScoredRows

# What contributes to the score of a hit: the channels of a search, and what ranks its hits again.
Channel = Literal["dense", "lexical", "rerank"]

# Candidates of each channel; more if more hits are wanted. Similarities of neighbours differ by
# less than a lexical score adds, so a row beyond 50 neighbours is a hit only if it is among the
# lexical candidates. A row that the lexical channel does not return counts as 0, so its candidates
# must reach down to low scores.
DENSE_CANDIDATES = 50
LEXICAL_CANDIDATES = 300
# Weight of the lexical channel where neither pair nor manifest has one.
DEFAULT_WEIGHT = 0.1
NOTHING: ScoredRows = np.empty(0, np.float32), np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found.

    Attributes:
        scores: float32 [n], descending.
        rows: int64 [n].
        failed: Channels of a hybrid search, and reranking, that failed or were late.
        seconds: Time of each channel of a hybrid search that answered, and of reranking [s].
        channels: The scored rows of each channel, best first, and its weight; for explanations.
        bound: No row that is not found has a higher score.
    """

    scores: FloatArray
    rows: RowArray
    failed: tuple[Channel, ...] = ()
    seconds: Mapping[Channel, float] = field(default_factory=dict)
    channels: Mapping[Channel, tuple[ScoredRows, float]] = field(default_factory=dict)
    bound: float = math.inf

    def explain(self, row: int) -> dict[str, Any]:
        """Returns rank, score and weight of a row in each channel; None where it is not found."""
        return {name: _explain(*channel, row) for name, channel in self.channels.items()}


def _explain(found: ScoredRows, weight: float, row: int) -> dict[str, Any]:
    at = np.flatnonzero(found[1] == row)
    rank, score = (int(at[0]) + 1, float(found[0][at[0]])) if len(at) else (None, None)
    return {"rank": rank, "score": score, "weight": weight}


def fuse(dense: ScoredRows, lexical: ScoredRows, fusion: Mapping[str, float]) -> Found:
    """Fuses two channels.

    The fused score is the cosine similarity plus `fusion["lexical"]` times the lexical score, which
    is 0 for rows that the lexical channel did not find. With `fusion["rank_constant"]`, k, it is
    the weighted reciprocal rank instead: 1 / (k + rank) of the dense channel plus
    `fusion["lexical"]` / (k + rank) of the lexical one (Cormack et al., SIGIR 2009).

    Args:
        dense: Cosine similarities and rows, with all rows of `lexical`, in descending order.
        lexical: Scores and rows in descending order.
        fusion: The weight, and optionally the constant of ranks.
    """
    weight = fusion.get("lexical", DEFAULT_WEIGHT)
    scores, rows = dense
    order = np.argsort(rows)
    at = order[np.searchsorted(rows, lexical[1], sorter=order)]
    added = np.zeros(len(rows), np.float32)
    if constant := fusion.get("rank_constant"):
        scores = (1 / (constant + np.arange(1, len(rows) + 1))).astype(np.float32)
        added[at] = weight / (constant + np.arange(1, len(at) + 1))
    else:
        added[at] = weight * lexical[0]
    fused = scores + added
    best = np.lexsort((rows, -fused))
    channels: dict[Channel, tuple[ScoredRows, float]] = {
        "dense": (dense, 1.0),
        "lexical": (lexical, weight),
    }
    return Found(fused[best], rows[best], channels=channels)


def merged(first: ScoredRows, second: ScoredRows) -> ScoredRows:
    """Returns two lists of different rows as one, in descending order of scores."""
    scores = np.concatenate([first[0], second[0]])
    rows = np.concatenate([first[1], second[1]])
    order = np.lexsort((rows, -scores))
    return scores[order], rows[order]
