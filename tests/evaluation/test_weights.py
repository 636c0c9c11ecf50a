from pytest import approx

from evaluation.beir import Qrels, Run
from evaluation.index_search import ChannelHit
from evaluation.statistics import Difference
from evaluation.weights import (
    MinScoreSuggestion,
    WeightScore,
    best_weight,
    compare_weights,
    fused_run,
    suggest_min_score,
)

# Full text knows the answer of half of the queries.
FOUND = {
    f"q{n}": [ChannelHit("other", 0.9, 0.0), ChannelHit("answer", 0.8, 0.5 * (n % 2))]
    for n in range(40)
}
QRELS = {id_: {"answer": 1} for id_ in FOUND}


def test_a_document_has_the_score_of_its_best_chunk() -> None:
    hits = [ChannelHit("a", 0.5, 0.0), ChannelHit("b", 0.25, 1.0), ChannelHit("b", 0.25, 0.5)]
    assert fused_run({"q": hits, "none": []}, 0.5) == {"q": {"a": 0.5, "b": 0.75}, "none": {}}


def test_weights_are_compared_with_dense() -> None:
    low, high = compare_weights(QRELS, FOUND, [0.1, 0.3])
    assert (low.weight, low.difference.value) == (0.1, 0)
    assert high.difference.value > high.difference.low > 0
    assert high.ndcg - low.ndcg == high.difference.value
    assert best_weight([low, high]) == 0.3
    assert best_weight([low]) is None


def test_a_weight_must_be_better_than_dense_by_its_interval() -> None:
    sure = WeightScore(0.1, 0.5, Difference(0.01, 0.001, 0.02, 0.01))
    unsure = WeightScore(0.2, 0.6, Difference(0.1, -0.01, 0.2, 0.06))
    assert best_weight([unsure, sure]) == 0.1
    assert best_weight([unsure]) is None


def judged(count: int) -> tuple[Qrels, Run]:
    """Queries with a relevant hit at 0.90, 0.89, … and another at 0.30 below it."""
    qrels = {f"q{i}": {"good": 1, "bad": 0} for i in range(count)}
    run = {f"q{i}": {"good": 0.9 - i / 100, "other": 0.6 - i / 100} for i in range(count)}
    return qrels, run


def test_the_threshold_keeps_95_percent_of_the_relevant_hits() -> None:
    # Relevant: 0.90 … 0.51; 38 of 40 are at least 0.53. Others: 0.60 … 0.21; 8 are at least 0.53.
    assert suggest_min_score(*judged(40)) == MinScoreSuggestion(
        min_score=0.53,
        relevant_kept=0.95,
        others_dropped=approx(32 / 40),
        empty_queries=2,
        queries=40,
    )


def test_the_threshold_is_rounded_down() -> None:
    qrels = {f"q{i}": {"d": 2} for i in range(20)}
    run = {query: {"d": 0.712379} for query in qrels}
    suggestion = suggest_min_score(qrels, run)
    assert suggestion
    assert (suggestion.min_score, suggestion.relevant_kept) == (0.7123, 1.0)
    assert (suggestion.others_dropped, suggestion.empty_queries) == (0.0, 0)


def test_hits_below_rank_10_do_not_count() -> None:
    qrels, run = judged(20)
    deep = {f"d{i}": 0.1 for i in range(9)} | {"late": 0.01}
    deep_run = {query: scores | deep for query, scores in run.items()}
    deep_qrels = {query: grades | {"late": 1} for query, grades in qrels.items()}
    found, expected = suggest_min_score(deep_qrels, deep_run), suggest_min_score(qrels, run)
    assert found and expected
    assert found.min_score == expected.min_score


def test_too_few_judged_queries_give_no_suggestion() -> None:
    qrels, run = judged(20)
    assert suggest_min_score(qrels, run)
    del run["q0"]  # a query without hits
    assert suggest_min_score(qrels, run) is None
    assert suggest_min_score(*judged(19)) is None
    assert suggest_min_score({q: {"good": 0} for q in qrels}, run) is None


def test_excluded_hits_do_not_count_for_a_threshold() -> None:
    qrels, run = judged(20)
    before = suggest_min_score(qrels, run)
    for query in qrels:
        qrels[query]["excluded"] = -1
        run[query]["excluded"] = 0.95
    assert suggest_min_score(qrels, run) == before
