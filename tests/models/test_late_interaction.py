import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from core.types import FloatArray
from models.late_interaction import (
    CODECS,
    Codec,
    _ward,
    bytes_per_token,
    decode_tokens,
    encode_tokens,
    max_sim,
    normalized,
    pool_tokens,
)


def tokens(count: int, dimension: int, seed: int = 0) -> FloatArray:
    values = np.random.default_rng(seed).standard_normal((count, dimension))
    return normalized(values.astype(np.float32))


def test_max_sim_by_hand() -> None:
    query = np.array([[1, 0], [0, 1]], dtype=np.float32)
    near = np.array([[0.8, 0.6], [-1, 0], [0.6, 0.8]], dtype=np.float32)
    far = np.array([[-1, 0]], dtype=np.float32)
    # The largest products are 0.8 and 0.8 with `near`, and -1 and 0 with `far`.
    np.testing.assert_allclose(max_sim(query, [near, far, near]), [0.8, -0.5, 0.8])
    assert max_sim(query, []).shape == (0,)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_clusters_are_those_of_scipy(count: int) -> None:
    vectors = tokens(40, 16)
    labels = fcluster(linkage(vectors, "ward"), count, "maxclust")
    expected = {frozenset(np.flatnonzero(labels == label).tolist()) for label in labels}
    assert {frozenset(rows) for rows in _ward(vectors, count)} == expected


def test_pooled_tokens_are_normalised_means() -> None:
    vectors = tokens(3, 8)
    (pooled,) = pool_tokens(vectors, 3)
    np.testing.assert_allclose(pooled, normalized(vectors.mean(axis=0)), atol=1e-6)
    assert len(pool_tokens(tokens(7, 8), 2)) == 4
    np.testing.assert_allclose(pool_tokens(vectors, 1), vectors, atol=1e-6)


# The lowest mean cosine of 64 normal dimensions: 1 bit has √(2/π), 2 bits √0.8825.
@pytest.mark.parametrize(
    ("codec", "least"), [("fp16", 0.999999), ("int8", 0.9995), ("2bit", 0.93), ("1bit", 0.78)]
)
def test_codecs_keep_directions(codec: Codec, least: float) -> None:
    vectors = tokens(200, 64)
    encoded = encode_tokens(vectors, codec)
    assert encoded.dtype == np.uint8
    assert encoded.shape == (200, bytes_per_token(64, codec))
    decoded = decode_tokens(encoded, codec)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(decoded, axis=1), 1, atol=1e-5)
    cosine = (vectors * decoded).sum(axis=1).mean()
    assert least < cosine <= 1.0001


def test_sizes_by_codec() -> None:
    assert [bytes_per_token(64, codec) for codec in CODECS] == [128, 64, 16, 8]
