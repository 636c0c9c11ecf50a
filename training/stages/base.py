"""Base classes of stages: their keys in a recipe, the inputs of their checksum, and their run.

Modules of stages import torch when a stage runs, so that recipes can be checked without it.
"""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

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

Rate = Annotated[float, Field(gt=0)]
# Part of all keys; increase it when stages compute other results from the same settings.
_VERSION = 2
# Settings that do not affect the result; the seed is a separate input.
_NO_INPUTS = {"name", "log_every", "checkpoint_every", "seed", "sharded"}
# Arguments and variables that would shard the weights in a way that stages do not support.
_OTHER_SHARDING = ("fsdp", "fsdp_config", "deepspeed")
_OTHER_LAUNCHERS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


@dataclass
class Context:
    """State of a run that stages read and update."""

    seed: int
    out: Path  # folder of the output, shared by runs
    # The recipe's entry for the development set, which is `dev_set` once it has been read.
    dev: Dev | None = None
    dev_set: DevSet | None = None
    # Latest checkpoint of each side.
    encoders: "dict[Role, EncoderCheckpoint]" = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)  # results of finished stages, by name
    # Finished stages that computed vectors, by name.
    teachers: "dict[str, Stage]" = field(default_factory=dict)
    # Files of mined triples, by the name of the stage.
    mined: dict[str, Path] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """Folder with texts and token ids, shared by stages and runs."""
        return self.out / "data"

    @property
    def vectors(self) -> Path:
        """Folder with vectors of frozen encoders, shared by stages and runs."""
        return self.out / "vectors"

    @cached_property
    def held_out(self) -> frozenset[str]:
        """Queries of the development set, which must not be trained on."""
        return frozenset(self.dev_set.queries.values() if self.dev_set else ())


@dataclass(frozen=True)
class Outcome:
    """Result of a stage."""

    encoders: "dict[Role, EncoderCheckpoint]"
    # The sides that encode queries and documents in the trained pair; empty if there is no pair.
    pair: dict[Role, Role] = field(default_factory=dict)
    # Losses and dev metrics over steps.
    history: list[dict[str, float]] = field(default_factory=list)
    # Numbers of examples, texts and dropped records.
    counts: dict[str, int] = field(default_factory=dict)


class Stage(Settings, ABC):
    """A stage of a recipe; each kind is a subclass.

    Kinds with a key `side` train or use this encoder for queries and documents alike.
    """

    kind: str
    name: StageName = ""  # unique in the recipe; "" uses the kind as name
    data: Data

    @property
    def label(self) -> str:
        """The stage's name or, without one, its kind."""
        return self.name or self.kind

    def error(self, key: str, reason: str, code: str, **fields: Any) -> TrainingError:
        place = f"stages.{self.label}.{key}".removesuffix(".")
        return TrainingError.at(place, reason, code, **fields)

    @property
    def roles(self) -> dict[Role, Role]:
        """The sides that encode queries and documents: `side` for both, or one for each."""
        side: Role | None = getattr(self, "side", None)
        return {"query": side or "query", "document": side or "document"}

    def sides(self) -> Sequence[Role]:
        """Returns the sides whose encoders the result depends on."""
        return list(dict.fromkeys(self.roles.values()))

    @abstractmethod
    def run(self, context: Context, folder: Path) -> Outcome:
        """Runs the stage in its folder; resumes an interrupted run."""

    def entries(self, context: Context) -> list[DataEntry]:
        return self.data

    def files(self, context: Context) -> list[Path]:
        return [p for entry in self.entries(context) for p in entry_files(entry, context.mined)]

    def run_seed(self, context: Context) -> int:
        return context.seed

    def publish(self, context: Context, folder: Path) -> None:
        """Registers the finished stage for later stages that refer to it by name."""
        context.folders[self.label] = folder

    def check(self, context: Context, sides: Collection[Role]) -> None:
        """Checks that the encoders, earlier stages and files that the stage needs exist.

        `context` holds the names of the earlier stages, none of which has run.
        """
        for side in self.sides():
            if side not in sides:
                reason = f"the recipe lacks this encoder, which stage '{self.label}' needs"
                raise TrainingError.at(side, reason, "missing_encoder")
        for path in self.files(context):
            if path not in context.mined.values():
                check_readable(path)

    def inputs(self, context: Context) -> dict[str, Any]:
        """Returns everything that the result depends on, as JSON; paths of data are excluded."""
        settings = self.model_dump(mode="json", exclude=_NO_INPUTS)
        data = data_inputs(context, self.entries(context))
        settings["data"] = data.pop("entries")
        return {
            "version": _VERSION,
            "stage": settings,
            "encoders": {side: context.encoders[side].key for side in sorted(self.sides())},
            **data,
        }


class TrainingStage(Stage):
    """A stage that trains; the defaults are those of CARE (arXiv 2604.10937)."""

    seed: Seed | None = None  # replaces the run's seed, so that runs with other seeds share it
    # Peak rate of AdamW, with linear decay to zero; a stage that trains both encoders also takes
    # one rate for each, as {query: 1e-4, document: 1e-5}.
    learning_rate: Rate | dict[Role, Rate] = 1e-4
    warmup: float = Field(0.05, ge=0, lt=1)  # share of the steps with linear warm-up
    batch: Positive = 640  # examples per step on all devices together
    # Texts encoded at a time; None for the whole batch. With mini-batches, activations are
    # recomputed in the backward pass (GradCache, arXiv 2101.06983).
    mini_batch: Positive | None = None
    epochs: Positive = 1  # passes over the data
    max_steps: Positive | None = None  # maximum number of steps
    weight_decay: float = Field(0.0, ge=0)  # of AdamW
    max_grad_norm: float = Field(1.0, gt=0)  # gradients are clipped to this norm
    precision: Precision = "fp32"  # of the computation; weights keep their dtype
    gradient_checkpointing: bool = False  # whether layers recompute activations
    dropout: float | None = Field(None, ge=0, lt=1)  # None keeps the checkpoint's
    group_by_length: bool = True  # whether a batch holds texts of similar length
    # Share of the trained weights in the result; the rest are those from before the stage (WiSE-FT,
    # arXiv 2109.01903). Less than 1 keeps more of what the encoder could do before.
    interpolation: float = Field(1.0, gt=0, le=1)
    checkpoint_every: Positive = 500  # steps
    log_every: Positive = 10  # steps
    # Whether weights, gradients and the optimizer's state are sharded over processes (FSDP2).
    sharded: bool = False
    # Further arguments of transformers.TrainingArguments.
    trainer: dict[str, Any] = Field(default_factory=dict)

    @property
    def trained(self) -> Sequence[Role]:
        """The sides that the stage trains; by default all that its result depends on."""
        return self.sides()

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if isinstance(self.learning_rate, dict):
            if len(trained := self.trained) == 1:
                # Other parameters, such as a decoder, belong to no side.
                reason = f"must be a number: the stage trains the {trained[0]} encoder only"
                raise ValueError(f"learning_rate: {reason}")
            if {*self.learning_rate} != {*trained}:
                named = " and ".join(trained)
                raise ValueError(f"learning_rate: must be a number, or name a rate for {named}")
        return self

    def run_seed(self, context: Context) -> int:
        return context.seed if self.seed is None else self.seed

    def check(self, context: Context, sides: Collection[Role]) -> None:
        """Also checks the argument names in `trainer`."""
        super().check(context, sides)
        from transformers import TrainingArguments

        for key in _OTHER_SHARDING:
            if key in self.trainer:
                reason = "not supported: set sharded: true in the stage"
                raise self.error(f"trainer.{key}", reason, "unsupported_sharding")
        for name in _OTHER_LAUNCHERS:
            if os.environ.get(name, "false").lower() == "true":
                reason = f"{name} is set: start with torchrun, and set sharded: true in the stage"
                raise self.error("sharded", reason, "unsupported_sharding")
        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        if unknown := sorted(self.trainer.keys() - known):
            reason = "unknown key: not an argument of transformers.TrainingArguments"
            raise self.error(f"trainer.{unknown[0]}", reason, "unknown_key")

    def inputs(self, context: Context) -> dict[str, Any]:
        """Returns everything that the result depends on, including seed and development set."""
        inputs = super().inputs(context) | {"seed": self.run_seed(context)}
        if context.dev:
            inputs["measured"] = context.dev.model_dump(mode="json", exclude={"beir"})
            inputs["dev"] = checksums(entry_files(context.dev, {}))
        return inputs


def data_inputs(context: Context, entries: Sequence[DataEntry]) -> dict[str, Any]:
    """Returns everything that the texts of data entries depend on, as JSON, without paths."""
    settings = [entry.model_dump(mode="json") for entry in entries]
    for entry in settings:
        entry |= {source: entry[source] is not None for source in SOURCES}
    files = [path for entry in entries for path in entry_files(entry, context.mined)]
    return {
        "entries": settings,
        "data": checksums(files),
        "held_out": checksum(sorted(context.held_out)),
    }


def check_readable(path: Path) -> None:
    """Raises DataError if a file cannot be opened."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(path, error) from error


def checksums(files: Sequence[Path]) -> list[str]:
    """Returns the SHA-256 of each file, in order; DataError if one cannot be read."""
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
