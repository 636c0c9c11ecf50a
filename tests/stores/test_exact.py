import numpy as np
import pytest

from stores.exact import exact_search


@pytest.mark.parametrize("chunk", [1, 7, 500, 16_384])
def test_hits_equal_those_of_a_full_sort(chunk: int) -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((500, 16), dtype=np.float32)
    queries = generator.standard_normal((30, 16), dtype=np.float32)
    chunks = ((first, vectors[first : first + chunk]) for first in range(0, 500, chunk))
    scores, rows = exact_search(queries, chunks, 9)
    products = queries @ vectors.T
    expected = np.argsort(-products, axis=1)[:, :9]
    assert (rows == expected).all()
    np.testing.assert_allclose(scores, np.take_along_axis(products, expected, 1), atol=1e-5)


def test_fewer_vectors_than_k_are_padded() -> None:
    vectors = np.eye(3, dtype=np.float32)
    scores, rows = exact_search(vectors[:1], vectors, 5)
    assert rows[0, 0] == 0
    assert set(rows[0, 1:3].tolist()) == {1, 2}
    assert rows[0, 3:].tolist() == [-1, -1]
    assert scores[0, 3:].tolist() == [-np.inf, -np.inf]
