"""Projections of token states for late interaction, distilled from a better ranking."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor
from torch.nn import functional

from core.encoders import Role
from core.rows import Rows, blocks
from core.shards import ShardedVectors
from core.types import Document, FloatArray, RowArray
from evaluation.bm25 import Bm25Index
from models.late_interaction import max_sim
from training.corpus import Corpus
from training.distributed import processes, progress
from training.schema import LateInteractionSettings
from training.vectors import search

_ROLES: tuple[Role, Role] = ("query", "document")
# Tokens of each side whose principal components are the initial projection.
_SAMPLE = 20_000


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of each query, with what their scores are computed from."""

    queries: Rows  # token states of the queries, float16 [tokens, width]
    documents: Rows  # token states of all documents, likewise
    rows: RowArray  # int64 [queries, candidates], rows of the candidates in `documents`
    cosines: FloatArray  # float32 [queries, candidates], of the sentence vectors
    teacher: FloatArray  # float32 [queries, candidates], scores of the teacher
    positive: NDArray[np.bool_]  # bool [queries, candidates], whether the document is relevant


def rank_candidates(
    settings: LateInteractionSettings,
    corpus: Corpus,
    documents: Sequence[str],
    vectors: Sequence[ShardedVectors],
    states: Sequence[Rows],
) -> Candidates:
    """Ranks the candidates of each query by the teacher.

    `documents` begin with those of `corpus`; `vectors` (unit norm) and `states` (float16
    [tokens, width]) are those of queries and of documents.
    """
    queries, tokens = states
    query_vectors = vectors[0].take(np.arange(len(corpus)))
    depth = min(settings.depth, len(documents))
    _, nearest = search(query_vectors, vectors[1], depth, processes().device)
    bm25 = Bm25Index(Document(str(row), text) for row, text in enumerate(documents))
    rng = np.random.default_rng(0)
    chosen = []
    with progress(len(corpus), "candidates", "query") as bar:
        for row, hits in enumerate(bm25.search(corpus.queries, depth)):
            rows = np.unique([*nearest[row], *map(int, hits), *corpus.positives[row]])
            scores = bm25.score(corpus.queries[row], [str(number) for number in rows])
            words = np.array(list(scores.values()), dtype=np.float32)
            cosines = vectors[1].take(rows) @ query_vectors[row]
            found = [tokens[number].astype(np.float32) for number in rows]
            late = max_sim(queries[row].astype(np.float32), found)
            teacher = cosines + settings.weight * late
            teacher += settings.bm25 * words / max(float(words.max()), 1e-9)
            positive = np.isin(rows, corpus.positives[row])
            # Positives come first, so that none is left out.
            order = rng.permutation(len(rows)) if settings.sampled else -teacher
            best = np.lexsort((order, ~positive))[: min(settings.candidates, len(documents))]
            chosen.append((rows[best], cosines[best], teacher[best], positive[best]))
            bar.update()
    return Candidates(queries, tokens, *(np.stack(part) for part in zip(*chosen, strict=True)))


def fit_projections(
    settings: LateInteractionSettings, candidates: Candidates
) -> tuple[dict[Role, FloatArray], list[dict[str, float]]]:
    """Trains the projections, float32 [width, dimension] for each side; also returns the losses.

    Token vectors have dimensions of about equal variance, as their codecs assume: both projections
    are multiplied by one random rotation, which changes no score.
    """
    device = processes().device
    start = torch.from_numpy(principal_components(candidates, settings.dimension)).to(device)
    projections = [torch.nn.Parameter(start.clone()) for _ in _ROLES]
    optimizer = torch.optim.AdamW(projections, lr=settings.learning_rate, weight_decay=0.0)
    steps = settings.epochs * -(-len(candidates.rows) // settings.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    history = []
    with progress(steps, "late interaction", "step") as bar:
        for step, rows in enumerate(_batches(len(candidates.rows), settings), start=1):
            loss = _loss(settings, candidates, rows, *projections)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.update()
            if step % settings.log_every == 0 or step == steps:
                history.append({"step": step, "loss": float(loss.detach())})
    rotation = torch.linalg.qr(torch.randn(settings.dimension, settings.dimension))[0]
    rotated = [(value.detach().cpu() @ rotation).numpy() for value in projections]
    return dict(zip(_ROLES, rotated, strict=True)), history


def write_projections(path: Path, projections: Mapping[Role, FloatArray]) -> None:
    """Writes projections as safetensors, with the tensors `query` and `document`."""
    save_file({role: np.ascontiguousarray(x) for role, x in projections.items()}, path)


def principal_components(candidates: Candidates, dimension: int) -> FloatArray:
    """Returns the first principal components of token states, float32 [width, dimension].

    The states of both sides count equally; their mean is not subtracted, so that dot products are
    kept as well as possible. Columns are orthonormal.
    """
    rng = np.random.default_rng(0)
    width = candidates.queries.values.shape[1]
    moment = np.zeros((width, width))
    for rows in (candidates.queries, candidates.documents):
        count = min(_SAMPLE, len(rows.values))
        sample = rows.values[np.sort(rng.choice(len(rows.values), count, replace=False))]
        states = sample.astype(np.float64)
        moment += states.T @ states / count
    _, vectors = np.linalg.eigh(moment)
    found: FloatArray = vectors[:, ::-1][:, :dimension].astype(np.float32)
    return found


def max_sim_scores(
    queries: Tensor, query_mask: Tensor, documents: Tensor, document_mask: Tensor
) -> Tensor:
    """MaxSim with gradients; see `models.late_interaction`.

    Args:
        queries: float32 [n, m, k], unit norm.
        query_mask: bool [n, m], true for tokens.
        documents: float32 [n, c, l, k], c documents of each query, unit norm.
        document_mask: bool [n, c, l], true for tokens.

    Returns:
        float32 [n, c].
    """
    similarities = torch.einsum("nmk,nclk->ncml", queries, documents)
    hidden = ~document_mask[:, :, None, :]
    best = similarities.masked_fill(hidden, -torch.inf).amax(dim=-1)
    kept = query_mask[:, None, :]
    return (best * kept).sum(dim=-1) / kept.sum(dim=-1)


def _loss(
    settings: LateInteractionSettings,
    candidates: Candidates,
    rows: RowArray,
    query_projection: Tensor,
    document_projection: Tensor,
) -> Tensor:
    device = query_projection.device
    chosen = candidates.rows[rows]
    states, mask = _padded(candidates.documents, chosen.reshape(-1), device)
    documents = functional.normalize(states @ document_projection, dim=-1)
    documents = documents.view(*chosen.shape, *documents.shape[1:])
    query_states, query_mask = _padded(candidates.queries, rows, device)
    queries = functional.normalize(query_states @ query_projection, dim=-1)
    late = max_sim_scores(queries, query_mask, documents, mask.view(*chosen.shape, -1))
    cosines, teacher, positive = (
        torch.from_numpy(values[rows]).to(device)
        for values in (candidates.cosines, candidates.teacher, candidates.positive)
    )
    target = (1 - settings.labels) * (teacher / settings.teacher_temperature).softmax(dim=1)
    target = target + settings.labels * positive / positive.sum(dim=1, keepdim=True)
    return functional.cross_entropy(
        (cosines + settings.weight * late) / settings.temperature, target
    )


def _padded(states: Rows, rows: RowArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns states, float32 [rows, longest, width], and their mask, bool [rows, longest]."""
    found = [torch.from_numpy(states[row].astype(np.float32)) for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in found])
    padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True).to(device)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).to(device)


def _batches(count: int, settings: LateInteractionSettings) -> Iterator[RowArray]:
    """Yields rows of queries in random order, for all epochs."""
    for _ in range(settings.epochs):
        order = torch.randperm(count).numpy()
        yield from (order[rows] for rows in blocks(count, settings.batch))
