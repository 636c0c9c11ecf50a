import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from core.encoders import Encoding, Pair
from core.errors import PairError, ProviderError
from core.files import sha256_file
from models.encoders import factory
from models.encoders.factory import EncoderOptions, document_encoder, load_encoder
from models.pairs import load_pair
from tests.errors import raises

pytestmark = pytest.mark.train

TEXTS = ["高血压病人平时吃饭要注意少盐。" * 4, "感冒", "孩子半夜发烧怎么办？"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("care-mini")


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Encoding:
    return load_encoder(pair.document, pair.folder, 1).encode(TEXTS)


def options(dtype: str) -> EncoderOptions:
    return EncoderOptions("openvino", threads=1, dtype=dtype)


def changed(pair: Pair, folder: Path, graph: onnx.ModelProto) -> Pair:
    """The pair with another graph as document encoder."""
    path = folder / "document.onnx"
    onnx.save(graph, path)
    facts = {
        "weights": str(path),
        "weights_sha256": sha256_file(path),
        "tokenizer": str(pair.folder / pair.document.tokenizer),
    }
    return pair.model_copy(update={"document": pair.document.model_copy(update=facts)})


def test_float32_computes_what_onnx_runtime_computes(pair: Pair, expected: Encoding) -> None:
    found = document_encoder(pair, options("float32")).encode(TEXTS)
    # ONNX Runtime rounds inputs of products to 8 bits.
    assert (found.vectors * expected.vectors).sum(axis=1).min() > 0.999
    assert np.linalg.norm(found.vectors, axis=1) == pytest.approx(1)
    assert found.token_counts.tolist() == expected.token_counts.tolist()
    assert not found.truncated.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_dtypes_are_close_where_the_processor_has_the_instructions(
    pair: Pair, expected: Encoding, dtype: str
) -> None:
    try:
        encoder = document_encoder(pair, options(dtype))
    except ProviderError as error:
        assert error.code == "unsupported_dtype"
        assert not factory.cpu_flags() & factory._INSTRUCTIONS[dtype]
        return
    found = encoder.encode(TEXTS).vectors
    assert (found * expected.vectors).sum(axis=1).min() > 0.998
    # Vectors are not those of float32.
    exact = document_encoder(pair, options("float32")).encode(TEXTS).vectors
    assert np.abs(found - exact).max() > 1e-5


def test_a_vector_does_not_depend_on_the_batch(pair: Pair) -> None:
    encoder = document_encoder(pair, options("auto"))
    together = encoder.encode(TEXTS).vectors
    alone = np.concatenate([encoder.encode([text]).vectors for text in TEXTS])
    assert together == pytest.approx(alone, abs=2e-3)
    assert (together * alone).sum(axis=1).min() > 0.99999


def test_a_text_is_truncated_at_the_maximum_length(pair: Pair) -> None:
    found = document_encoder(pair, options("float32")).encode(["药" * 600])
    assert found.token_counts.tolist() == [512]
    assert found.truncated.all()


def test_no_usage_events_are_sent(pair: Pair) -> None:
    document_encoder(pair, options("float32"))
    assert sys.modules["openvino_telemetry"] is None


def test_int8_weights_have_a_scale_per_block(pair: Pair, tmp_path: Path) -> None:
    import openvino

    from models.encoders.openvino import _int8_weights

    blocks = np.random.default_rng(0).normal(size=(3, 2, 128)).astype(np.float32)
    blocks[0, 0] = 0
    blocks[1] *= 1000
    restored = _int8_weights(blocks, 256)
    model = openvino.Core().compile_model(openvino.Model([restored], []), "CPU")
    found = np.array(model({})[0])
    errors = np.abs(found.reshape(blocks.shape) - blocks).max(axis=2)
    assert (errors <= 0.51 * np.abs(blocks).max(axis=2) / 127).all()


def test_int8_needs_weights_of_matmulnbits(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "cpu_flags", lambda: {"avx512_vnni"})
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "length"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["n", 384])
    table = numpy_helper.from_array(np.ones((33040, 384), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["states"]),
        helper.make_node("ReduceMax", ["states"], ["sentence_embedding"], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "table", inputs, [output], [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    other = changed(pair, tmp_path, model)
    with raises(PairError, "no_int8_weights", path=tmp_path / "document.onnx"):
        document_encoder(other, options("int8"))
    vectors = document_encoder(other, options("float32")).encode(TEXTS).vectors
    assert vectors == pytest.approx(384**-0.5)


def test_weights_of_another_form_are_an_error(pair: Pair, tmp_path: Path) -> None:
    model = onnx.load(pair.folder / pair.document.weights)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    next(a for a in node.attribute if a.name == "bits").i = 4
    with raises(PairError, "bad_graph", path=tmp_path / "document.onnx"):
        document_encoder(changed(pair, tmp_path, model), options("float32"))
