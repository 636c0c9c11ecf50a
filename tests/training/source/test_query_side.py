"""The query side of care-mini, dequantised and quantised again."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

import care
from core.encoders import Pair
from core.errors import PairError
from core.files import sha256_file
from core.records import read_jsonl
from loadtest.traffic import SAMPLE, read_texts
from models.encoders.onnx import OnnxEncoder
from models.encoders.transformers import TransformersEncoder
from models.pairs import load_pair
from tests.checkpoints import checkpoint_spec
from tests.errors import raises
from tests.training.source.conftest import cosines
from training.export.bert import bert_of_graph
from training.export.query_side import load_query_side
from training.source.convert import requantize_query_side

pytestmark = [pytest.mark.train, pytest.mark.e2e]

SHIPPED = load_pair("care-mini")
TEXTS = [*read_texts(SAMPLE)[:40], "胃疼", "建议做胃镜检查，明确诊断后再用药。" * 20]


@pytest.fixture(scope="module")
def reference() -> TransformersEncoder:
    """The query side in float32."""
    return load_query_side(SHIPPED)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("converted")
    requantize_query_side(SHIPPED, folder / "care-mini", folder / "pair.toml", lambda _: None)
    return load_pair(str(folder / "pair.toml"))


@pytest.fixture(scope="module")
def encoder(converted: Pair) -> OnnxEncoder:
    return OnnxEncoder(converted.query, converted.folder, threads=1)


def test_all_products_have_one_scale_per_input(converted: Pair) -> None:
    graph = onnx.load(converted.folder / converted.query.weights).graph
    found = Counter(node.op_type for node in graph.node)
    layers = 5
    assert found["MatMulIntegerToFloat"] == 6 * layers
    assert found["LayerNormalization"] == 2 * layers + 1
    assert found["FastGelu"] == layers
    slow = {"MatMul", "MatMulNBits", "SkipLayerNormalization", "BiasGelu"}
    assert not slow & found.keys()
    assert converted.query.weights_sha256 != SHIPPED.query.weights_sha256


def test_vectors_are_those_of_the_float32_encoder_alone_and_in_a_batch(
    encoder: OnnxEncoder, reference: TransformersEncoder
) -> None:
    alone = np.concatenate([encoder.encode([text]).vectors for text in TEXTS])
    together = encoder.encode(TEXTS).vectors
    assert np.abs(together - alone).max() < 1e-6
    found = cosines(alone, reference.encode(TEXTS).vectors)
    assert found.mean() > 0.999
    assert found.min() > 0.997


def test_dequantised_weights_differ_by_rounding_only(converted: Pair) -> None:
    before, after = (
        bert_of_graph(pair.query, pair.folder).state_dict() for pair in (SHIPPED, converted)
    )
    assert before.keys() == after.keys()
    for name, expected in before.items():
        error = (after[name] - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < (0.1 if expected.ndim == 2 else 1e-6), name


def test_an_index_of_the_shipped_pair_stays_valid(converted: Pair, tmp_path: Path) -> None:
    for field in ("weights", "tokenizer"):
        name = getattr(SHIPPED.document, field)
        assert sha256_file(converted.folder / getattr(converted.document, field)) == sha256_file(
            SHIPPED.folder / name
        )
    assert converted.query.tokenizer_sha256 == SHIPPED.query.tokenizer_sha256
    corpus = [record for _, record in read_jsonl(SAMPLE.with_name("corpus.jsonl"))][:24]
    places = {"indexes": tmp_path / "indexes", "builds": tmp_path / "builds"}
    care.build_index("sample", corpus, pair="care-mini", factory="Flat", threads=1, **places)
    # Opening the index checks its canaries.
    path = str(converted.folder / "pair.toml")
    with care.open_index("sample", pair=path, indexes=places["indexes"]) as index:
        (hit,) = index.search(corpus[3]["text"], top_k=1)
    assert hit.id == corpus[3]["_id"]


def test_a_pair_of_checkpoints_is_an_error(tmp_path: Path) -> None:
    sides = {role: checkpoint_spec(tmp_path, "mean", role=role) for role in ("query", "document")}
    pair = Pair(name="trained", description="d", folder=tmp_path, **sides)
    with raises(PairError, "not_onnx", pair="trained"):
        requantize_query_side(pair, tmp_path / "out", tmp_path / "pair.toml", print)
    assert not (tmp_path / "out").exists()
