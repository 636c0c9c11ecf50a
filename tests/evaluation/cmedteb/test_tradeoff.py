import pytest

from evaluation.cmedteb.tradeoff import is_asymmetric
from models.pairs import load_pair

pytestmark = pytest.mark.train


def test_a_pair_of_two_models_is_asymmetric() -> None:
    pairs = [load_pair(name) for name in ("care-mini", "qwen3-embedding-4b", "bge-m3")]
    assert [is_asymmetric(pair) for pair in pairs] == [True, False, False]
