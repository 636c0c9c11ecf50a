"""Reranking: another score for the first hits of a search, by token vectors or by a server.

Candidates are the hits of the search before `min_score`. Late interaction adds to their scores, a
server replaces them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from core.types import FloatArray
from search.fusion import Channel, RankedList
from stores.base import ScoredRows
from stores.token_vectors import TokenVectors

# What ranks hits again.
RerankerName = Literal["late_interaction", "server"]
RERANKERS: tuple[RerankerName, ...] = get_args(RerankerName)


@dataclass(frozen=True, slots=True)
class LateReranker:
    """Reranks by late interaction (models/late_interaction.py)."""

    tokens: TokenVectors
    weight: float  # of MaxSim, which is added to the score of the search

    def rerank(self, found: RankedList, query: FloatArray) -> RankedList:
        """Returns what a search has found in the order of score + weight · MaxSim.

        `query` are the token vectors of the query, float32 [tokens, dimension] of unit norm.
        """
        late = self.tokens.scores(query, found.rows)
        return _reordered(found, found.scores + np.float32(self.weight) * late, late, self.weight)


def reranked_by_server(found: RankedList, scores: FloatArray) -> RankedList:
    """Returns what a search has found in the order of a server's scores, float32 [n]."""
    return _reordered(found, scores, scores, 1.0)


def not_reranked(found: RankedList) -> RankedList:
    """Returns what a search has found, marked as not reranked because that failed."""
    return replace(found, failed=(*found.failed, "rerank"))


def _reordered(found: RankedList, scores: FloatArray, own: FloatArray, weight: float) -> RankedList:
    """Orders rows by `scores`; the channel `rerank` has the scores `own`."""
    best, of_channel = (np.lexsort((found.rows, -values)) for values in (scores, own))
    channel: ScoredRows = own[of_channel], found.rows[of_channel]
    channels: Mapping[Channel, tuple[ScoredRows, float]]
    channels = {**found.channels, "rerank": (channel, weight)}
    return replace(found, scores=scores[best], rows=found.rows[best], channels=channels)
