import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.canaries import (
    canary_candidates,
    canary_vectors,
    check_canaries,
    choose_canaries,
    make_canaries,
)
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.manifest import Canary
from tests.conftest import make_records
from tests.encoders import BigramEncoder
from tests.errors import raises

TEXTS = [record["text"] for record in make_records(32)]


def canaries_of(encoder: BigramEncoder) -> list[Canary]:
    return make_canaries(TEXTS, encoder.encode(TEXTS).vectors)


@given(st.integers(1, 10**9))
def test_candidate_rows_are_distinct_and_evenly_spaced(count: int) -> None:
    rows = canary_candidates(count)
    assert len(rows) == min(count, 256)
    assert rows[0] == 0
    assert rows[-1] < count
    steps = np.diff([*rows, count])
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=256))
def test_the_shortest_neighbours_become_canaries(lengths: list[int]) -> None:
    chosen = choose_canaries(lengths)
    assert len(chosen) == min(len(lengths), 16)
    assert chosen == sorted(set(chosen))
    assert min(lengths) in [lengths[i] for i in chosen]


def test_the_first_shortest_of_sixteen_neighbours_is_the_canary() -> None:
    lengths = [9, 5, 7, 8, 6, 5, 9, 9, 8, 8, 8, 7, 6, 5, 7, 9] * 16
    assert choose_canaries(lengths) == list(range(1, 256, 16))


def test_canary_vectors_round_trip_exactly() -> None:
    vectors = BigramEncoder().encode(TEXTS).vectors
    np.testing.assert_array_equal(canary_vectors(make_canaries(TEXTS, vectors)), vectors)


def test_an_encoder_of_the_same_space_retrieves_the_canaries() -> None:
    check_canaries(BigramEncoder("query"), canaries_of(BigramEncoder("document")))


def test_an_encoder_of_another_space_is_an_error_regardless_of_its_spec() -> None:
    liar = BigramEncoder(space="other-9", claims="bigrams-1")
    with raises(EmbeddingSpaceError, "canaries_not_found"):
        check_canaries(liar, canaries_of(BigramEncoder("document")))


@pytest.mark.parametrize(("foreign", "accepted"), [(16, True), (17, False)])
def test_at_least_half_of_the_canaries_must_be_retrieved(foreign: int, accepted: bool) -> None:
    encoder = BigramEncoder()
    vectors = encoder.encode(TEXTS).vectors
    vectors[:foreign] = -vectors[:foreign]
    canaries = make_canaries(TEXTS, vectors)
    if accepted:
        check_canaries(encoder, canaries)
    else:
        with raises(EmbeddingSpaceError, "canaries_not_found"):
            check_canaries(encoder, canaries)


def test_other_dimensions_are_an_error() -> None:
    canaries = make_canaries(["a"], np.ones((1, 3), dtype=np.float32))
    with raises(EmbeddingSpaceError, "dimension_mismatch", index=3, encoder=64):
        check_canaries(BigramEncoder(), canaries)


@pytest.mark.parametrize("vector", ["a", "AAAA", base64.b64encode(bytes(8)).decode()])
def test_damaged_canaries_are_an_error(vector: str) -> None:
    canaries = [*canaries_of(BigramEncoder()), Canary(text="a", vector=vector)]
    with raises(IndexVersionError, "bad_canaries"):
        canary_vectors(canaries)
