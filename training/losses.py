"""The losses, as functions of vectors; all are computed in float32 or wider."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def l2_normalize(vectors: Tensor, dimension: int | None = None) -> Tensor:
    """Returns the first dimensions of vectors [n, m], scaled to unit L2 norm.

    Truncation comes before the scaling, as in `core.vectors`.
    """
    return functional.normalize(vectors[:, :dimension], dim=1)


def info_nce(
    queries: Tensor,
    documents: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    excluded: Tensor | None = None,
) -> Tensor:
    """InfoNCE (arXiv 1807.03748): the mean −log of the target's softmax over cosine / temperature.

    The vectors, [n, d] and [m, d], have unit norm; `targets`, int64 [n], are the rows of each
    query's positive; `excluded`, bool [n, m], are no negatives of a query, and never its target.
    """
    return functional.cross_entropy(_scores(queries, documents, temperature, excluded), targets)


def mse_loss(vectors: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over rows of ‖x − t‖², summed over dimensions; both [n, d]."""
    return (vectors - targets).square().sum(dim=1).mean()


def embedding_kl(vectors: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """KL(targets ‖ vectors) of the softmax over dimensions (KALE, arXiv 2304.01016).

    Both are [n, d], divided by the temperature before the softmax; returns the mean over rows.
    """
    logs, targets = ((x / temperature).log_softmax(dim=1) for x in (vectors, targets))
    return functional.kl_div(logs, targets, reduction="batchmean", log_target=True)


def matryoshka_info_nce(
    queries: Tensor,
    documents: Tensor,
    dimensions: Sequence[int],
    targets: Tensor,
    temperature: Tensor | float,
    excluded: Tensor | None = None,
) -> Tensor:
    """Mean of `info_nce` over nested dimensions (arXiv 2205.13147).

    Each term reads so many leading dimensions of the vectors [n, d] and [m, d], not scaled.
    """
    scaled = ((l2_normalize(queries, d), l2_normalize(documents, d)) for d in dimensions)
    terms = [info_nce(*vectors, targets, temperature, excluded) for vectors in scaled]
    return torch.stack(terms).mean()


def distillation_kl(
    queries: Tensor,
    documents: Tensor,
    teacher_queries: Tensor,
    teacher_documents: Tensor,
    temperature: float,
    teacher_temperature: float,
    excluded: Tensor | None = None,
) -> Tensor:
    """KL(teacher ‖ student) of the softmax of scores over the documents of a batch.

    The student's vectors are [n, d] and [m, d], the teacher's [n, e] and [m, e], all of unit
    norm. What is `excluded`, bool [n, m], counts for no query's distribution. Returns the mean
    over queries.
    """
    student = _scores(queries, documents, temperature, excluded).log_softmax(dim=1)
    teacher = _scores(teacher_queries, teacher_documents, teacher_temperature, excluded)
    teacher = teacher.log_softmax(dim=1)
    # 0 · (−∞ − −∞) is NaN: an excluded document adds nothing.
    terms = teacher.exp() * (teacher - student)
    return (terms if excluded is None else terms.masked_fill(excluded, 0.0)).sum(dim=1).mean()


def _scores(
    queries: Tensor, documents: Tensor, temperature: Tensor | float, excluded: Tensor | None
) -> Tensor:
    with torch.autocast(queries.device.type, enabled=False):
        scores = queries @ documents.T / temperature
    return scores if excluded is None else scores.masked_fill(excluded, float("-inf"))
