from evaluation.index_search import ChannelHit
from evaluation.statistics import Difference
from evaluation.weights import WeightScore, best_weight, compare_weights, fused_run

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
