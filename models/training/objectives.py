"""What a stage minimises: encoders and losses as one module, whose forward is a training step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from core.types import Role
from models.training.batches import Batch
from models.training.encoder import Encoder
from models.training.losses import (
    embedding_divergence,
    info_nce,
    matryoshka_info_nce,
    score_divergence,
    squared_distance,
    unit,
)
from models.training.processes import everywhere

Losses = dict[str, Tensor]


class Objective(nn.Module, ABC):
    """Encoders that are trained or frozen, and the loss of a batch.

    Args:
        encoders: By their side; a frozen one, whose vectors come with the batch, is not among
            them.
        roles: Which of them encodes queries and which documents.
        mini_batch: Texts that are encoded at a time, or None for all of a batch.
    """

    def __init__(
        self,
        encoders: Mapping[Role, Encoder],
        roles: Mapping[Role, Role],
        mini_batch: int | None = None,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({str(side): encoder for side, encoder in encoders.items()})
        self.roles = dict(roles)
        self.mini_batch = mini_batch

    def encoder(self, role: Role) -> Encoder:
        """Returns the encoder of a role."""
        encoder = self.encoders[self.roles[role]]
        assert isinstance(encoder, Encoder)
        return encoder

    def embed(self, role: Role, batch: Batch) -> Tensor:
        """Returns vectors float32 [n, d] of a batch: computed, or as a frozen encoder left them.

        Those that are computed have the native dimension and any norm.
        """
        if (stored := batch.get(f"{role}_vectors")) is not None:
            return stored
        ids, mask = batch[f"{role}_ids"], batch[f"{role}_mask"]
        return self.encoder(role).embed(ids, mask, self.mini_batch)

    @abstractmethod
    def forward(self, **batch: Tensor) -> Losses:
        """Returns `loss`, a scalar, and its parts by name."""


class Contrast(Objective):
    """InfoNCE with in-batch and hard negatives, over one dimension or several nested ones.

    Args:
        encoders: As for `Objective`.
        roles: As for `Objective`.
        mini_batch: As for `Objective`.
        temperature: Of the InfoNCE.
        learn_temperature: Whether the temperature is a parameter too; its logarithm is learned.
        dimensions: Nested dimensions; none for that of the encoder.
    """

    def __init__(
        self,
        encoders: Mapping[Role, Encoder],
        roles: Mapping[Role, Role],
        mini_batch: int | None = None,
        *,
        temperature: float,
        learn_temperature: bool = False,
        dimensions: tuple[int, ...] = (),
    ) -> None:
        super().__init__(encoders, roles, mini_batch)
        trained = next(iter(encoders.values()))
        self.dimensions = list(dimensions) or [trained.side.dimension]
        log_temperature = torch.tensor(temperature, dtype=torch.float64).log().float()
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=learn_temperature)

    def forward(self, **batch: Tensor) -> Losses:
        """Returns the loss of a batch of `PairCollator`."""
        queries = self.embed("query", batch)
        vectors, offset = everywhere(self.embed("document", batch))
        targets = batch["targets"] + offset
        excluded = known_positives(batch["positives"], everywhere(batch["documents"])[0], targets)
        temperature = self.log_temperature.exp()
        loss = matryoshka_info_nce(
            queries, vectors, self.dimensions, targets, temperature, excluded
        )
        parts = {"temperature": temperature} if self.log_temperature.requires_grad else {}
        return {"loss": loss, **parts}


class Alignment(Objective):
    """Stage I of CARE: L = λ₁ · InfoNCE(E_Q(x), E_D(x)) + λ₂ · ‖E_Q(x) − E_D(x)‖².

    Args:
        encoder: The query encoder; the document encoder's vectors come with the batch.
        mini_batch: As for `Objective`.
        contrastive: λ₁.
        mse: λ₂.
        kl: Weight of the divergence of `embedding_divergence`, which is no part of CARE.
        temperature: Of the InfoNCE and of the divergence.
    """

    def __init__(
        self,
        encoder: Encoder,
        mini_batch: int | None = None,
        *,
        contrastive: float,
        mse: float,
        kl: float = 0.0,
        temperature: float,
    ) -> None:
        super().__init__({"query": encoder}, {"query": "query"}, mini_batch)
        self.weights = {"contrastive": contrastive, "mse": mse, "kl": kl}
        self.temperature = temperature

    def forward(self, **batch: Tensor) -> Losses:
        """Returns the loss of a batch of `AlignCollator`."""
        student = unit(self.embed("query", batch), self.encoder("query").side.dimension)
        teachers, offset = everywhere(batch["teacher"])
        targets = torch.arange(len(student), device=student.device) + offset
        parts = {
            "contrastive": info_nce(student, teachers, targets, self.temperature),
            "mse": squared_distance(student, batch["teacher"]),
        }
        if self.weights["kl"]:
            parts["kl"] = embedding_divergence(student, batch["teacher"], self.temperature)
        # A weight of zero leaves a loss out altogether: 0 · ∞ is NaN.
        terms = [weight * parts[name] for name, weight in self.weights.items() if weight]
        return {"loss": torch.stack(terms).sum(), **parts}


class Distillation(Objective):
    """KL divergence from the teacher's scores and InfoNCE, as one loss.

    Args:
        encoders: As for `Objective`.
        roles: As for `Objective`.
        mini_batch: As for `Objective`.
        kl: Weight of the divergence.
        contrastive: Weight of the InfoNCE.
        temperature: Of the student's scores.
        teacher_temperature: Of the teacher's scores.
    """

    def __init__(
        self,
        encoders: Mapping[Role, Encoder],
        roles: Mapping[Role, Role],
        mini_batch: int | None = None,
        *,
        kl: float,
        contrastive: float,
        temperature: float,
        teacher_temperature: float,
    ) -> None:
        super().__init__(encoders, roles, mini_batch)
        self.weights = kl, contrastive
        self.temperatures = temperature, teacher_temperature

    def forward(self, **batch: Tensor) -> Losses:
        """Returns the loss of a batch of `PairCollator` with a teacher."""
        dimension = self.encoder("query").side.dimension
        queries = unit(self.embed("query", batch), dimension)
        vectors, offset = everywhere(unit(self.embed("document", batch), dimension))
        targets = batch["targets"] + offset
        excluded = known_positives(batch["positives"], everywhere(batch["documents"])[0], targets)
        kl, contrastive = self.weights
        divergence = score_divergence(
            queries,
            vectors,
            batch["teacher_queries"],
            everywhere(batch["teacher_documents"])[0],
            *self.temperatures,
            excluded,
        )
        nce = info_nce(queries, vectors, targets, self.temperatures[0], excluded)
        return {"loss": kl * divergence + contrastive * nce, "kl": divergence, "contrastive": nce}


def known_positives(positives: Tensor, documents: Tensor, targets: Tensor) -> Tensor:
    """Returns which documents of a batch are no negatives of which query.

    Args:
        positives: int64 [n, p], all positives of each query, padded with −1.
        documents: int64 [m], the documents of the batch.
        targets: int64 [n], the column of each query's own positive, which is not among them.

    Returns:
        bool [n, m].
    """
    known = torch.zeros(len(positives), len(documents), dtype=torch.bool, device=documents.device)
    for column in positives.T:
        known |= column[:, None] == documents[None, :]
    return known.scatter_(1, targets[:, None], False)
