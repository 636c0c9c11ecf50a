"""Training of the projections of token states for late interaction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from core.encoders import Role
from training.files import TOKENS
from training.schema import LateInteractionSettings, Precision
from training.stages.base import Context, Outcome, Stage


class LateInteraction(LateInteractionSettings, Stage):
    """Trains a projection of token states for each side; both encoders are frozen.

    The score of a document is cosine + `weight` · MaxSim (`models.late_interaction`). The loss is
    the cross-entropy of its softmax over candidates to a target: (1 − `labels`) times the softmax
    of a teacher's scores, plus `labels` shared by the positives of the query. The teacher's score
    is cosine + `weight` · MaxSim of all dimensions without training + `bm25` · BM25 ÷ the largest
    BM25 of the query. Candidates are the positives and the documents that the teacher ranks
    first, or random ones (`sampled`), among the nearest `depth` by cosine and the best `depth` by
    BM25.
    """

    kind: Literal["late_interaction"]
    max_length: int = Field(144, gt=2)  # tokens of a text that are encoded
    precision: Precision = "fp32"  # of the encoders

    def run(self, context: Context, folder: Path) -> Outcome:
        """Writes the two projections; the main process trains them."""
        from training.distributed import from_main_process
        from training.projections import fit_projections, rank_candidates, write_projections
        from training.stages.prepared import prepare_documents, prepare_examples
        from training.vectors import frozen_shards, token_states

        encoders = context.encoders
        self._check_equal("vectors", encoders["query"].dimension, encoders["document"].dimension)
        data = prepare_examples(context, self.data)
        documents = prepare_documents(context, self.data).texts.texts
        texts: dict[Role, Sequence[str]]
        texts = {"query": data.corpus.queries, "document": documents}
        vectors = [
            frozen_shards(context.vectors, encoders[role], role, found, precision=self.precision)
            for role, found in texts.items()
        ]

        def train() -> list[dict[str, float]]:
            settings = self.model_dump(include={"max_length", "precision"})
            states = [
                token_states(context.vectors, encoders[role], role, found, **settings)
                for role, found in texts.items()
            ]
            widths = [rows.values.shape[1] for rows in states]
            self._check_equal("states", *widths)
            if self.dimension > widths[0]:
                reason = f"{self.dimension} exceeds the {widths[0]} dimensions of token states"
                raise self.error("dimension", reason, "dimension_too_large")
            candidates = rank_candidates(self, data.corpus, documents, vectors, states)
            projections, history = fit_projections(self, candidates)
            write_projections(folder / TOKENS, projections)
            return history

        history = from_main_process(train)
        counts = {"examples": len(data.corpus), "held_out": data.held_out}
        return Outcome({}, history=history, counts=counts)

    def _check_equal(self, kind: str, query: int, document: int) -> None:
        if query != document:
            reason = f"query {kind} have {query} dimensions, document {kind} have {document}: "
            reason += "late interaction needs encoders of the same width"
            raise self.error("", reason, "dimension_mismatch")
