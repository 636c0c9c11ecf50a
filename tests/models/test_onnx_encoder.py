import shutil
from pathlib import Path

import numpy as np
import pytest

from core.errors import PairError
from core.types import Pair
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

TEXTS = ["头痛", "高血压患者能不能吃党参？", "孩子发烧三十九度，" * 20]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("care-mini")


@pytest.fixture(scope="module")
def query_encoder(pair: Pair) -> OnnxEncoder:
    return OnnxEncoder(pair.query, pair.folder, threads=1)


def test_vectors_are_float32_of_unit_norm(query_encoder: OnnxEncoder) -> None:
    vectors = query_encoder.encode(TEXTS).vectors
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), query_encoder.spec.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_a_text_has_the_same_vector_alone_and_in_any_batch(query_encoder: OnnxEncoder) -> None:
    together = query_encoder.encode(TEXTS).vectors
    alone = np.concatenate([query_encoder.encode([text]).vectors for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_long_texts_are_cut_and_reported(query_encoder: OnnxEncoder) -> None:
    encoding = query_encoder.encode(["短", "很长的一段话。" * 500])
    assert encoding.truncated.tolist() == [False, True]
    assert encoding.token_counts[1] == query_encoder.spec.max_length


def test_a_paraphrase_is_nearer_than_another_subject(query_encoder: OnnxEncoder) -> None:
    a, b, c = query_encoder.encode(["血压高吃什么药", "高血压用药", "骨折怎么固定"]).vectors
    assert a @ b > a @ c


def test_both_sides_of_the_pair_share_a_space(pair: Pair, query_encoder: OnnxEncoder) -> None:
    documents = OnnxEncoder(pair.document, pair.folder, threads=1)
    scores = query_encoder.encode(TEXTS).vectors @ documents.encode(TEXTS).vectors.T
    assert (scores.argmax(axis=1) == np.arange(len(TEXTS))).all()


def test_fewer_dimensions_are_a_renormalised_prefix(pair: Pair, query_encoder: OnnxEncoder) -> None:
    spec = pair.query.model_copy(update={"dimension": 64})
    short = OnnxEncoder(spec, pair.folder, threads=1).encode(TEXTS).vectors
    prefix = query_encoder.encode(TEXTS).vectors[:, :64]
    expected = prefix / np.linalg.norm(prefix, axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_a_missing_or_changed_file_is_refused(pair: Pair, tmp_path: Path, field: str) -> None:
    source = pair.folder / getattr(pair.query, field)
    spec = pair.query.model_copy(
        update={
            "weights": str((pair.folder / pair.query.weights).resolve()),
            "tokenizer": str((pair.folder / pair.query.tokenizer).resolve()),
        }
        | {field: source.name}
    )
    with pytest.raises(PairError, match=f"{source.name} is missing"):
        OnnxEncoder(spec, tmp_path, threads=1)
    shutil.copy(source, tmp_path)
    with (tmp_path / source.name).open("r+b") as file:
        file.seek(100)
        file.write(b"changed")
    with pytest.raises(PairError, match=f"{source.name} is not the file that the pair describes"):
        OnnxEncoder(spec, tmp_path, threads=1)
