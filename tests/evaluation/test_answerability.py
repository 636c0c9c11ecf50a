import numpy as np
import pytest

from core.errors import CareError
from evaluation.answerability import auroc, fit
from search.answerable import answerable
from tests.errors import raises


def questions(mean: float, count: int, seed: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    values = rng.normal([mean, 0.0], 1.0, (count, 2))
    return [{"cosine": cosine, "lexical": lexical} for cosine, lexical in values.tolist()]


def test_the_fit_is_the_logistic_regression_of_two_normal_distributions() -> None:
    # Means 2 and 0 with variance 1: the log of the ratio of their densities is 2 x - 2.
    judge = fit(questions(2, 20_000, 0), questions(0, 5_000, 1), 9, 0.02)
    assert judge.intercept == pytest.approx(-2, abs=0.1)
    assert judge.weights == pytest.approx({"cosine": 2, "lexical": 0}, abs=0.1)


def test_the_threshold_refuses_the_stated_share() -> None:
    answered = questions(2, 1000, 0)
    judge = fit(answered, questions(0, 500, 1), 9, 0.05)
    scores = [answerable(judge, features) for features in answered]
    assert np.mean(np.array(scores) < judge.threshold) == pytest.approx(0.05, abs=0.002)


def test_sets_that_are_apart_have_finite_weights() -> None:
    judge = fit(questions(100, 60, 0), questions(-100, 60, 1), 9, 0.02)
    assert 0 < judge.weights["cosine"] < 1


def test_few_questions_are_an_error() -> None:
    with raises(CareError, "too_few_questions", queries=49, limit=50):
        fit(questions(2, 49, 0), questions(0, 60, 1), 9, 0.02)


def test_auroc_counts_pairs_and_half_of_the_ties() -> None:
    assert auroc([3, 2], [1, 0]) == 1
    assert auroc([1, 0], [3, 2]) == 0
    assert auroc([2, 1], [2, 0]) == (0.5 + 1 + 0 + 1) / 4
