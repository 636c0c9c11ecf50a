"""Teacher vectors, and the stages that learn from them: alignment (Stage I) and distillation."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from core.encoders import Role
from core.shards import JOURNAL
from training.data import entry_files
from training.files import RESULT, read_json
from training.schema import Data, DataEntry, Positive, Precision, Prompts, Settings
from training.stages.base import (
    Context,
    Outcome,
    Stage,
    TrainingStage,
    checksums,
    data_inputs,
)


class Teacher(Stage):
    """Encodes texts once with a frozen encoder and stores the vectors as shards."""

    kind: Literal["teacher"]
    side: Role = "document"
    prompts: Prompts | None = None  # replace the encoder's prompts
    precision: Precision = "fp32"
    batch: Positive = 32  # texts encoded at a time
    shard: Positive = 65_536  # rows per shard

    def publish(self, context: Context, folder: Path) -> None:
        """Also registers the stage as a teacher."""
        super().publish(context, folder)
        context.teachers[self.label] = self

    def run(self, context: Context, folder: Path) -> Outcome:
        """Encodes the texts on all processes; resumes after the complete shards."""
        from training.stages.prepared import prepare_texts
        from training.vectors import compute

        data, checkpoint = prepare_texts(context, self.data), context.encoders[self.side]
        prompts = self.prompts or checkpoint.init.prompts
        settings = self.model_dump(include={"shard", "batch", "precision"})
        compute(folder, checkpoint, data.texts, prompts, **settings)
        return Outcome({}, counts={"texts": len(data.texts), "held_out": data.held_out})


class _StageWithTeacher(TrainingStage):
    """A stage that reads the vectors of the stage `teacher`, by default the latest teacher."""

    teacher: str = ""

    def _teacher_stage(self, context: Context) -> Stage:
        name = self.teacher or next(reversed(list(context.teachers)), "")
        if name not in context.teachers:
            named = f" named '{name}'" if name else ""
            reason = f"no earlier stage of kind teacher{named}"
            raise self.error("teacher", reason, "missing_stage", stage=name)
        return context.teachers[name]

    def _vectors_folder(self, context: Context) -> Path:
        return context.folders[self._teacher_stage(context).label]

    def check(self, context: Context, sides: Collection[Role]) -> None:
        """Also checks that the teacher stage exists."""
        super().check(context, sides)
        self._vectors_folder(context)

    def _vectors_key(self, context: Context) -> str:
        return str(read_json(self._vectors_folder(context) / RESULT)["key"])

    def inputs(self, context: Context) -> dict[str, Any]:
        inputs = super().inputs(context) | {"vectors": self._vectors_key(context)}
        del inputs["stage"]["teacher"]
        return inputs


class Examples(Settings):
    """Queries with relevant documents that each step of an alignment also trains on.

    The loss is InfoNCE over all documents of the examples.
    """

    data: Data
    batch: Positive = 128  # queries per step on each device, drawn at random
    weight: float = Field(1.0, gt=0)  # weight of this loss


class Align(_StageWithTeacher):
    """Stage I of CARE: aligns the query encoder with the frozen document encoder's vectors.

    Each text is its own positive: L = contrastive · InfoNCE + mse · ‖E_Q(x) − E_D(x)‖². With
    `kl` only, this is the alignment of KALE (arXiv 2304.01016); with `mse` only, that of Wang and
    Lyu (arXiv 2306.11550) and of ScalingNote's query tower (arXiv 2411.15766).

    With `targets: documents` the data are pairs, and each query learns the vector of its document
    instead of its own: a rewording learns the vector of the original text.
    """

    kind: Literal["align"]
    data: list[DataEntry] = Field(default_factory=list)  # empty for all texts of the teacher
    targets: Literal["texts", "documents"] = "texts"  # whose vectors the teacher gives
    examples: Examples | None = None  # further training data of each step
    vectors: str | None = None  # folder of vectors to read instead of a teacher stage's
    contrastive: float = Field(1.0, ge=0)  # weight λ₁ of InfoNCE
    mse: float = Field(1.0, ge=0)  # weight λ₂ of the squared L2 distance
    kl: float = Field(0.0, ge=0)  # weight of the KL divergence of the softmax over dimensions
    temperature: float = Field(0.02, gt=0)  # of InfoNCE and of that softmax
    batch: Positive = 2_560

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not self.contrastive and not self.mse and not self.kl:
            raise ValueError("contrastive, mse and kl are all 0; set at least one weight")
        if self.vectors and not self.data:
            raise ValueError("vectors: set data to the texts of these vectors")
        return self

    @property
    def trained(self) -> Sequence[Role]:
        """The query side; the document encoder is frozen."""
        return ["query"]

    def entries(self, context: Context) -> list[DataEntry]:
        """Returns the data entries to read, by default those of the teacher."""
        return self.data or self._teacher_stage(context).data

    def files(self, context: Context) -> list[Path]:
        examples = self.examples.data if self.examples else []
        return super().files(context) + [
            path for entry in examples for path in entry_files(entry, context.mined)
        ]

    def _vectors_folder(self, context: Context) -> Path:
        return Path(self.vectors) if self.vectors else super()._vectors_folder(context)

    def _vectors_key(self, context: Context) -> str:
        if self.vectors:
            # The journal holds the checksums of all shards.
            return checksums([Path(self.vectors) / JOURNAL])[0]
        return super()._vectors_key(context)

    def inputs(self, context: Context) -> dict[str, Any]:
        inputs = super().inputs(context)
        if self.examples:
            found = data_inputs(context, self.examples.data)
            inputs["stage"]["examples"]["data"] = found.pop("entries")
            inputs["examples"] = found["data"]
        return inputs

    def run(self, context: Context, folder: Path) -> Outcome:
        """Trains the query encoder; every text gets the query prompt."""
        from training.batches import AlignCollator
        from training.objectives import Objective, align, align_and_contrast
        from training.stages.fitting import draw_examples, fit, load
        from training.stages.prepared import prepare_examples, prepare_texts
        from training.vectors import TeacherVectors

        student = context.encoders["query"]
        document_key = context.encoders["document"].key
        teacher = TeacherVectors(self._vectors_folder(context), document_key, student.dimension)
        entries = self.entries(context)
        if self.targets == "documents":
            data = prepare_examples(context, entries)
            corpus = data.corpus
            tokens = data.tokens("query", corpus.queries, student, student.init.prompts.query)
            rows = teacher.rows(corpus.document_keys)[corpus.positives.values]
            texts = corpus.of_pairs("query", np.arange(len(tokens)))
        else:
            data = prepare_texts(context, entries)
            found = data.texts
            tokens = data.tokens("texts", found.texts, student, student.init.prompts.query)
            rows, texts = teacher.rows(found.keys), np.arange(len(tokens))
        counts = {"texts": len(tokens), "held_out": data.held_out}
        weights = {"contrastive": self.contrastive, "mse": self.mse, "kl": self.kl}
        loss = partial(align, weights=weights, temperature=self.temperature)
        examples = None
        if self.examples:
            settings = self.examples.model_dump(include={"batch"})
            examples = draw_examples(self, context, self.examples.data, **settings)
            counts["examples"] = len(examples.collate.corpus)
            loss = partial(
                align_and_contrast, loss, weight=self.examples.weight, temperature=self.temperature
            )
        objective = Objective(load(self, context), self.roles, loss, self.mini_batch)
        collate = AlignCollator(tokens, texts, teacher, rows, examples)
        return fit(self, context, folder, objective, collate, tokens.lengths[texts], counts)


class Distill(_StageWithTeacher):
    """Distillation: KL divergence from a teacher's scores plus InfoNCE."""

    kind: Literal["distill"]
    side: Role | None = "query"  # encoder of both sides; None trains query and document encoder
    kl: float = Field(1.0, ge=0)  # weight of the KL divergence
    contrastive: float = Field(1.0, ge=0)  # weight of InfoNCE
    temperature: float = Field(0.02, gt=0)  # of the student's scores, in both losses
    teacher_temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)  # hard negatives per example, sampled in each epoch

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not self.kl and not self.contrastive:
            raise ValueError("kl and contrastive are both 0; set at least one weight")
        return self

    def run(self, context: Context, folder: Path) -> Outcome:
        """Trains on examples; the teacher must have encoded all of their texts."""
        from training.objectives import distill
        from training.stages.fitting import fit_pairs
        from training.vectors import TeacherVectors

        weights = self.kl, self.contrastive
        temperatures = self.temperature, self.teacher_temperature
        loss = partial(distill, weights=weights, temperatures=temperatures)
        teacher = TeacherVectors(self._vectors_folder(context))
        return fit_pairs(self, context, folder, loss, negatives=self.negatives, teacher=teacher)
