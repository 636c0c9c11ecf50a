"""The stages, one function for each kind: encoders and data in, encoders and measures out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import set_seed

from core.errors import TrainingError
from core.types import FloatArray, Role, RowArray
from models.training.batches import AlignCollator, Batch, Corpus, PairCollator, Plan
from models.training.data import DevSet, Mined, read_documents, read_examples, read_texts
from models.training.dev import Measurement
from models.training.encoder import Encoder, Side, Tokens, tokenizer
from models.training.mining import mine, write_triples
from models.training.objectives import Alignment, Contrast, Distillation
from models.training.processes import processes
from models.training.recipe import (
    Align,
    Contrastive,
    Derive,
    Dev,
    Distill,
    EncoderStart,
    Fit,
    Joint,
    Mine,
    RetroMae,
    Stage,
    Teacher,
    Unsupervised,
    stage_name,
)
from models.training.retromae import RetroMaeCollator, RetroMaeObjective
from models.training.starts import prepare
from models.training.trainer import StageTrainer
from models.training.vectors import TeacherVectors, compute, stored

Sides = Mapping[Role, Side]

TRIPLES = "triples.jsonl"
_FROZEN_BATCH = 32


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
        cache: Where vectors of frozen encoders are kept for later stages and runs.
    """

    stage: Any
    seed: int
    sides: Sides
    folder: Path
    cache: Path
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
        RetroMae: _retromae,
        Unsupervised: _unsupervised,
        Contrastive: _contrastive,
        Derive: _derive,
        Teacher: _teacher,
        Mine: _mine,
        Align: _align,
        Joint: _joint,
        Distill: _distill,
    }
    # New adapters and decoders are drawn before training begins.
    set_seed(context.seed)
    return kinds[type(context.stage)](context)


def sides_read(stage: Stage) -> list[Role]:
    """Returns the sides that a stage's result depends on."""
    if isinstance(stage, Align | Joint) or (isinstance(stage, Distill) and stage.side is None):
        return ["query", "document"]
    if isinstance(stage, Derive):
        return sorted({stage.side, stage.source})
    return [getattr(stage, "side")]  # noqa: B009 (the other kinds have it)


def teacher_name(stage: Align | Distill, vectors: Mapping[str, object]) -> str:
    """Returns the teacher stage that a stage reads, of those before it.

    Raises:
        TrainingError: If there is none.
    """
    name = stage.teacher or next(reversed(list(vectors)), "")
    if name not in vectors:
        raise TrainingError(
            f"stages.{stage_name(stage)}.teacher: no stage "
            f"{repr(name) if name else 'of kind teacher'} computed vectors before this one"
        )
    return name


def _retromae(context: Context) -> Outcome:
    stage: RetroMae = context.stage
    side = context.sides[stage.side]
    texts, dropped = read_texts(stage.data, context.held_out, context.mined)
    encoder = _encoder(side, stage)
    # Plain text: prompts belong to what is trained later.
    tokens = Tokens.of(tokenizer(side, ""), [text.text for text in texts])
    return _fit(
        context,
        RetroMaeObjective(encoder),
        RetroMaeCollator(tokens, encoder, stage, context.seed),
        tokens.lengths,
        {stage.side: encoder},
        {},
        {"texts": len(texts), "held_out": dropped},
    )


def _mine(context: Context) -> Outcome:
    stage: Mine = context.stage
    examples, dropped = read_examples(stage.data, context.held_out, context.mined)
    corpus = Corpus.of(examples)
    # The documents of the examples come first: rows of the corpus are rows here.
    others = read_documents(stage.data, context.mined)
    documents = list(dict.fromkeys((*corpus.documents, *others)))
    side = context.sides[stage.side]
    ask = _frozen(context, side, "query", corpus.queries, stage.batch)
    find = _frozen(context, side, "document", documents, stage.batch)
    if processes().is_main_process:
        mined = mine(ask, find, corpus.positives, stage)
        write_triples(context.folder / TRIPLES, corpus, documents, mined)
    return Outcome({}, counts={"examples": len(examples), "held_out": dropped})


def _derive(context: Context) -> Outcome:
    stage: Derive = context.stage
    source, before = context.sides[stage.source], context.sides[stage.side]
    if source.adapter:
        raise TrainingError(f"stages.{stage_name(stage)}: {stage.source} has an adapter")
    cut = EncoderStart(
        **before.start.model_dump(exclude={"start", "pair", "revision", "layers", "projection"}),
        start=str(source.folder),
        layers=stage.layers,
        projection=stage.projection,
    )
    made = prepare(cut, f"stages.{stage_name(stage)}", context.folder)
    folder = context.folder / stage.side
    made.folder.rename(folder)
    return Outcome({stage.side: replace(made, folder=folder, start=before.start)})


def _teacher(context: Context) -> Outcome:
    stage: Teacher = context.stage
    texts, dropped = read_texts(stage.data, context.held_out, context.mined)
    side = context.sides[stage.side]
    if processes().is_main_process:
        encoder = Encoder(side, trainable=False).to(processes().device)
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
        kl=stage.kl,
        temperature=stage.temperature,
    )
    return _fit(
        context,
        objective,
        AlignCollator(tokens, teacher, rows),
        np.asarray(tokens.lengths),
        {"query": encoder},
        {"query": "query", "document": "document"},
        {"texts": len(texts), "held_out": dropped},
    )


def _joint(context: Context) -> Outcome:
    stage: Joint = context.stage
    encoders = {role: _encoder(context.sides[role], stage) for role in stage.train}
    sides: dict[Role, Role] = {"query": "query", "document": "document"}
    objective = Contrast(encoders, sides, stage.mini_batch, temperature=stage.temperature)
    return _fit_pairs(context, objective, encoders, sides, stage.negatives)


def _contrastive(context: Context) -> Outcome:
    stage: Contrastive = context.stage
    side = context.sides[stage.side]
    encoder = _encoder(side, stage)
    if beyond := [d for d in stage.dimensions if d > side.native_dimension]:
        raise TrainingError(
            f"stages.{stage_name(stage)}.dimensions: {beyond[0]} is more than the "
            f"{side.native_dimension} of the encoder"
        )
    sides: dict[Role, Role] = {"query": stage.side, "document": stage.side}
    objective = Contrast(
        {stage.side: encoder},
        sides,
        stage.mini_batch,
        temperature=stage.temperature,
        dimensions=tuple(stage.dimensions),
    )
    return _fit_pairs(context, objective, {stage.side: encoder}, sides, stage.negatives)


def _unsupervised(context: Context) -> Outcome:
    stage: Unsupervised = context.stage
    encoder = _encoder(context.sides[stage.side], stage)
    sides: dict[Role, Role] = {"query": stage.side, "document": stage.side}
    objective = Contrast(
        {stage.side: encoder},
        sides,
        stage.mini_batch,
        temperature=stage.temperature,
        learn_temperature=True,
    )
    return _fit_pairs(context, objective, {stage.side: encoder}, sides, 0)


def _distill(context: Context) -> Outcome:
    stage: Distill = context.stage
    sides: dict[Role, Role] = {
        "query": stage.side or "query",
        "document": stage.side or "document",
    }
    encoders = {side: _encoder(context.sides[side], stage) for side in set(sides.values())}
    objective = Distillation(
        encoders,
        sides,
        stage.mini_batch,
        kl=stage.kl,
        contrastive=stage.contrastive,
        temperature=stage.temperature,
        teacher_temperature=stage.teacher_temperature,
    )
    folder = context.vectors[teacher_name(stage, context.vectors)]
    teacher = TeacherVectors(folder, None, None)
    return _fit_pairs(context, objective, encoders, sides, stage.negatives, teacher)


def _encoder(side: Side, stage: Fit) -> Encoder:
    return Encoder(
        side,
        trainable=True,
        dropout=stage.dropout,
        gradient_checkpointing=stage.gradient_checkpointing,
    )


def _fit_pairs(
    context: Context,
    objective: nn.Module,
    encoders: Mapping[Role, Encoder],
    pair: dict[Role, Role],
    negatives: int,
    teacher: TeacherVectors | None = None,
) -> Outcome:
    """Trains on examples; the texts of a side that is not trained are encoded once.

    Raises:
        TrainingError: If the two encoders have different dimensions.
    """
    query, document = (context.sides[pair[role]].dimension for role in ("query", "document"))
    if query != document:
        raise TrainingError(
            f"stages.{stage_name(context.stage)}: query has {query} dimensions, document "
            f"{document}: set the dimension or projection of one"
        )
    examples, dropped = read_examples(context.stage.data, context.held_out, context.mined)
    corpus = Corpus.of(examples)
    texts: dict[Role, Tokens | FloatArray] = {
        "query": _texts(context, encoders, pair, "query", corpus.queries),
        "document": _texts(context, encoders, pair, "document", corpus.documents),
    }
    return _fit(
        context,
        objective,
        PairCollator(
            corpus,
            texts,
            negatives,
            context.seed,
            teacher,
            all_documents=getattr(context.stage, "all_documents", False),
        ),
        _lengths(corpus, texts),
        encoders,
        pair,
        {"examples": len(examples), "pairs": len(corpus.pairs), "held_out": dropped},
    )


def _texts(
    context: Context,
    encoders: Mapping[Role, Encoder],
    pair: Mapping[Role, Role],
    role: Role,
    texts: list[str],
) -> Tokens | FloatArray:
    side = context.sides[pair[role]]
    if pair[role] not in encoders:
        return _frozen(context, side, role, texts)
    return Tokens.of(tokenizer(side, getattr(side.start.prompts, role)), texts)


def _lengths(corpus: Corpus, texts: Mapping[Role, Tokens | FloatArray]) -> RowArray:
    """Returns the tokens of each pair that are read for it."""
    total = np.zeros(len(corpus.pairs), dtype=np.int64)
    for rows, tokens in zip(
        np.array(corpus.pairs).T, (texts["query"], texts["document"]), strict=True
    ):
        if isinstance(tokens, Tokens):
            total += tokens.lengths[rows]
    return total


def _frozen(
    context: Context, side: Side, role: Role, texts: list[str], batch: int = _FROZEN_BATCH
) -> FloatArray:
    precision = context.stage.precision
    return stored(context.cache, side, role, texts, batch=batch, precision=precision)


def _measurement(
    context: Context, encoders: Mapping[Role, Encoder], pair: Mapping[Role, Role]
) -> Measurement | None:
    if context.dev is None or context.dev_set is None:
        return None
    texts = {"query": context.dev_set.queries, "document": context.dev_set.documents}
    found: dict[str, Encoder | FloatArray] = {}
    for role in pair:
        encoder = encoders.get(pair[role])
        side = context.sides[pair[role]]
        found[role] = encoder or _frozen(
            context, side, role, list(texts[role].values()), context.dev.batch
        )
    return Measurement(
        context.dev_set,
        found["query"],
        found["document"],
        batch=context.dev.batch,
        precision=context.stage.precision,
    )


def _of(
    encoder: Encoder, objective: nn.Module, state: Mapping[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Returns the part of gathered weights that is of an encoder's model."""
    if state is None:
        return None
    (name,) = (name for name, module in objective.named_modules() if module is encoder.model)
    return {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}


def _fit(
    context: Context,
    objective: nn.Module,
    collate: Callable[[Any], Batch],
    lengths: RowArray,
    encoders: Mapping[Role, Encoder],
    pair: dict[Role, Role],
    counts: dict[str, int],
) -> Outcome:
    """Trains, measures and saves.

    Args:
        context: The stage.
        objective: What is minimised.
        collate: Makes the tensors of a batch.
        lengths: int64 [examples], tokens of each example.
        encoders: The encoders that are trained, by side.
        pair: Which side encodes queries and which documents in what comes out.
        counts: What was read.
    """
    stage = context.stage
    world = processes().num_processes
    plan = Plan(
        len(lengths),
        stage.epochs,
        max(1, stage.batch // world),
        context.seed,
        lengths if stage.group_by_length else None,
    )
    measure = _measurement(context, encoders, pair) if pair else None
    trainer = StageTrainer(
        stage,
        stage_name(stage),
        context.folder,
        objective,
        plan,
        collate,
        context.seed,
        measure,
        context.dev,
    )
    trainer.fit()
    state = trainer.whole_state()
    sides: dict[Role, Side] = {}
    if processes().is_main_process:
        sides = {
            role: encoder.save(context.folder / role, _of(encoder, objective, state))
            for role, encoder in encoders.items()
        }
    history = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return Outcome(sides, pair, history, counts | {"steps": trainer.state.global_step})
