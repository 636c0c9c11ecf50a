from pathlib import Path

import numpy as np
import pytest

from core.types import Document
from evaluation.dense import dense_run, pair_run
from tests.conftest import make_records
from tests.encoders import make_pair


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


def test_a_document_has_the_cosine_of_its_best_chunk() -> None:
    chunks = np.array([[0.6, 0.8], [1, 0], [0.8, 0.6], [0, 1]], np.float32)
    query = np.array([[1, 0]], np.float32)
    run = dense_run(["q"], query, ["a", "a", "b", "c"], chunks, 2)
    assert run == {"q": {"a": 1.0, "b": np.float32(0.8)}}


@pytest.mark.usefixtures("test_encoders")
def test_both_encoders_of_a_pair_rank_the_documents_and_keep_the_vectors(tmp_path: Path) -> None:
    pair = make_pair()
    texts = [r["text"] for r in make_records(4)]
    documents = [Document(f"d{i}#0", text, parent=f"d{i}") for i, text in enumerate(texts)]
    queries = {f"q{i}": f" {text}\n" for i, text in enumerate(texts)}
    qrels = {"q0": {"d0": -1}}
    run = pair_run(pair, iter(documents), queries, qrels, 2, tmp_path)
    assert "d0" not in run["q0"] and {len(hits) for hits in run.values()} == {2}
    assert [next(iter(run[f"q{i}"])) for i in (1, 2, 3)] == ["d1", "d2", "d3"]
    assert len(list(tmp_path.rglob("*.npy"))) == 2
