import numpy as np

from evaluation.dense import dense_run


def test_documents_are_ranked_by_cosine() -> None:
    documents = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)
    queries = np.array([[0, 1], [1, 0]], np.float32)
    run = dense_run(["q1", "q2"], queries, ["a", "b", "c"], documents, 2)
    assert {query: list(hits) for query, hits in run.items()} == {
        "q1": ["b", "c"],
        "q2": ["a", "c"],
    }
    assert run["q1"]["c"] == np.float32(0.8)
    assert len(dense_run(["q1"], queries[:1], ["a", "b", "c"], documents, 100)["q1"]) == 3


def test_excluded_documents_take_no_place() -> None:
    documents = np.array([[0.8, 0.6], [1, 0], [0, 1]], np.float32)
    queries = np.array([[1, 0], [1, 0]], np.float32)
    qrels = {"q1": {"a": 1, "b": -1}, "q2": {"b": 1, "c": -1}}
    run = dense_run(["q1", "q2"], queries, ["a", "b", "c"], documents, 1, qrels)
    assert {query: list(hits) for query, hits in run.items()} == {"q1": ["a"], "q2": ["b"]}
