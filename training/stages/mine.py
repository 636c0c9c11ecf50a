"""Mining of hard negatives."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from core.encoders import Role
from core.files import atomic
from core.records import write_jsonl
from core.rows import blocks
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from training.files import TRIPLES
from training.schema import Positive, Precision
from training.stages.base import Context, Outcome, Stage

if TYPE_CHECKING:
    import torch

# Queries that are searched at a time.
_QUERIES = 65_536


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
        """Writes triples as JSONL, including queries without a negative.

        Each process mines every n-th block of queries; blocks of an interrupted run are kept.
        """
        from training.distributed import processes, wait_for_all
        from training.stages.prepared import prepare_documents, prepare_examples
        from training.vectors import frozen_shards

        data = prepare_examples(context, self.data)
        corpus = data.corpus
        # Documents of the examples come first: rows of `corpus` are rows of `documents`.
        documents = prepare_documents(context, self.data).texts.texts
        settings = self.model_dump(include={"batch", "precision"})
        cache, encoder, state = context.vectors, context.encoders[self.side], processes()
        queries = frozen_shards(cache, encoder, "query", corpus.queries, **settings)
        found = frozen_shards(cache, encoder, "document", documents, **settings)
        parts = {folder / f"{rows.start}.npy": rows for rows in blocks(len(corpus), _QUERIES)}
        for path, rows in list(parts.items())[state.process_index :: state.num_processes]:
            if not path.exists():
                numbers = np.arange(rows.start, rows.stop)
                known = [corpus.positives[row] for row in numbers]
                mined = list(mine(queries.take(numbers), found, known, self, state.device))
                with atomic(path) as temporary, temporary.open("wb") as file:
                    np.save(file, np.array(mined, dtype=np.int64))
        wait_for_all()
        if state.is_main_process:
            every = chain.from_iterable(np.load(path) for path in parts)
            records = (
                example._replace(negatives=tuple(documents[i] for i in chosen if i >= 0))._asdict()
                for example, chosen in zip(corpus.examples(), every, strict=True)
            )
            write_jsonl(folder / TRIPLES, records)
            for path in parts:
                path.unlink()
        return Outcome({}, counts={"examples": len(corpus), "held_out": data.held_out})


def mine(
    queries: FloatArray,
    documents: ShardedVectors,
    positives: Sequence[RowArray],
    stage: Mine,
    device: "torch.device",
) -> Iterator[RowArray]:
    """Yields the rows of each query's hard negatives, int64 [negatives], hardest first, then −1.

    `queries` are float32 [n, d]; `positives` are removed from the ranking of each.
    """
    from training.vectors import search

    depth = min(stage.last + max(map(len, positives)), len(documents))
    all_scores, all_rows = search(queries, documents, depth, device)
    for query, scores, rows, known in zip(queries, all_scores, all_rows, positives, strict=True):
        lowest = (documents.take(known) @ query).min()
        # For a negative score, margin · lowest would be above lowest.
        limit = lowest - (1 - stage.margin) * abs(lowest)
        ranked = np.flatnonzero(~np.isin(rows, known))[stage.first - 1 : stage.last]
        negatives = rows[ranked[scores[ranked] <= limit]][: stage.negatives]
        yield np.pad(negatives, (0, stage.negatives - len(negatives)), constant_values=-1)
