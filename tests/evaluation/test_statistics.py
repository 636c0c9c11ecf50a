import math

import numpy as np
import pytest

from evaluation.statistics import (
    Decision,
    Interval,
    decide,
    mean_interval,
    paired_difference,
    pearson_difference,
    pearson_interval,
    rank_correlation,
)

# Averages of CMedQA and of the new tasks per model, from the paper (arXiv 2604.10937).
CMEDQA_AND_NEW = {
    "gte-multilingual-base": (86.76, 60.57),
    "gte-base-zh": (86.99, 59.22),
    "gte-large-zh": (86.28, 50.49),
    "gte-Qwen2-1.5B": (88.14, 60.31),
    "gte-Qwen2-7B": (88.76, 58.23),
    "bge-small": (78.63, 49.49),
    "bge-base": (82.68, 51.37),
    "bge-large": (84.45, 57.75),
    "bge-m3": (78.45, 54.16),
    "Conan-v1": (90.56, 58.78),
    "stella-base": (88.71, 60.39),
    "Qwen3-Embedding-0.6B": (80.71, 60.12),
    "Qwen3-Embedding-4B": (84.75, 64.43),
    "Qwen3-Embedding-8B": (86.26, 64.52),
}


def test_the_papers_rank_correlation_follows_from_its_numbers() -> None:
    old, new = zip(*CMEDQA_AND_NEW.values(), strict=True)
    rho, p = rank_correlation(old, new)
    assert round(rho, 3) == 0.354
    assert round(p, 3) == 0.215


def test_an_interval_of_a_mean_matches_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.2, 2000)
    interval = mean_interval(list(values))
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_intervals_are_the_same_each_time() -> None:
    assert mean_interval([0.1, 0.5, 0.9]) == mean_interval([0.1, 0.5, 0.9])


def test_an_empty_list_is_an_error() -> None:
    with pytest.raises(ValueError):
        mean_interval([])


def test_equal_systems_do_not_differ() -> None:
    difference = paired_difference([0.2, 0.4, 0.9], [0.2, 0.4, 0.9])
    assert (difference.value, difference.low, difference.high, difference.p) == (0, 0, 0, 1)


def test_p_of_a_few_queries_is_exact() -> None:
    # Of the 2^5 sign patterns only all-plus and all-minus reach the observed mean.
    difference = paired_difference([1.0] * 5, [0.0] * 5)
    assert difference.value == 1
    assert difference.p == pytest.approx(2 / 32, abs=0.01)


def test_p_is_uniform_for_equal_systems() -> None:
    rng = np.random.default_rng(2)
    below = sum(paired_difference(rng.random(60), rng.random(60)).p < 0.1 for _ in range(100))
    assert 2 <= below <= 20


def test_pearson_matches_its_definition() -> None:
    x, y = [1.0, 2.0, 3.0, 4.0, 6.0], [0.1, 0.3, 0.2, 0.6, 0.5]
    interval = pearson_interval(x, y)
    assert interval.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert interval.low < interval.value < interval.high


def test_different_correlations_are_significant() -> None:
    rng = np.random.default_rng(3)
    truth = list(rng.integers(0, 2, 400).astype(float))
    good = [t + rng.normal(0, 0.3) for t in truth]
    bad = [t + rng.normal(0, 2) for t in truth]
    difference = pearson_difference(truth, good, bad)
    assert difference.low > 0
    assert difference.p < 0.01
    assert pearson_difference(truth, good, good).p == 1


def test_an_interval_decides_a_difference() -> None:
    def verdict(low: float, high: float) -> str:
        return decide(Interval((low + high) / 2, low, high), 700, 0.01).verdict

    assert verdict(0.002, 0.008) == verdict(0.02, 0.05) == "higher"
    assert verdict(-0.05, -0.02) == "lower"
    assert verdict(-0.009, 0.01) == "equal"
    assert verdict(-0.011, 0.001) == verdict(-0.001, 0.011) == verdict(-0.1, 0.1) == "undecided"


def test_an_undecided_difference_names_the_items_that_decide_it() -> None:
    # 0.02 ± 0.04 is above 0 with four times as many items; 0 ± 0.02 is within ± 0.01 with as many.
    assert decide(Interval(0.02, -0.02, 0.06), 700, 0.01) == Decision("undecided", 2800)
    assert decide(Interval(0.0, -0.02, 0.02), 700, 0.01) == Decision("undecided", 2800)
    # The nearer of the two decides: 0.004 ± 0.012 is equal sooner than higher.
    assert decide(Interval(0.004, -0.008, 0.016), 700, 0.01) == Decision("undecided", 2800)
