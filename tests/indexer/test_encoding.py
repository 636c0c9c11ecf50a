from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from core.choices import Backend, Dtype
from core.encoders import Encoding
from core.errors import TextRejectedError, VectorError
from core.manifest import Chunking
from core.shards import complete_shards
from core.text import document_text
from core.types import FloatArray
from indexer.build import encode
from models.encoders.factory import default_batch_size
from tests.conftest import make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import BATCH_SIZE, SHARD_SIZE
from tests.indexer.conftest import OptionsMaker

BACKENDS = [name for name in get_args(Backend) if name != "auto"]
DTYPES = get_args(Dtype)


def shards(folder: Path) -> FloatArray:
    return np.concatenate([np.load(path) for path in sorted(folder.glob("shard-*.npy"))])


class RecordingEncoder(BigramEncoder):
    def __init__(self) -> None:
        super().__init__("document")
        self.batches: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> Encoding:
        self.batches.append(list(texts))
        return super().encode(texts)


class SpoilingEncoder(BigramEncoder):
    """Changes the vectors of the batch with one text."""

    def __init__(self, spoil: Callable[[FloatArray, int], FloatArray], text: str) -> None:
        super().__init__("document")
        self._spoil = spoil
        self._text = text

    def encode(self, texts: Sequence[str]) -> Encoding:
        encoding = super().encode(texts)
        rows = [row for row, text in enumerate(texts) if self._text in text]
        if not rows:
            return encoding
        return replace(encoding, vectors=self._spoil(encoding.vectors.copy(), rows[0]))


def scaled(factor: float) -> Callable[[FloatArray, int], FloatArray]:
    def spoil(vectors: FloatArray, row: int) -> FloatArray:
        vectors[row] *= factor
        return vectors

    return spoil


def test_vector_i_is_that_of_normalised_text_i(options: OptionsMaker) -> None:
    records = make_records(50)
    encoded = encode(options(records), BigramEncoder("document"))
    texts = [document_text(record["title"], record["text"]) for record in records]
    np.testing.assert_array_equal(
        shards(encoded.folder), BigramEncoder("document").encode(texts).vectors
    )
    assert [record.rows for record in complete_shards(encoded.folder)] == [SHARD_SIZE] * 3 + [2]


def test_batches_are_full_and_have_texts_of_similar_length(options: OptionsMaker) -> None:
    records = [{"_id": i, "text": "字" * (i * 7 % 48 + 1)} for i in range(48)]
    encoder = RecordingEncoder()
    encode(options(records), encoder)
    assert {len(batch) for batch in encoder.batches} == {BATCH_SIZE}
    per_shard = SHARD_SIZE // BATCH_SIZE
    for start in range(0, len(encoder.batches), per_shard):
        batches = encoder.batches[start : start + per_shard]
        lengths = [len(text) for batch in batches for text in batch]
        assert lengths == sorted(lengths, reverse=True)


def test_tokens_and_truncated_texts_are_counted(options: OptionsMaker) -> None:
    records = [{"_id": i, "text": str(i) * 150 * (i + 1)} for i in range(3)]
    summary = encode(options(records), BigramEncoder("document")).summary
    assert (summary.new_texts, summary.tokens, summary.truncated) == (3, 150 + 200 + 200, 2)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (scaled(np.nan), "not_unit_norm"),
        (scaled(np.inf), "not_unit_norm"),
        (scaled(0), "not_unit_norm"),
        (scaled(1.01), "not_unit_norm"),
        (lambda vectors, _: vectors[:1], "wrong_shape"),
        (lambda vectors, _: vectors[:, :32], "wrong_shape"),
    ],
    ids=["nan", "infinite", "zero", "not unit", "too few", "too short"],
)
def test_a_bad_vector_is_an_error_and_its_shard_is_not_written(
    options: OptionsMaker, spoil: Callable[[FloatArray, int], FloatArray], code: str
) -> None:
    with raises(VectorError, code):
        encode(options(make_records(40)), SpoilingEncoder(spoil, "第20号"))
    encoder = BigramEncoder("document")
    encode(options(make_records(40)), encoder)
    assert encoder.texts_seen == 40 - SHARD_SIZE


class RefusingEncoder(BigramEncoder):
    """Rejects one text, like a server."""

    def __init__(self, text: str) -> None:
        super().__init__("document")
        self._text = text

    def encode(self, texts: Sequence[str]) -> Encoding:
        for position, text in enumerate(texts):
            if self._text in text:
                raise TextRejectedError("it is too long", position)
        return super().encode(texts)


def test_the_document_of_a_rejected_text_is_named(options: OptionsMaker) -> None:
    records = make_records(50)
    with pytest.raises(VectorError, match=rf"document '{records[33]['_id']}': it is too long"):
        encode(options(records), RefusingEncoder(records[33]["text"]))


def test_other_settings_encodings_encoders_and_chunks_have_separate_folders(
    options: OptionsMaker,
) -> None:
    changes: list[dict[str, Any]] = [
        *({"shard_size": 8}, {"batch_size": 2}),
        *({"backend": backend, "dtype": dtype} for backend in BACKENDS for dtype in DTYPES),
        *({"chunking": Chunking(tokens=25, overlap=overlap)} for overlap in (0, 5)),
    ]
    settings = [options(make_records(4), **each) for each in changes]
    folders = {encode(each, BigramEncoder("document")).folder for each in settings}
    folders.add(encode(settings[0], BigramEncoder("document", "other-9")).folder)
    assert len(folders) == len(changes) + 1


def test_the_default_batch_size_depends_on_the_backend() -> None:
    sizes = {name: default_batch_size(name) for name in BACKENDS}
    assert {name for name, size in sizes.items() if size != 32} == {"vllm"}
    assert sizes["vllm"] == 1024
