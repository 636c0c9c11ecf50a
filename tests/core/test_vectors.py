import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from core.errors import VectorError
from core.types import FloatArray
from core.vectors import truncate_normalize
from tests.errors import raises

MAX_FLOAT = float(np.finfo(np.float32).max)


def vectors(limit: float) -> st.SearchStrategy[FloatArray]:
    """Draws up to 5 vectors of 1 to 12 dimensions with elements of at most `limit`."""
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=12)
    elements = st.floats(-limit, limit, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, shapes, elements=elements)


def cut(array: FloatArray, data: st.DataObject) -> int:
    """Draws a dimension for truncation at which no vector is zero."""
    dimension = data.draw(st.integers(1, array.shape[1]))
    assume(array[:, :dimension].any(axis=1).all())
    return dimension


@pytest.mark.e2e
@given(vectors(MAX_FLOAT), st.data())
def test_vectors_have_unit_norm_for_any_input_norm(array: FloatArray, data: st.DataObject) -> None:
    unit = truncate_normalize(array, cut(array, data))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    assert unit.dtype == np.float32
    assert unit.flags.c_contiguous


@given(vectors(1e6), st.data())
def test_vectors_are_truncated_then_normalised(array: FloatArray, data: st.DataObject) -> None:
    dimension = cut(array, data)
    kept = array[:, :dimension].astype(np.float64)
    expected = kept / np.sqrt((kept**2).sum(axis=1))[:, None]
    np.testing.assert_allclose(truncate_normalize(array, dimension), expected, atol=1e-6)


@given(vectors(1e6), st.data(), st.integers(-40, 40))
def test_the_result_does_not_depend_on_the_scale(
    array: FloatArray, data: st.DataObject, exponent: int
) -> None:
    array = np.where(np.abs(array) < 1e-6, 0, array)
    dimension = cut(array, data)
    scaled = np.ldexp(array, exponent)
    np.testing.assert_array_equal(
        truncate_normalize(scaled, dimension), truncate_normalize(array, dimension)
    )


@pytest.mark.e2e
@given(vectors(1e6), st.data())
def test_truncation_in_two_steps_equals_one_step(array: FloatArray, data: st.DataObject) -> None:
    dimension = cut(array, data)
    between = data.draw(st.integers(dimension, array.shape[1]))
    array = np.where(np.abs(array) < 1e-3, 1e-3, array)
    twice = truncate_normalize(truncate_normalize(array, between), dimension)
    np.testing.assert_allclose(twice, truncate_normalize(array, dimension), atol=1e-5)


@pytest.mark.parametrize("bad", [0, np.nan, np.inf, -np.inf])
def test_a_zero_or_infinite_vector_is_an_error_that_names_the_row(bad: float) -> None:
    array = np.ones((3, 4), dtype=np.float32)
    array[1, :2] = bad
    with raises(VectorError, "not_finite", row=1):
        truncate_normalize(array, 2)


@pytest.mark.parametrize("shape", [(2, 3), (4,)])
def test_vectors_with_too_few_dimensions_are_an_error(shape: tuple[int, ...]) -> None:
    with raises(VectorError, "too_few_dimensions", dimension=4):
        truncate_normalize(np.ones(shape, dtype=np.float32), 4)
