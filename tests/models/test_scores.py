import math

import pytest

from models.evaluation.scores import score

QRELS = {"q1": {"a": 2, "b": 1}, "q2": {"c": 1}}


def test_a_perfect_run_scores_one() -> None:
    run = {"q1": {"a": 0.9, "b": 0.8, "x": 0.1}, "q2": {"c": 0.5}}
    assert score(QRELS, run) == {"nDCG@10": 1, "MRR@10": 1, "Recall@10": 1, "Recall@100": 1}


def test_scores_match_hand_computed_values() -> None:
    run = {"q1": {"x": 0.9, "b": 0.8, "a": 0.7}, "q2": {"x": 0.9, "c": 0.5}}
    ideal = 2 + 1 / math.log2(3)
    first = (1 / math.log2(3) + 2 / math.log2(4)) / ideal
    second = 1 / math.log2(3)
    values = score(QRELS, run)
    assert values["nDCG@10"] == pytest.approx((first + second) / 2)
    assert values["MRR@10"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert values["Recall@10"] == 1


def test_a_query_without_results_scores_zero_and_stays_in_the_denominator() -> None:
    values = score(QRELS, {"q1": {"a": 0.9, "b": 0.8}})
    assert values == {"nDCG@10": 0.5, "MRR@10": 0.5, "Recall@10": 0.5, "Recall@100": 0.5}


def test_equal_scores_are_ranked_by_descending_id() -> None:
    assert score({"q": {"b": 1}}, {"q": {"a": 0.5, "b": 0.5}})["MRR@10"] == 1
    assert score({"q": {"a": 1}}, {"q": {"a": 0.5, "b": 0.5}})["MRR@10"] == 0.5


def test_recall_counts_only_the_first_hits() -> None:
    run = {"q": {f"x{i:03d}": 1 - i / 100 for i in range(50)} | {"c": 0.05}}
    values = score({"q": {"c": 1}}, run)
    assert (values["Recall@10"], values["Recall@100"]) == (0, 1)
