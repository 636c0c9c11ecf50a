"""The stages, one function for each kind: encoders and data in, encoders and measures out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from core.errors import TrainingError
from core.types import Role
from models.training.batches import AlignCollator, Batch, Corpus, PairCollator, Plan
from models.training.data import DevSet, Mined, read_examples, read_texts
from models.training.dev import Measurement
from models.training.encoder import Encoder, Side, Tokens, tokenizer
from models.training.objectives import Alignment, Contrast, Distillation, Objective
from models.training.recipe import (
    Align,
    Contrastive,
    Dev,
    Distill,
    Fit,
    Joint,
    Stage,
    Teacher,
    Unsupervised,
    stage_name,
)
from models.training.trainer import StageTrainer
from models.training.vectors import TeacherVectors, compute

Sides = Mapping[Role, Side]


@dataclass(frozen=True)
class Context:
    """What a stage works with.

    Attributes:
        stage: Its settings.
        seed: Seed of all that is drawn.
        sides: The encoders so far, and whatever the stage does not train.
        folder: Where it writes.
        dev: What is measured on, or None.
        dev_set: Its queries, documents and judgements.
        held_out: Queries that must not be trained on.
        mined: Where mined triples lie, by stage.
        vectors: Where teacher vectors lie, by stage.
    """

    stage: Any
    seed: int
    sides: Sides
    folder: Path
    dev: Dev | None = None
    dev_set: DevSet | None = None
    held_out: frozenset[str] = frozenset()
    mined: Mined = field(default_factory=dict)
    vectors: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves behind.

    Attributes:
        sides: The encoders that it trained.
        pair: Which side encodes queries and which documents in the pair that it made, if any.
        history: Records of losses and measures over steps.
        counts: Examples, texts and what was left out.
    """

    sides: dict[Role, Side]
    pair: dict[Role, Role] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def run_stage(context: Context) -> Outcome:
    """Runs a stage in its folder."""
    kinds: dict[type, Callable[[Context], Outcome]] = {
        Unsupervised: _unsupervised,
        Contrastive: _contrastive,
        Teacher: _teacher,
        Align: _align,
        Joint: _joint,
        Distill: _distill,
    }
    return kinds[type(context.stage)](context)


def sides_read(stage: Stage) -> list[Role]:
    """Returns the sides that a stage's result depends on."""
    if isinstance(stage, Align | Joint) or (isinstance(stage, Distill) and stage.side is None):
        return ["query", "document"]
    return [getattr(stage, "side")]  # noqa: B009 (the other kinds have it)


def teacher_name(stage: Align | Distill, vectors: Mapping[str, Path]) -> str:
    """Returns the teacher stage that a stage reads.

    Raises:
        TrainingError: If there is none.
    """
    name = stage.teacher or next(reversed(list(vectors)), "")
    if name not in vectors:
        raise TrainingError(
            f"stages.{stage_name(stage)}.teacher: no stage "
            f"'{name or 'of kind teacher'}' computed vectors before this one"
        )
    return name


def _teacher(context: Context) -> Outcome:
    stage: Teacher = context.stage
    texts, dropped = read_texts(stage.data, context.held_out, context.mined)
    side = context.sides[stage.side]
    if PartialState().is_main_process:
        encoder = Encoder(side, trainable=False).to(PartialState().device)
        compute(
            context.folder,
            side,
            encoder,
            texts,
            stage.prompts or side.start.prompts,
            shard=stage.shard,
            batch=stage.batch,
            precision=stage.precision,
        )
    return Outcome({}, counts={"texts": len(texts), "held_out": dropped})


def _align(context: Context) -> Outcome:
    stage: Align = context.stage
    student, teacher_side = context.sides["query"], context.sides["document"]
    folder = (
        Path(stage.vectors)
        if stage.vectors
        else context.vectors[teacher_name(stage, context.vectors)]
    )
    teacher = TeacherVectors(folder, teacher_side.key, student.dimension)
    texts, dropped = read_texts(stage.data, context.held_out, context.mined)
    rows = np.empty(len(texts), dtype=np.int64)
    for role in ("query", "document"):
        here = [i for i, text in enumerate(texts) if text.role == role]
        if here:
            rows[here] = teacher.rows(role, [texts[i].text for i in here])
    # The student learns to read every text as it will read queries.
    tokens = Tokens.of(
        tokenizer(student, student.start.prompts.query), [text.text for text in texts]
    )
    encoder = _encoder(student, stage)
    objective = Alignment(
        encoder,
        stage.mini_batch,
        contrastive=stage.contrastive,
        mse=stage.mse,
        temperature=stage.temperature,
    )
    document = Encoder(teacher_side, trainable=False) if context.dev_set else None
    return _fit(
        context,
        objective,
        AlignCollator(tokens, teacher, rows),
        np.asarray(tokens.lengths),
        {"query": encoder, "document": document},
        {"texts": len(texts), "held_out": dropped},
    )


def _joint(context: Context) -> Outcome:
    stage: Joint = context.stage
    encoders = {
        role: _encoder(context.sides[role], stage, trainable=role in stage.train)
        for role in ("query", "document")
    }
    objective = Contrast(
        encoders,
        {"query": "query", "document": "document"},
        stage.mini_batch,
        temperature=stage.temperature,
    )
    return _fit_pairs(context, objective, encoders, stage.negatives)


def _contrastive(context: Context) -> Outcome:
    stage: Contrastive = context.stage
    side = context.sides[stage.side]
    encoder = _encoder(side, stage)
    if beyond := [d for d in stage.dimensions if d > side.native_dimension]:
        raise TrainingError(
            f"stages.{stage_name(stage)}.dimensions: {beyond[0]} is more than the "
            f"{side.native_dimension} of the encoder"
        )
    objective = Contrast(
        {stage.side: encoder},
        {"query": stage.side, "document": stage.side},
        stage.mini_batch,
        temperature=stage.temperature,
        dimensions=tuple(stage.dimensions),
    )
    return _fit_pairs(context, objective, {stage.side: encoder}, stage.negatives)


def _unsupervised(context: Context) -> Outcome:
    stage: Unsupervised = context.stage
    encoder = _encoder(context.sides[stage.side], stage)
    objective = Contrast(
        {stage.side: encoder},
        {"query": stage.side, "document": stage.side},
        stage.mini_batch,
        temperature=stage.temperature,
        learn_temperature=True,
    )
    return _fit_pairs(context, objective, {stage.side: encoder}, 0)


def _distill(context: Context) -> Outcome:
    stage: Distill = context.stage
    both: tuple[Role, ...] = ("query", "document")
    sides: tuple[Role, ...] = (stage.side,) if stage.side else both
    encoders = {role: _encoder(context.sides[role], stage) for role in sides}
    roles: dict[Role, str] = {role: stage.side or role for role in both}
    objective = Distillation(
        encoders,
        roles,
        stage.mini_batch,
        kl=stage.kl,
        contrastive=stage.contrastive,
        temperature=stage.temperature,
        teacher_temperature=stage.teacher_temperature,
    )
    folder = context.vectors[teacher_name(stage, context.vectors)]
    teacher = TeacherVectors(folder, None, None)
    return _fit_pairs(context, objective, encoders, stage.negatives, teacher)


def _encoder(side: Side, stage: Fit, *, trainable: bool = True) -> Encoder:
    return Encoder(
        side,
        trainable=trainable,
        dropout=stage.dropout,
        gradient_checkpointing=stage.gradient_checkpointing,
    )


def _fit_pairs(
    context: Context,
    objective: Objective,
    encoders: Mapping[Role, Encoder],
    negatives: int,
    teacher: TeacherVectors | None = None,
) -> Outcome:
    examples, dropped = read_examples(context.stage.data, context.held_out, context.mined)
    corpus = Corpus.of(examples)
    ask, find = (objective.encoder(role).side for role in ("query", "document"))
    queries = Tokens.of(tokenizer(ask, ask.start.prompts.query), corpus.queries)
    documents = Tokens.of(tokenizer(find, find.start.prompts.document), corpus.documents)
    lengths = np.array([documents.lengths[row] for _, row in corpus.pairs], dtype=np.int64)
    return _fit(
        context,
        objective,
        PairCollator(corpus, queries, documents, negatives, context.seed, teacher),
        lengths,
        encoders,
        {"examples": len(examples), "pairs": len(corpus.pairs), "held_out": dropped},
    )


def _fit(
    context: Context,
    objective: Objective,
    collate: Callable[[Any], Batch],
    lengths: Any,
    encoders: Mapping[Role, Encoder | None],
    counts: dict[str, int],
) -> Outcome:
    """Trains, measures and saves; `encoders` are those of the pair that comes out."""
    stage = context.stage
    world = PartialState().num_processes
    plan = Plan(
        len(lengths),
        stage.epochs,
        max(1, stage.batch // world),
        context.seed,
        lengths if stage.group_by_length else None,
    )
    pair: dict[Role, Role] = {
        role: role if role in encoders else next(iter(encoders)) for role in ("query", "document")
    }
    measure = None
    if context.dev is not None and context.dev_set is not None:
        query, document = (encoders[pair[role]] for role in ("query", "document"))
        assert query is not None and document is not None
        document.to(PartialState().device)
        measure = Measurement(
            context.dev_set,
            query,
            document,
            batch=context.dev.batch,
            precision=stage.precision,
        )
    trainer = StageTrainer(
        stage,
        stage_name(stage),
        context.folder,
        objective,
        plan,
        collate,
        context.seed,
        measure,
        context.dev.every if context.dev else None,
    )
    trainer.fit()
    trained = {role: encoder for role, encoder in encoders.items() if encoder and encoder.trainable}
    sides: dict[Role, Side] = {}
    if PartialState().is_main_process:
        sides = {role: encoder.save(context.folder / role) for role, encoder in trained.items()}
    history = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return Outcome(sides, pair, history, counts | {"steps": trainer.state.global_step})
