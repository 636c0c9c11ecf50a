"""Pretraining, and contrastive training of one encoder or of a pair (Stage II)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from core.encoders import Role
from training.schema import Positive
from training.stages.base import Context, Outcome, Rate, TrainingStage


class Contrastive(TrainingStage):
    """Supervised InfoNCE for one encoder of both queries and documents."""

    kind: Literal["contrastive"]
    side: Role = "query"
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)  # hard negatives per example, sampled in each epoch
    # Nested Matryoshka dimensions (arXiv 2205.13147) over which the loss is averaged; empty for
    # the encoder's dimension only.
    dimensions: list[Positive] = Field(default_factory=list)
    epochs: Positive = 2

    def run(self, context: Context, folder: Path) -> Outcome:
        from training.objectives import contrast
        from training.stages.fitting import fit_pairs

        native = context.encoders[self.side].native_dimension
        if beyond := [d for d in self.dimensions if d > native]:
            reason = f"{beyond[0]} exceeds the encoder's {native} dimensions"
            raise self.error("dimensions", reason, "dimension_too_large")
        loss = partial(contrast, temperature=self.temperature, dimensions=self.dimensions)
        return fit_pairs(self, context, folder, loss, negatives=self.negatives)


class Joint(TrainingStage):
    """Stage II of CARE: trains query and document encoder jointly by InfoNCE."""

    kind: Literal["joint"]
    # Sides to train; the other side is frozen.
    train: list[Role] = Field(default=["query", "document"], min_length=1)
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)  # hard negatives per example, sampled in each epoch
    # Whether each batch holds all documents of the data instead of those of its examples. The
    # document encoder must be frozen: its vectors are computed only once.
    all_documents: bool = False

    @model_validator(mode="after")
    def _check_all_documents(self) -> Self:
        if self.all_documents and "document" in self.train:
            raise ValueError("all_documents: needs a frozen document encoder; set train: [query]")
        return self

    @property
    def trained(self) -> Sequence[Role]:
        return self.train

    def run(self, context: Context, folder: Path) -> Outcome:
        from training.objectives import contrast
        from training.stages.fitting import fit_pairs

        loss = partial(contrast, temperature=self.temperature)
        settings = self.model_dump(include={"negatives", "all_documents"})
        return fit_pairs(self, context, folder, loss, **settings)


class RetroMae(TrainingStage):
    """RetroMAE (arXiv 2205.12035): a weak decoder reconstructs the text from its vector."""

    kind: Literal["retromae"]
    side: Role = "query"
    encoder_mask: float = Field(0.3, gt=0, lt=1)  # share of tokens masked in the encoder's input
    decoder_mask: float = Field(0.5, gt=0, lt=1)  # share hidden from each position of the decoder
    learning_rate: Rate | dict[Role, Rate] = 2e-4
    warmup: float = Field(0.0, ge=0, lt=1)
    batch: Positive = 384
    epochs: Positive = 3

    @model_validator(mode="after")
    def _reject_unsupported(self) -> Self:
        if self.mini_batch is not None:
            reason = "not supported by retromae; use trainer.gradient_accumulation_steps"
            raise ValueError(f"mini_batch: {reason}")
        if self.sharded:
            raise ValueError("sharded: not supported by retromae")
        return self

    def run(self, context: Context, folder: Path) -> Outcome:
        """Trains on texts without prompts."""
        from training.retromae import RetroMaeCollator, RetroMaeObjective
        from training.stages.fitting import fit, load
        from training.stages.prepared import prepare_texts

        data = prepare_texts(context, self.data)
        checkpoint, encoders = context.encoders[self.side], load(self, context)
        tokens = data.tokens("texts", data.texts.texts, checkpoint, "")
        objective = RetroMaeObjective(encoders)
        masks = self.encoder_mask, self.decoder_mask
        collate = RetroMaeCollator(tokens, checkpoint, masks, self.run_seed(context))
        counts = {"texts": len(tokens), "held_out": data.held_out}
        return fit(self, context, folder, objective, collate, tokens.lengths, counts)


class Unsupervised(TrainingStage):
    """InfoNCE on pairs of title and content; `temperature` is the initial, learned temperature."""

    kind: Literal["unsupervised"]
    side: Role = "query"
    temperature: float = Field(0.05, gt=0)
    batch: Positive = 19_200
    epochs: Positive = 3

    def run(self, context: Context, folder: Path) -> Outcome:
        from training.objectives import contrast
        from training.stages.fitting import fit_pairs

        return fit_pairs(self, context, folder, contrast, learned=self.temperature)
