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
    """Hard negatives: documents that the encoder ranks high and nobody judged relevant.

    `data` names queries and their positives; the documents of these entries are searched.
    """

    kind: Literal["mine"]
    side: Role = "document"
    first: Positive = 10  # the first rank that is taken, from 1, positives not counted
    last: Positive = 100  # the last rank that is taken
    negatives: Positive = 7  # the most of a query
    # A negative's score is at most this part of the lowest score of a positive.
    margin: float = Field(0.95, gt=0)
    precision: Precision = "fp32"
    batch: Positive = 32  # texts encoded at a time

    @model_validator(mode="after")
    def _has_a_window(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last ({self.last}) is before first ({self.first})")
        return self

    def publish(self, context: Context, folder: Path) -> None:
        """Adds the triples, which later stages may read."""
        super().publish(context, folder)
        context.mined[self.label] = folder / TRIPLES

    def run(self, context: Context, folder: Path) -> Outcome:
        """Writes triples as JSONL; a query without a negative is among them."""
        from training.batches import Corpus
        from training.distributed import processes
        from training.vectors import frozen_vectors

        examples, dropped = read_examples(self.data, context.held_out, context.mined)
        corpus = Corpus.of(examples)
        # The documents of the examples come first: rows of the corpus are rows here.
        others = read_corpus(self.data, context.mined)
        documents = list(dict.fromkeys((*corpus.documents, *others)))
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
    """Yields rows of the hard negatives of each query, found by exact search, the hardest first.

    Both vectors, float32 [n, d] and [m, d], have unit norm; `positives` are rows of the relevant
    documents of each query, which have no rank.
    """
    depth = min(stage.last + max(map(len, positives)), len(documents))
    all_scores, all_rows = exact_search(queries, documents, depth)
    for query, scores, rows, known in zip(queries, all_scores, all_rows, positives, strict=True):
        lowest = (documents[list(known)] @ query).min()
        # A part of a negative score would be a higher one.
        limit = lowest - (1 - stage.margin) * abs(lowest)
        ranked = np.flatnonzero(~np.isin(rows, known))[stage.first - 1 : stage.last]
        yield rows[ranked[scores[ranked] <= limit]][: stage.negatives].tolist()
