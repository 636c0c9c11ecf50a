"""Training losses as functions of vectors, computed in float32 or wider."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def l2_normalize(vectors: Tensor, dimension: int | None = None) -> Tensor:
    """Truncates vectors [n, m] to [n, dimension], then scales them to unit L2 norm.

    The order is that of `core.vectors`. Without `dimension` nothing is truncated.
    """
    return functional.normalize(vectors[:, :dimension], dim=1)


def info_nce(
    queries: Tensor,
    documents: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
    excluded: Tensor | None = None,
) -> Tensor:
    """InfoNCE (arXiv 1807.03748, equation 4), with cosine / temperature as score.

    L = −1/n · Σᵢ log(exp(sᵢₜ) / Σⱼ exp(sᵢⱼ)), where t is the target of query i.

    Args:
        queries: [n, d], unit norm.
        documents: [m, d], unit norm.
        targets: int64 [n], row of each query's positive in `documents`.
        temperature: Divisor of the cosines.
        excluded: bool [n, m], documents that are not negatives of a query; never its target.

    Returns:
        The mean over queries, a scalar.
    """
    return functional.cross_entropy(_scores(queries, documents, temperature, excluded), targets)


def mse_loss(vectors: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over rows of ‖x − t‖², the squared L2 distance; both are [n, d]."""
    return (vectors - targets).square().sum(dim=1).mean()


def embedding_kl(vectors: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """KL(targets ‖ vectors) between softmax distributions over dimensions (KALE, arXiv 2304.01016).

    Both are [n, d] and are divided by the temperature before the softmax. Returns the mean over
    rows, a scalar.
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
    """Mean of `info_nce` over nested dimensions (Matryoshka, arXiv 2205.13147, equation 1).

    Each term truncates the vectors, [n, d] and [m, d] of any norm, to one of `dimensions` and
    normalises them. The other arguments are those of `info_nce`. Returns a scalar.
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
    """KL(teacher ‖ student) between softmax distributions over the documents of a batch.

    Scores are cosines divided by a temperature. The student's vectors are [n, d] and [m, d], the
    teacher's [n, e] and [m, e], all of unit norm. Documents in `excluded`, bool [n, m], are not
    part of a query's distributions. Returns the mean over queries, a scalar.
    """
    student = _scores(queries, documents, temperature, excluded).log_softmax(dim=1)
    teacher = _scores(teacher_queries, teacher_documents, teacher_temperature, excluded)
    teacher = teacher.log_softmax(dim=1)
    # The term of an excluded document is 0 · (−∞ − −∞), which is NaN.
    terms = teacher.exp() * (teacher - student)
    return (terms if excluded is None else terms.masked_fill(excluded, 0.0)).sum(dim=1).mean()


def _scores(
    queries: Tensor, documents: Tensor, temperature: Tensor | float, excluded: Tensor | None
) -> Tensor:
    with torch.autocast(queries.device.type, enabled=False):
        scores = queries @ documents.T / temperature
    return scores if excluded is None else scores.masked_fill(excluded, float("-inf"))
