import numpy as np

from core.errors import CareError
from core.types import FloatArray
from evaluation.late_interaction import (
    Candidates,
    Weights,
    choose_weights,
    find_candidates,
    late_scores,
    rerank,
    table,
)
from models.late_interaction import normalized
from tests.errors import raises

QUERIES = {"q1": "高血压饮食", "q2": "骨折固定", "q3": "发烧用药"}
DOCUMENTS = {"d1": "高血压患者少盐饮食", "d2": "骨折以后先固定", "d3": "发烧多喝水", "d4": "头痛"}
QRELS = {"q1": {"d1": 1}, "q2": {"d2": 1}}
TUNING = {"q3": {"d3": 1}}


def one_hot(*rows: int) -> FloatArray:
    return np.eye(8, dtype=np.float32)[list(rows)]


def test_candidates_are_the_nearest_and_those_of_bm25() -> None:
    # Each query's nearest document is d4; BM25 finds the relevant one.
    vectors, stored = one_hot(3, 3, 3), one_hot(0, 1, 2, 3)
    found = find_candidates(QUERIES, vectors, DOCUMENTS, stored, depth=1)
    assert {id_: c.ids for id_, c in found.items()} == {
        "q1": ["d4", "d1"],
        "q2": ["d4", "d2"],
        "q3": ["d4", "d3"],
    }
    for candidates in found.values():
        np.testing.assert_allclose(candidates.cosines, [1, 0])
        np.testing.assert_allclose(candidates.bm25, [0, 1])


def test_the_score_is_the_weighted_sum() -> None:
    known = {"q": Candidates(["a", "b"], np.float32([0.5, 0.25]), np.float32([0, 1]))}
    late = {"q": np.float32([0, 0.5])}
    assert rerank(known, late, Weights(2, 0.5)) == {"q": {"a": 0.5, "b": 1.75}}
    better = [Weights(0, 0), Weights(1, 0), Weights(2, 0)]
    assert choose_weights({"q": {"b": 1}}, known, late, better) == Weights(1, 0)
    assert choose_weights({"q": {"a": 1}}, known, late, better) == Weights(0, 0)


def test_the_table_has_sizes_and_gains() -> None:
    ids = list(DOCUMENTS)
    # The cosine ranks the relevant document last; its tokens are those of the query.
    candidates = {
        query: Candidates(
            ids, np.float32([0.1 if id_ == f"d{query[1]}" else 0.2 for id_ in ids]), np.zeros(4)
        )
        for query in QUERIES
    }
    queries = {f"q{n + 1}": one_hot(n) for n in range(3)}
    rng = np.random.default_rng(0)
    noise = normalized(rng.standard_normal((4, 3, 8)).astype(np.float32) * [0, 0, 0, 0, 1, 1, 1, 1])
    documents = {id_: np.concatenate([one_hot(n), noise[n]]) for n, id_ in enumerate(ids)}
    rows = list(table(QRELS, TUNING, candidates, queries, documents, [1, 4], ["fp16", "1bit"]))
    assert [(row.ranking, row.pooling, row.codec) for row in rows[:4]] == [
        ("dense", 1, ""),
        ("dense, BM25", 1, ""),
        ("dense, late", 1, "fp16"),
        ("dense, late, BM25", 1, "fp16"),
    ]
    assert [row.bytes_per_passage for row in rows[2::2]] == [64, 4, 16, 1]
    dense, late = rows[0], rows[2]
    assert dense.gain.value == 0
    assert late.ndcg == 1
    assert late.weights.late > 0
    np.testing.assert_allclose(late.gain.value, 1 - dense.ndcg)
    with raises(CareError, "queries_overlap", id="q1"):
        list(table(QRELS, QRELS, candidates, queries, documents, [1], ["fp16"]))


def test_stored_tokens_are_compared_in_float32() -> None:
    candidates = {"q": Candidates(["a"], np.zeros(1), np.zeros(1))}
    tokens = one_hot(0).astype(np.float16)
    (score,) = late_scores(candidates, {"q": tokens}, {"a": tokens})["q"]
    assert score == 1
    assert score.dtype == np.float32
