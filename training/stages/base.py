"""What all stages share: keys of a recipe, a checksum of what a result depends on, and a run.

A module of stages imports torch when a stage runs: recipes are checked without it.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from core.encoders import Role
from core.files import sha256_file
from core.records import unreadable
from training.data import DevSet, entry_files
from training.errors import TrainingError
from training.files import checksum
from training.schema import (
    SOURCES,
    Data,
    DataEntry,
    Dev,
    Positive,
    Precision,
    Seed,
    Settings,
    StageName,
)

if TYPE_CHECKING:
    from training.encoder import EncoderCheckpoint

# Raised when stages come to compute something else from the same settings.
_VERSION = 2
# Settings that change no result; the seed is an input by itself.
_NO_INPUTS = {"name", "log_every", "checkpoint_every", "seed"}


@dataclass
class Context:
    """What a stage works with besides its settings.

    `cache` holds the vectors of frozen encoders, for all stages and runs. `encoders` are those so
    far, by side; by the names of stages so far there are `folders` of results, `teachers` that
    computed vectors, and files of `mined` triples.
    """

    seed: int
    cache: Path
    dev: Dev | None = None
    dev_set: DevSet | None = None
    encoders: "dict[Role, EncoderCheckpoint]" = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    teachers: "dict[str, Stage]" = field(default_factory=dict)
    mined: dict[str, Path] = field(default_factory=dict)

    @cached_property
    def held_out(self) -> frozenset[str]:
        """Queries that must not be trained on."""
        return frozenset(self.dev_set.queries.values() if self.dev_set else ())


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves behind in its folder: encoders by side, and how they were trained.

    `pair` says which side encodes queries and which documents in the pair that it made, if any;
    `history` has losses and measures over steps, `counts` examples, texts and what was left out.
    """

    encoders: "dict[Role, EncoderCheckpoint]"
    pair: dict[Role, Role] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class Stage(Settings, ABC):
    """A stage of a recipe; each kind is a subclass.

    Its name is unique in the recipe, or "" for the kind; `data` is what it reads. The `side` that
    some kinds have is the encoder that they train or use, for queries and documents alike.
    """

    kind: str
    name: StageName = ""
    data: Data

    @property
    def label(self) -> str:
        """The stage's name: its own, or else its kind."""
        return self.name or self.kind

    def error(self, key: str, reason: str, code: str, **fields: Any) -> TrainingError:
        """Returns the error of one of the stage's keys."""
        place = f"stages.{self.label}.{key}".removesuffix(".")
        return TrainingError.at(place, reason, code, **fields)

    @property
    def roles(self) -> dict[Role, Role]:
        """Which side encodes queries and which documents: that of `side`, or each its own."""
        side: Role | None = getattr(self, "side", None)
        return {"query": side or "query", "document": side or "document"}

    def sides(self) -> Sequence[Role]:
        """Returns the sides whose encoders the result depends on."""
        return list(dict.fromkeys(self.roles.values()))

    @abstractmethod
    def run(self, context: Context, folder: Path) -> Outcome:
        """Does the stage's work in its folder; continues what an interrupted run left there."""

    def entries(self, context: Context) -> list[DataEntry]:
        """Returns the data that are read."""
        return self.data

    def files(self, context: Context) -> list[Path]:
        """Returns the files of the data that are read."""
        return [p for entry in self.entries(context) for p in entry_files(entry, context.mined)]

    def run_seed(self, context: Context) -> int:
        """Returns the seed of all that is drawn."""
        return context.seed

    def publish(self, context: Context, folder: Path) -> None:
        """Adds what later stages may name of a finished stage."""
        context.folders[self.label] = folder

    def check(self, context: Context, sides: Collection[Role]) -> None:
        """Checks that there are the encoders, stages and files that the stage needs.

        `context` names the stages ahead of it, none of which has run.
        """
        for side in self.sides():
            if side not in sides:
                reason = f"stage '{self.label}' needs this encoder"
                raise TrainingError.at(side, reason, "missing_encoder")
        checksums([path for path in self.files(context) if path not in context.mined.values()])

    def inputs(self, context: Context) -> dict[str, Any]:
        """Returns all that the result depends on; the paths of data are not."""
        settings = self.model_dump(mode="json", exclude=_NO_INPUTS)
        settings["data"] = [entry.model_dump(mode="json") for entry in self.entries(context)]
        for entry in settings["data"]:
            entry |= {source: entry[source] is not None for source in SOURCES}
        return {
            "version": _VERSION,
            "stage": settings,
            "encoders": {side: context.encoders[side].key for side in sorted(self.sides())},
            "data": checksums(self.files(context)),
            "held_out": checksum(sorted(context.held_out)),
        }


class TrainingStage(Stage):
    """A stage that trains; defaults are those of CARE (arXiv 2604.10937)."""

    seed: Seed | None = None  # in place of the run's: runs with several seeds share the stage
    learning_rate: float = Field(1e-4, gt=0)  # of AdamW, falling linearly to zero
    warmup: float = Field(0.05, ge=0, lt=1)  # part of the steps, in which the rate rises
    batch: Positive = 640  # examples of a step, on all devices together
    # Texts that are encoded at a time; None for all of a batch. With it the activations are
    # recomputed for the gradients (GradCache, arXiv 2101.06983).
    mini_batch: Positive | None = None
    epochs: Positive = 1  # passes over the data
    max_steps: Positive | None = None  # the most, or None
    weight_decay: float = Field(0.0, ge=0)  # of AdamW
    max_grad_norm: float = Field(1.0, gt=0)  # to which gradients are clipped
    precision: Precision = "fp32"  # of the arithmetic; weights keep their type
    gradient_checkpointing: bool = False  # whether layers recompute their activations
    dropout: float | None = Field(None, ge=0, lt=1)  # None keeps the checkpoint's
    group_by_length: bool = True  # whether a batch holds texts of similar length
    checkpoint_every: Positive = 500  # steps
    log_every: Positive = 10  # steps
    # More arguments of transformers.TrainingArguments: `fsdp`, `deepspeed`, …
    trainer: dict[str, Any] = Field(default_factory=dict)

    def run_seed(self, context: Context) -> int:
        """Returns the seed of all that is drawn."""
        return context.seed if self.seed is None else self.seed

    def check(self, context: Context, sides: Collection[Role]) -> None:
        """Checks the names in `trainer` too."""
        super().check(context, sides)
        from transformers import TrainingArguments

        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        if unknown := sorted(self.trainer.keys() - known):
            raise self.error(f"trainer.{unknown[0]}", "unknown key", "unknown_key")

    def inputs(self, context: Context) -> dict[str, Any]:
        """Returns all that the result depends on, seed and measurements among it."""
        inputs = super().inputs(context) | {"seed": self.run_seed(context)}
        if context.dev:
            inputs["measured"] = context.dev.model_dump(mode="json", exclude={"beir"})
            inputs["dev"] = checksums(entry_files(context.dev, {}))
        return inputs


def checksums(files: Sequence[Path]) -> list[str]:
    """Returns the SHA-256 of each file, in order; one that cannot be read is a DataError."""
    found = []
    for path in files:
        try:
            found.append(_sha256(path, path.stat().st_mtime_ns))
        except OSError as error:
            raise unreadable(path, error) from error
    return found


@cache
def _sha256(path: Path, changed: int) -> str:
    return sha256_file(path)
