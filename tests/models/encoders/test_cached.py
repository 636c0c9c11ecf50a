from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from core.encoders import Encoding
from models.encoders import cached
from models.encoders.cached import encode_cached, encode_texts
from tests.encoders import DIMENSION, BigramEncoder, make_spec

TEXTS = [f"第{i}份病历" + "，复查血压" * (i * 7 % 11) for i in range(50)]


class RecordingEncoder(BigramEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> Encoding:
        self.batches.append(list(texts))
        return super().encode(texts)


def test_rows_are_in_order_and_batches_have_texts_of_similar_length() -> None:
    encoder, counted = RecordingEncoder(), []
    vectors = encode_texts(encoder, TEXTS, 8, counted.append)
    np.testing.assert_array_equal(vectors, BigramEncoder().encode(TEXTS).vectors)
    lengths = [len(text) for batch in encoder.batches for text in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert counted == [len(batch) for batch in encoder.batches] == [8] * 6 + [2]


def test_no_texts_give_an_empty_array(tmp_path: Path) -> None:
    assert encode_texts(BigramEncoder(), []).shape == (0, DIMENSION)
    assert encode_cached(BigramEncoder, make_spec(), [], tmp_path).shape == (0, DIMENSION)


def never() -> BigramEncoder:
    raise AssertionError("the encoder is loaded")


def test_cached_shards_are_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "SHARD", 16)
    encoder, spec = BigramEncoder(), make_spec()
    expected = encoder.encode(TEXTS).vectors
    first = encode_cached(BigramEncoder, spec, TEXTS, tmp_path)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(encode_cached(never, spec, TEXTS, tmp_path), expected)

    # Only the damaged shard is encoded again.
    sorted(tmp_path.rglob("*.npy"))[1].write_bytes(b"cut off")
    encoder.texts_seen = 0
    again = encode_cached(lambda: encoder, spec, TEXTS, tmp_path)
    np.testing.assert_array_equal(again, expected)
    assert encoder.texts_seen in (16, len(TEXTS) % 16)


def test_another_spec_has_a_separate_cache(tmp_path: Path) -> None:
    encode_cached(BigramEncoder, make_spec(), TEXTS, tmp_path)
    encoder = BigramEncoder()
    encode_cached(lambda: encoder, make_spec("document"), TEXTS, tmp_path)
    assert encoder.texts_seen == len(TEXTS)
    assert len(list(tmp_path.iterdir())) == 2
