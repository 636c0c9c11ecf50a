"""The channels of a search, dense and lexical, and the fusion of what they find."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from core.types import FloatArray, RowArray
from stores.base import ScoredRows
from stores.order import DECIMALS, DEPTH

# What contributes to the score of a hit: the channels of a search, and what ranks its hits again.
Channel = Literal["dense", "lexical", "rerank"]

# Candidates of each channel; more if more hits are wanted. Similarities of neighbours differ by
# less than a lexical score adds, so a row beyond 50 neighbours is a hit only if it is among the
# lexical candidates. A row that the lexical channel does not return counts as 0, so its candidates
# must reach down to low scores. All of them are compared with the query, 0.06 ms, also where a
# shorter list of hits needs fewer: it is the beginning of a longer one.
DENSE_CANDIDATES = DEPTH
LEXICAL_CANDIDATES = 300
# Weight of the lexical channel where neither pair nor manifest has one.
DEFAULT_WEIGHT = 0.1
NOTHING: ScoredRows = np.empty(0, np.float32), np.empty(0, np.int64)


class ChannelResult(NamedTuple):
    """What one channel has found: scored rows, best first, and the time to find them [s]."""

    found: ScoredRows
    seconds: float


@dataclass(frozen=True, slots=True)
class RankedList:
    """The rows that a search has found, best first.

    Attributes:
        scores: float32 [n].
        rows: int64 [n], in the order of hits (`stores/order.py`).
        failed: Channels of a hybrid search, and reranking, that failed or were late.
        seconds: Time of each channel of a hybrid search that answered, and of reranking [s].
        channels: The scored rows of each channel and its weight; for explanations.
        bound: No row that is not found has a higher score.
        cut: Whether more rows than are compared have the score of the last one of a channel.
    """

    scores: FloatArray
    rows: RowArray
    failed: tuple[Channel, ...] = ()
    seconds: Mapping[Channel, float] = field(default_factory=dict)
    channels: Mapping[Channel, tuple[ScoredRows, float]] = field(default_factory=dict)
    bound: float = math.inf
    cut: bool = False

    def explain(self, row: int) -> dict[str, Any]:
        """Returns rank, score and weight of a row in each channel; None where it is not found."""
        return {name: _explain(*channel, row) for name, channel in self.channels.items()}


def _explain(found: ScoredRows, weight: float, row: int) -> dict[str, Any]:
    at = np.flatnonzero(found[1] == row)
    rank, score = (
        (int(at[0]) + 1, round(float(found[0][at[0]]), DECIMALS)) if len(at) else (None, None)
    )
    return {"rank": rank, "score": score, "weight": weight}


def lexical_weight(fusion: Mapping[str, float]) -> float:
    """Returns the weight of the lexical channel, given the fusion of a manifest."""
    return fusion.get("lexical", DEFAULT_WEIGHT)


def fuse(dense: ScoredRows, lexical: ScoredRows, fusion: Mapping[str, float]) -> ScoredRows:
    """Returns the rows of the dense channel with their fused scores, in the same order.

    The fused score is the cosine similarity plus `fusion["lexical"]` times the lexical score, which
    is 0 for rows that the lexical channel did not find. With `fusion["rank_constant"]`, k, it is
    the weighted reciprocal rank instead: 1 / (k + rank) of the dense channel plus
    `fusion["lexical"]` / (k + rank) of the lexical one (Cormack et al., SIGIR 2009).

    Args:
        dense: Cosine similarities and rows; with `rank_constant` in the order of hits.
        lexical: Scores and rows, likewise; rows that are not in `dense` do not count.
        fusion: The weight, and optionally the constant of ranks.
    """
    scores, rows = dense
    if constant := fusion.get("rank_constant"):
        scores, parts = (
            (1 / (constant + np.arange(1, len(found[1]) + 1))).astype(np.float32)
            for found in (dense, lexical)
        )
    else:
        parts = lexical[0]
    found, at = _positions(rows, lexical[1])
    fused = scores.copy()
    fused[found] += np.float32(lexical_weight(fusion)) * parts[at]
    return fused, rows


def _positions(rows: RowArray, others: RowArray) -> tuple[RowArray, RowArray]:
    """Returns the positions in both arrays, each without repetitions, of what they share."""
    if not len(others):
        return NOTHING[1], NOTHING[1]
    order = np.argsort(others)
    at = order[np.minimum(np.searchsorted(others, rows, sorter=order), len(others) - 1)]
    shared = np.flatnonzero(others[at] == rows)
    return shared, at[shared]


def joined(first: ScoredRows, second: ScoredRows) -> ScoredRows:
    """Returns two lists of different rows as one, one after the other."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def without(rows: RowArray, others: RowArray) -> RowArray:
    """Returns the rows that are not among others, in the same order."""
    if not len(others):
        return rows
    known = np.sort(others)
    is_other = known[np.minimum(np.searchsorted(known, rows), len(known) - 1)] == rows
    left: RowArray = rows[~is_other]
    return left
