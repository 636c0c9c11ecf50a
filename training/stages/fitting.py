"""Shared steps of training stages: load encoders, make batches, train, evaluate and save."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.encoders import Role
from core.shards import ShardedVectors
from core.types import FloatArray
from evaluation.metrics import score
from training.batches import Batch, BatchPlan, DrawnExamples, PairCollator
from training.distributed import processes, progress
from training.encoder import Encoder, Tokens, encode, tokenize
from training.objectives import Losses, Objective
from training.schema import DataEntry
from training.stages.base import Context, Outcome, TrainingStage
from training.stages.prepared import Prepared, prepare_examples
from training.stages.trainer import StageTrainer
from training.vectors import TeacherVectors, frozen_shards


def load(stage: TrainingStage, context: Context) -> dict[Role, Encoder]:
    """Loads the encoders that a stage trains, by side."""
    settings = stage.model_dump(include={"dropout", "gradient_checkpointing"})
    return {s: Encoder(context.encoders[s], trainable=True, **settings) for s in stage.trained}


def fit_pairs(
    stage: TrainingStage,
    context: Context,
    folder: Path,
    loss: Callable[[Objective, Batch], Losses],
    *,
    negatives: int = 0,
    all_documents: bool = False,
    teacher: TeacherVectors | None = None,
    learned: float | None = None,
) -> Outcome:
    """Trains on pairs of queries and positives; the texts of a frozen side are encoded once.

    `learned` is the initial value of a learned temperature; the others are those of `PairCollator`.
    """
    roles = stage.roles
    query, document = (context.encoders[side].dimension for side in roles.values())
    if query != document:
        reason = f"query has {query} dimensions, document has {document}: set the key dimension of "
        reason += "the larger encoder"
        raise stage.error("", reason, "dimension_mismatch", query=query, document=document)
    encoders = load(stage, context)
    data = prepare_examples(context, stage.data)
    corpus = data.corpus
    texts: dict[Role, Tokens | ShardedVectors] = {}
    lengths = np.zeros(len(corpus.positives.values), dtype=np.int32)
    for role in roles:
        texts[role] = found = _tokens_or_vectors(stage, context, role, data, encoders)
        if isinstance(found, Tokens):
            lengths += corpus.of_pairs(role, found.lengths)
    seed = stage.run_seed(context)
    collate = PairCollator(corpus, texts, negatives, seed, teacher, all_documents=all_documents)
    objective = Objective(encoders, roles, loss, stage.mini_batch, learned)
    counts = {"examples": len(corpus), "pairs": len(lengths), "held_out": data.held_out}
    return fit(stage, context, folder, objective, collate, lengths, counts)


def draw_examples(
    stage: TrainingStage, context: Context, entries: Sequence[DataEntry], *, batch: int
) -> DrawnExamples:
    """Returns batches of pairs to draw, each with the vectors of all documents of the examples.

    The document encoder must be frozen. All processes must call it.
    """
    data = prepare_examples(context, entries)
    corpus, trained = data.corpus, stage.trained
    roles: tuple[Role, Role] = ("query", "document")
    texts = {role: _tokens_or_vectors(stage, context, role, data, trained) for role in roles}
    seed = stage.run_seed(context)
    collate = PairCollator(corpus, texts, negatives=0, seed=seed, all_documents=True)
    tokens = texts["query"]
    lengths = corpus.of_pairs("query", tokens.lengths) if isinstance(tokens, Tokens) else None
    plan = BatchPlan(len(corpus.positives.values), 1, batch, seed, lengths)
    return DrawnExamples(collate, list(plan), seed)


def fit(
    stage: TrainingStage,
    context: Context,
    folder: Path,
    objective: Objective,
    collate: Callable[[Any], Batch],
    lengths: NDArray[np.int32],
    counts: dict[str, int],
) -> Outcome:
    """Trains the encoders of an objective, evaluates the pair on the development set, and saves.

    The objective's roles define the resulting pair. `lengths`, int32 [examples], are the tokens of
    each example; `counts` are numbers of examples, texts and dropped records for the result.
    """
    plan = BatchPlan(
        len(lengths),
        stage.epochs,
        max(1, stage.batch // processes().num_processes),
        stage.run_seed(context),
        lengths if stage.group_by_length else None,
    )
    measure = _measurement(stage, context, objective)
    trainer = StageTrainer(stage, context, folder, objective, plan, collate, measure)
    trainer.fit()
    trained = {side: encoder.save(folder / side) for side, encoder in objective.trained.items()}
    history = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return Outcome(trained, objective.roles, history, counts | {"steps": trainer.state.global_step})


def _tokens_or_vectors(
    stage: TrainingStage, context: Context, role: Role, data: Prepared, trained: Collection[Role]
) -> Tokens | ShardedVectors:
    """Returns the tokens of a corpus's texts if their encoder is trained, otherwise vectors."""
    encoder, texts = context.encoders[stage.roles[role]], data.corpus.texts(role)
    if stage.roles[role] in trained:
        return data.tokens(role, texts, encoder, getattr(encoder.init.prompts, role))
    return frozen_shards(context.vectors, encoder, role, texts, precision=stage.precision)


def _measurement(
    stage: TrainingStage, context: Context, objective: Objective
) -> Callable[[], dict[str, float]] | None:
    """Returns a function that computes dev metrics; None without a dev set or a pair."""
    dev, dev_set, trained = context.dev, context.dev_set, objective.trained
    if dev is None or dev_set is None or not objective.roles:
        return None
    settings: dict[str, Any] = {"batch": dev.batch, "precision": stage.precision}
    tokens: dict[Role, Tokens] = {}
    stored: dict[Role, FloatArray] = {}
    for role, side in objective.roles.items():
        encoder, texts = context.encoders[side], dev_set.texts(role)
        if side in trained:
            tokens[role] = tokenize(encoder, getattr(encoder.init.prompts, role), texts)
        else:
            found = frozen_shards(context.vectors, encoder, role, texts, **settings)
            stored[role] = found.take(np.arange(len(texts)))

    def vectors(role: Role) -> FloatArray:
        if role in stored:
            return stored[role]
        with progress(len(tokens[role]), f"dev, {role}", "text") as bar:
            return encode(trained[objective.roles[role]], tokens[role], **settings, bar=bar)

    return lambda: score(dev_set.qrels, dev_set.search(vectors("query"), vectors("document")))
