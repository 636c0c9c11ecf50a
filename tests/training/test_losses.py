import math

import numpy as np
import pytest
import torch
from torch import Tensor

from training.losses import (
    distillation_kl,
    embedding_kl,
    info_nce,
    l2_normalize,
    matryoshka_info_nce,
    mse_loss,
)
from training.objectives import known_positives

pytestmark = pytest.mark.train

# Cosines 1 and 0.6 for the first query, 0 and 0.8 for the second.
QUERIES = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
DOCUMENTS = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
TARGETS = torch.tensor([0, 1])


def random_units(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return l2_normalize(torch.randn(rows, width, generator=generator))


def reference(queries: Tensor, documents: Tensor, targets: Tensor, temperature: float) -> float:
    """Returns InfoNCE in float64, computed query by query."""
    scores = queries.double().numpy() @ documents.double().numpy().T / temperature
    terms = [
        np.log(np.exp(row - row.max()).sum()) + row.max() - row[target]
        for row, target in zip(scores, targets.tolist(), strict=True)
    ]
    return float(np.mean(terms))


def test_info_nce_by_hand() -> None:
    first = math.log(1 + math.exp((0.6 - 1) / 0.5))
    second = math.log(1 + math.exp((0 - 0.8) / 0.5))
    loss = info_nce(QUERIES, DOCUMENTS, TARGETS, 0.5)
    assert float(loss) == pytest.approx((first + second) / 2, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
def test_info_nce_agrees_with_float64(temperature: float) -> None:
    queries, documents = random_units(16, 24, 0), random_units(40, 24, 1)
    targets = torch.arange(16) * 2
    loss = info_nce(queries, documents, targets, temperature)
    assert float(loss) == pytest.approx(
        reference(queries, documents, targets, temperature), rel=1e-5
    )


def test_excluded_documents_are_not_negatives() -> None:
    queries, documents = random_units(3, 8, 0), random_units(4, 8, 1)
    targets = torch.tensor([0, 1, 2])
    excluded = torch.zeros(3, 4, dtype=torch.bool)
    excluded[:, 3] = True
    loss = info_nce(queries, documents, targets, 0.1, excluded)
    assert float(loss) == pytest.approx(float(info_nce(queries, documents[:3], targets, 0.1)))


def test_known_positives_exclude_the_target() -> None:
    positives = torch.tensor([[7, 9], [9, -1]])
    known = known_positives(positives, torch.tensor([7, 9, 5]), torch.tensor([0, 1]))
    assert known.tolist() == [[False, True, False], [False, False, False]]


def test_mse_loss_is_summed_over_dimensions() -> None:
    vectors = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    targets = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    assert float(mse_loss(vectors, targets)) == (1 + 4 + 9) / 2


def test_matryoshka_scales_after_truncation() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(6, 16, generator=generator)
    documents = torch.randn(6, 16, generator=generator)
    targets = torch.arange(6)
    expected = [
        reference(
            torch.nn.functional.normalize(queries[:, :d].double(), dim=1),
            torch.nn.functional.normalize(documents[:, :d].double(), dim=1),
            targets,
            0.05,
        )
        for d in (4, 8, 16)
    ]
    loss = matryoshka_info_nce(queries, documents, [4, 8, 16], targets, 0.05)
    assert float(loss) == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_distillation_kl_by_hand() -> None:
    # Teacher: softmax of (1, 0.6) / 0.5; student: softmax of (0, 0.8) / 0.5.
    teacher = np.exp([2.0, 1.2]) / np.exp([2.0, 1.2]).sum()
    student = np.exp([0.0, 1.6]) / np.exp([0.0, 1.6]).sum()
    expected = float((teacher * np.log(teacher / student)).sum())
    loss = distillation_kl(QUERIES[1:], DOCUMENTS, QUERIES[:1], DOCUMENTS, 0.5, 0.5)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_distillation_kl_is_zero_for_equal_scores_and_finite_with_exclusions() -> None:
    queries, documents = random_units(4, 8, 0).requires_grad_(), random_units(6, 8, 1)
    excluded = torch.zeros(4, 6, dtype=torch.bool)
    excluded[:, 5] = True
    same = distillation_kl(queries, documents, queries.detach(), documents, 0.1, 0.1, excluded)
    assert same.item() == pytest.approx(0, abs=1e-6)
    other = distillation_kl(
        queries, documents, random_units(4, 8, 2), documents, 0.1, 0.1, excluded
    )
    other.backward()
    assert queries.grad is not None
    assert torch.isfinite(queries.grad).all()
    assert other.item() > 0.01


def test_losses_are_float32_under_autocast() -> None:
    queries, documents = random_units(8, 16, 0), random_units(8, 16, 1)
    targets = torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = info_nce(queries, documents, targets, 0.01)
    assert float(inside) == float(info_nce(queries, documents, targets, 0.01))


def test_embedding_kl_uses_the_softmax_over_dimensions() -> None:
    torch.manual_seed(1)
    student, teacher = (l2_normalize(torch.randn(3, 5, dtype=torch.float64)) for _ in range(2))
    p, q = (np.exp(x.numpy() / 0.1) for x in (teacher, student))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    expected = (p * np.log(p / q)).sum(axis=1).mean()
    assert float(embedding_kl(student, teacher, 0.1)) == pytest.approx(expected)
    assert float(embedding_kl(teacher, teacher, 0.1)) == pytest.approx(0)
