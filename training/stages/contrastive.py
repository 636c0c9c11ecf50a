"""Supervised contrastive training of one encoder, and of a pair (Stage II)."""

from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from core.encoders import Role
from training.schema import Positive
from training.stages.base import Context, Outcome, TrainingStage


class Contrastive(TrainingStage):
    """Supervised InfoNCE of one encoder on both sides."""

    kind: Literal["contrastive"]
    side: Role = "query"
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)  # hard ones of each example, drawn in each epoch
    # Nested Matryoshka dimensions (arXiv 2205.13147) over which the loss is averaged; none for
    # the encoder's dimension alone.
    dimensions: list[Positive] = Field(default_factory=list)
    epochs: Positive = 2

    def run(self, context: Context, folder: Path) -> Outcome:
        """Trains on examples with hard and in-batch negatives."""
        from training.objectives import contrast
        from training.stages.fitting import fit_pairs

        native = context.encoders[self.side].native_dimension
        if beyond := [d for d in self.dimensions if d > native]:
            reason = f"{beyond[0]} is more than the {native} of the encoder"
            raise self.error("dimensions", reason, "dimension_too_large")
        loss = partial(contrast, temperature=self.temperature, dimensions=self.dimensions)
        return fit_pairs(self, context, folder, loss, negatives=self.negatives)


class Joint(TrainingStage):
    """Stage II: query and document encoder are trained together, by InfoNCE alone."""

    kind: Literal["joint"]
    # The sides that are trained; the other is frozen.
    train: list[Role] = Field(default=["query", "document"], min_length=1)
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)  # hard ones of each example, drawn in each epoch
    # Whether all documents of the data are in each batch, in place of those of its examples:
    # where the document encoder is frozen, their vectors cost nothing.
    all_documents: bool = False

    @model_validator(mode="after")
    def _has_vectors_of_all_documents(self) -> Self:
        if self.all_documents and "document" in self.train:
            raise ValueError("all_documents: only where the document encoder is not trained")
        return self

    def run(self, context: Context, folder: Path) -> Outcome:
        """Trains on examples with hard and in-batch negatives."""
        from training.objectives import contrast
        from training.stages.fitting import fit_pairs

        loss = partial(contrast, temperature=self.temperature)
        settings = self.model_dump(include={"train", "negatives", "all_documents"})
        return fit_pairs(self, context, folder, loss, **settings)
