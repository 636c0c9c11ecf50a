from pathlib import Path

import numpy as np
import pytest

from core.encoders import Pair
from models.encoders.cached import encode_cached
from models.pairs import load_pair
from tests.evaluation.cmedteb.data import TOPICS, CharacterEncoder


@pytest.fixture
def pair() -> Pair:
    return load_pair("care-mini")


def test_a_damaged_shard_is_encoded_again(tmp_path: Path, pair: Pair) -> None:
    encoder = CharacterEncoder(pair.query)
    first = encode_cached(lambda: encoder, encoder.spec, TOPICS, tmp_path, batch_size=2, label="x")
    (shard,) = tmp_path.glob("*/*.npy")
    shard.write_bytes(shard.read_bytes()[:100])
    again = encode_cached(lambda: encoder, encoder.spec, TOPICS, tmp_path, batch_size=2, label="x")
    assert np.array_equal(first, again)
    assert len(encoder.texts) == 10


def test_another_prompt_has_a_separate_cache(tmp_path: Path, pair: Pair) -> None:
    spec = pair.query.model_copy(update={"prompt": "问："})
    first = encode_cached(
        lambda: CharacterEncoder(pair.query), pair.query, TOPICS, tmp_path, batch_size=2, label="x"
    )
    second = encode_cached(
        lambda: CharacterEncoder(spec), spec, TOPICS, tmp_path, batch_size=2, label="x"
    )
    assert not np.allclose(first, second)
