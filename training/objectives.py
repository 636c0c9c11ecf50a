"""What a stage minimises: encoders and a loss as one module, whose forward is a training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from core.encoders import Role
from training.batches import Batch
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
    """Encoders that are trained, by side, and the loss of a batch.

    Vectors of a frozen encoder come with the batch. `roles` says which side encodes queries and
    which documents, and is empty if no pair comes out; `loss` computes what `forward` returns,
    where no subclass does; `mini_batch` texts are encoded at a time, or all of a batch; a given
    `temperature` is learned from that value.
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
        """The encoders, by side."""
        return cast(dict[Role, Encoder], dict(self.encoders.items()))

    @property
    def dimension(self) -> int:
        """Dimensions that the encoders keep."""
        return next(iter(self.trained.values())).checkpoint.dimension

    def embed(self, role: Role, batch: Batch) -> Tensor:
        """Returns vectors float32 [n, d] of a batch: computed, or those of a frozen encoder.

        Those that are computed have the native dimension and any norm.
        """
        if (stored := batch.get(f"{role}_vectors")) is not None:
            return stored
        ids, mask = batch[f"{role}_ids"], batch[f"{role}_mask"]
        return self.trained[self.roles[role]].embed(ids, mask, self.mini_batch)

    def forward(self, **batch: Tensor) -> Losses:
        """Returns `loss`, a scalar, and its parts by name."""
        assert self._compute
        return self._compute(self, batch)


def contrast(
    objective: Objective, batch: Batch, *, temperature: float = 1.0, dimensions: Sequence[int] = ()
) -> Losses:
    """InfoNCE with in-batch and hard negatives, on a batch of `PairCollator`.

    The temperature is the one that the objective learns, if it learns one. Without `dimensions`,
    nested ones, that of the encoder is taken.
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
    """Stage I of CARE: L = λ₁ · InfoNCE(E_Q(x), E_D(x)) + λ₂ · ‖E_Q(x) − E_D(x)‖².

    It takes a batch of `align_batch`; `weights` has λ₁ as `contrastive`, λ₂ as `mse`, and as
    `kl` the weight of `embedding_kl`, which is no part of CARE.
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
    # A weight of zero leaves a loss out altogether: 0 · ∞ is NaN.
    terms = [weight * parts[name] for name, weight in weights.items() if weight]
    return {"loss": torch.stack(terms).sum(), **parts}


def distill(
    objective: Objective,
    batch: Batch,
    *,
    weights: tuple[float, float],
    temperatures: tuple[float, float],
) -> Losses:
    """KL divergence from the teacher's scores and InfoNCE, on a batch of `PairCollator`.

    The weights are of the divergence and of the InfoNCE, the temperatures of the student's scores
    and of the teacher's.
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
    """Returns the documents of all processes, each query's target and which are no negatives.

    This process has vectors [m, d], all have [M, d]; targets are int64 [n], the rest bool [n, M].
    """
    gathered, offset = all_gather_with_grad(documents)
    targets = batch["targets"] + offset
    ids, _ = all_gather_with_grad(batch["documents"])
    return gathered, targets, known_positives(batch["positives"], ids, targets)


def known_positives(positives: Tensor, documents: Tensor, targets: Tensor) -> Tensor:
    """Returns bool [n, m], which documents of a batch, int64 [m], are no negatives of which query.

    Those are all positives of a query, int64 [n, p] padded with −1, but for its target, int64 [n],
    the column of its own positive.
    """
    known = torch.zeros(len(positives), len(documents), dtype=torch.bool, device=documents.device)
    for column in positives.T:
        known |= column[:, None] == documents
    return known.scatter_(1, targets[:, None], False)
