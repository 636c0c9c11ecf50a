"""Mining of hard negatives."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from core.encoders import Role
from core.records import write_jsonl
from core.types import FloatArray
from stores.exact import exact_search
from training.data import read_corpus, read_examples
from training.files import TRIPLES
from training.schema import Positive, Precision
from training.stages.base import Context, Outcome, Stage


class Mine(Stage):
    """Mines hard negatives: documents that an encoder ranks high and that are not positives.

    `data` provides the queries with their positives, and the documents to search.
    """

    kind: Literal["mine"]
    side: Role = "document"
    first: Positive = 10  # first rank of a negative, counted from 1 without positives
    last: Positive = 100  # last rank of a negative
    negatives: Positive = 7  # maximum number per query
    # Maximum score of a negative, relative to the lowest score of a positive.
    margin: float = Field(0.95, gt=0)
    precision: Precision = "fp32"
    batch: Positive = 32  # texts encoded at a time

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last ({self.last}) must not be less than first ({self.first})")
        return self

    def publish(self, context: Context, folder: Path) -> None:
        """Also registers the file of triples."""
        super().publish(context, folder)
        context.mined[self.label] = folder / TRIPLES

    def run(self, context: Context, folder: Path) -> Outcome:
        """Writes triples as JSONL, including queries without a negative."""
        from training.batches import Corpus
        from training.distributed import processes
        from training.vectors import frozen_vectors

        examples, dropped = read_examples(self.data, context.held_out, context.mined)
        corpus = Corpus.of(examples)
        # Documents of the examples come first, so that rows of `corpus` are rows of `documents`.
        searched = read_corpus(self.data, context.mined)
        documents = list(dict.fromkeys((*corpus.documents, *searched)))
        settings = self.model_dump(include={"batch", "precision"})
        cache, encoder = context.cache, context.encoders[self.side]
        queries = frozen_vectors(cache, encoder, "query", corpus.queries, **settings)
        found = frozen_vectors(cache, encoder, "document", documents, **settings)
        if processes().is_main_process:
            mined = mine(queries, found, corpus.positives, self)
            records = (
                asdict(replace(example, negatives=tuple(documents[row] for row in rows)))
                for example, rows in zip(examples, mined, strict=True)
            )
            write_jsonl(folder / TRIPLES, records)
        return Outcome({}, counts={"examples": len(examples), "held_out": dropped})


def mine(
    queries: FloatArray, documents: FloatArray, positives: Sequence[Sequence[int]], stage: Mine
) -> Iterator[list[int]]:
    """Yields the rows of each query's hard negatives, by exact search, hardest first.

    Args:
        queries: float32 [n, d], unit norm.
        documents: float32 [m, d], unit norm.
        positives: Rows of each query's relevant documents, which are removed from the ranking.
        stage: Ranks, margin and maximum number of negatives.
    """
    depth = min(stage.last + max(map(len, positives)), len(documents))
    all_scores, all_rows = exact_search(queries, documents, depth)
    for query, scores, rows, known in zip(queries, all_scores, all_rows, positives, strict=True):
        lowest = (documents[list(known)] @ query).min()
        # For a negative score, margin · lowest would be above lowest.
        limit = lowest - (1 - stage.margin) * abs(lowest)
        ranked = np.flatnonzero(~np.isin(rows, known))[stage.first - 1 : stage.last]
        yield rows[ranked[scores[ranked] <= limit]][: stage.negatives].tolist()
