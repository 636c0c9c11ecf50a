"""Training objectives: modules of encoders and a loss, whose forward computes one batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from core.encoders import Role
from training.batches import EXAMPLES, Batch
from training.distributed import all_gather_with_grad
from training.encoder import Encoder
from training.losses import (
    distillation_kl,
    embedding_kl,
    info_nce,
    l2_normalize,
    matryoshka_info_nce,
    mse_loss,
)

Losses = dict[str, Tensor]


class Objective(nn.Module):
    """The trained encoders of a stage and their loss.

    Vectors of a frozen encoder are part of the batch.

    Args:
        roles: The side that encodes queries and the side that encodes documents; empty if the
            stage produces no pair.
        loss: Computes the result of `forward`, unless a subclass overrides it.
        mini_batch: Texts encoded at a time; None for the whole batch.
        temperature: Initial value of a learned temperature; None if none is learned.
    """

    def __init__(
        self,
        encoders: Mapping[Role, Encoder],
        roles: Mapping[Role, Role],
        loss: "Callable[[Objective, Batch], Losses] | None" = None,
        mini_batch: int | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({str(side): encoder for side, encoder in encoders.items()})
        self.roles = dict(roles)
        self.mini_batch = mini_batch
        self._compute = loss
        if temperature is not None:
            self.log_temperature = nn.Parameter(_log(temperature))

    @property
    def trained(self) -> dict[Role, Encoder]:
        """The trained encoders by side."""
        return cast(dict[Role, Encoder], dict(self.encoders.items()))

    @property
    def dimension(self) -> int:
        """Dimensions of the encoders' vectors after truncation."""
        return next(iter(self.trained.values())).checkpoint.dimension

    def embed(self, role: Role, batch: Batch) -> Tensor:
        """Returns the vectors of a batch's queries or documents, float32 [n, d].

        Only stored vectors of a frozen encoder are truncated and have unit norm.
        """
        if (stored := batch.get(f"{role}_vectors")) is not None:
            return stored
        ids, mask = batch[f"{role}_ids"], batch[f"{role}_mask"]
        return self.trained[self.roles[role]].embed(ids, mask, self.mini_batch)

    def forward(self, **batch: Tensor) -> Losses:
        """Returns the scalar `loss` and its parts by name."""
        assert self._compute
        return self._compute(self, batch)


def contrast(
    objective: Objective, batch: Batch, *, temperature: float = 1.0, dimensions: Sequence[int] = ()
) -> Losses:
    """InfoNCE with in-batch and hard negatives, on a batch of `PairCollator`.

    A learned temperature of the objective replaces `temperature`. `dimensions` are nested
    Matryoshka dimensions; by default the loss uses the encoder's dimension only.
    """
    queries = objective.embed("query", batch)
    documents, targets, excluded = _gather(objective.embed("document", batch), batch)
    learned = getattr(objective, "log_temperature", None)
    current = (_log(temperature) if learned is None else learned).exp()
    nested = dimensions or [objective.dimension]
    loss = matryoshka_info_nce(queries, documents, nested, targets, current, excluded)
    return {"loss": loss} if learned is None else {"loss": loss, "temperature": current}


def align(
    objective: Objective, batch: Batch, *, weights: Mapping[str, float], temperature: float
) -> Losses:
    """Stage I of CARE (arXiv 2604.10937): aligns query vectors with a teacher's vectors.

    L = λ₁ · InfoNCE(E_Q(x), E_D(x)) + λ₂ · ‖E_Q(x) − E_D(x)‖², on a batch of `AlignCollator`.
    `weights` holds λ₁ as `contrastive`, λ₂ as `mse`, and as `kl` the weight of `embedding_kl`,
    which CARE does not use.
    """
    student = l2_normalize(objective.embed("query", batch), objective.dimension)
    teachers, offset = all_gather_with_grad(batch["teacher"])
    targets = torch.arange(len(student), device=student.device) + offset
    parts = {
        "contrastive": info_nce(student, teachers, targets, temperature),
        "mse": mse_loss(student, batch["teacher"]),
    }
    if weights["kl"]:
        parts["kl"] = embedding_kl(student, batch["teacher"], temperature)
    # Losses of weight 0 are skipped rather than multiplied: 0 · ∞ is NaN.
    terms = [weight * parts[name] for name, weight in weights.items() if weight]
    return {"loss": torch.stack(terms).sum(), **parts}


def align_and_contrast(
    alignment: Callable[[Objective, Batch], Losses],
    objective: Objective,
    batch: Batch,
    *,
    weight: float,
    temperature: float,
) -> Losses:
    """`alignment` plus `weight` times InfoNCE of the examples in a batch of `AlignCollator`."""
    parts = alignment(objective, batch)
    names = (name for name in batch if name.startswith(EXAMPLES))
    examples = {name.removeprefix(EXAMPLES): batch[name] for name in names}
    found = contrast(objective, examples, temperature=temperature)["loss"]
    return parts | {"loss": parts["loss"] + weight * found, "examples": found}


def distill(
    objective: Objective,
    batch: Batch,
    *,
    weights: tuple[float, float],
    temperatures: tuple[float, float],
) -> Losses:
    """Distillation from a teacher's scores plus InfoNCE, on a batch of `PairCollator`.

    `weights` are those of the KL divergence and of InfoNCE; `temperatures` are those of the
    student's and of the teacher's scores.
    """
    dimension = objective.dimension
    queries = l2_normalize(objective.embed("query", batch), dimension)
    documents = l2_normalize(objective.embed("document", batch), dimension)
    documents, targets, excluded = _gather(documents, batch)
    teacher_documents, _ = all_gather_with_grad(batch["teacher_documents"])
    teacher = batch["teacher_queries"], teacher_documents
    kl = distillation_kl(queries, documents, *teacher, *temperatures, excluded)
    nce = info_nce(queries, documents, targets, temperatures[0], excluded)
    return {"loss": weights[0] * kl + weights[1] * nce, "kl": kl, "contrastive": nce}


def _log(temperature: float) -> Tensor:
    return torch.tensor(temperature, dtype=torch.float64).log().float()


def _gather(documents: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Gathers the documents of all processes.

    `documents` are the m vectors of this process, [m, d]. Returns the M vectors of all processes,
    [M, d]; each query's target among them, int64 [n]; and the documents to exclude from a
    query's negatives, bool [n, M].
    """
    gathered, offset = all_gather_with_grad(documents)
    targets = batch["targets"] + offset
    ids, _ = all_gather_with_grad(batch["documents"])
    return gathered, targets, known_positives(batch["positives"], ids, targets)


def known_positives(positives: Tensor, documents: Tensor, targets: Tensor) -> Tensor:
    """Returns bool [n, m]: the documents that must not be negatives of a query.

    Args:
        positives: int64 [n, p], all positives of each query, padded with −1.
        documents: int64 [m], the documents of the batch.
        targets: int64 [n], column of each query's own positive, which is not excluded.
    """
    known = torch.zeros(len(positives), len(documents), dtype=torch.bool, device=documents.device)
    for column in positives.T:
        known |= column[:, None] == documents
    return known.scatter_(1, targets[:, None], False)
