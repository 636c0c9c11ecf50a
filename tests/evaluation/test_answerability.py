import numpy as np
import pytest

from core.encoders import Answerability
from core.errors import CareError
from evaluation.answerability import Case, auroc, cross_validated, fit, shares
from search.answerable import answerable
from tests.errors import raises


def questions(
    mean: float, count: int, *, answered: bool, name: str = "", vectors: int = 9
) -> list[Case]:
    rng = np.random.default_rng(count)
    values = rng.normal([mean, 0.0], 1.0, (count, 2)).tolist()
    features = (
        {"cosine": cosine, "overlap": overlap, "length": overlap + 1, "size": 3.0}
        for cosine, overlap in values
    )
    return [Case(name, f"{i}", vectors, answered, each) for i, each in enumerate(features)]


def refused(judge: Answerability, cases: list[Case]) -> float:
    scores = [answerable(judge, case.features) for case in cases]
    return float(np.mean(np.array(scores) < judge.threshold))


def test_the_fit_is_the_logistic_regression_of_two_normal_distributions() -> None:
    # Means 2 and 0 with variance 1: the log of the ratio of their densities is 2 x - 2.
    cases = questions(2, 20_000, answered=True) + questions(0, 5_000, answered=False)
    judge = fit(cases, (1, 9), 0.02)
    assert judge.intercept == pytest.approx(-2, abs=0.1)
    assert judge.weights == pytest.approx({"cosine": 2, "overlap": 0}, abs=0.1)
    assert judge.vectors == (1, 9)


def test_sets_weigh_the_same_whatever_their_number() -> None:
    few = questions(0.5, 100, answered=True, name="keywords")
    many = questions(4, 3_000, answered=True, name="sentences")
    other = questions(0, 500, answered=False)
    judge = fit([*few, *many, *other], (1, 9), 0.05)
    assert (refused(judge, few) + refused(judge, many)) / 2 == pytest.approx(0.05, abs=0.006)
    assert refused(judge, few) > 0.08
    assert "length" in judge.weights
    assert "length" not in fit([*few, *other], (1, 9), 0.05).weights  # only a writer's manner


def test_each_question_is_judged_by_what_is_fitted_on_others() -> None:
    asked = questions(2, 500, answered=True) + questions(0, 400, answered=False)
    unknown = [case._replace(answered=None, name="unknown") for case in asked[:50]]
    cases = [*asked, *unknown]
    scores, thresholds = cross_validated(cases, 0.02)
    judge = fit(cases, (1, 9), 0.02)
    whole = [answerable(judge, case.features) for case in cases]
    assert scores == pytest.approx(whole, abs=0.1)
    assert (scores != whole).all()
    assert len(set(thresholds)) == 5
    assert scores[900:] == pytest.approx(scores[:50])  # they are the same questions
    found = {each.name: each for each in shares("dense", cases, scores, thresholds, None)}
    assert found["unknown"].queries == 50
    assert found["unknown"].auroc == pytest.approx(0.5, abs=0.1)


def test_sets_that_are_apart_have_finite_weights() -> None:
    cases = questions(100, 60, answered=True) + questions(-100, 61, answered=False)
    assert 0 < fit(cases, (1, 9), 0.02).weights["cosine"] < 1


def test_few_questions_are_an_error() -> None:
    with raises(CareError, "too_few_questions", queries=49, limit=50):
        fit(questions(2, 49, answered=True) + questions(0, 60, answered=False), (1, 9), 0.02)


def test_auroc_counts_pairs_and_half_of_the_ties() -> None:
    assert auroc([3, 2], [1, 0]) == 1
    assert auroc([1, 0], [3, 2]) == 0
    assert auroc([2, 1], [2, 0]) == (0.5 + 1 + 0 + 1) / 4
