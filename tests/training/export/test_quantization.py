import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from core.types import FloatArray
from training.export.onnx import INPUTS, MICROSOFT, OPSET
from training.export.quantization import block_quantize, dequantize, quantize_int8

pytestmark = pytest.mark.train

ROWS, WIDTH = 1024, 64


@pytest.fixture(scope="module")
def graph() -> onnx.ModelProto:
    """A look-up and two products; the input of the second product has outliers."""
    random = np.random.default_rng(2)
    table = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    spread = random.normal(0, 2.0 / WIDTH**0.5, (WIDTH, 2 * WIDTH)).astype(np.float32)
    weights = {"table": table, "up": spread, "down": np.ascontiguousarray(spread.T)}
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"], name="words"),
        helper.make_node("MatMul", ["words", "up"], ["wide"], name="up"),
        helper.make_node("Exp", ["wide"], ["peaked"], name="peaked"),
        helper.make_node("MatMul", ["peaked", "down"], ["vectors"], name="down"),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["n", "t"]) for n in INPUTS]
    output = helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["n", "t", WIDTH])
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "test", inputs, [output], tensors)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run(model: onnx.ModelProto, ids: np.ndarray) -> FloatArray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (vectors,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return vectors


def cosines(a: FloatArray, b: FloatArray) -> FloatArray:
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    product: FloatArray = (a * b).sum(axis=-1) / norms
    return product


def operators(model: onnx.ModelProto) -> dict[str, str]:
    return {node.name: node.op_type for node in model.graph.node}


def rounded(weights: FloatArray) -> FloatArray:
    """Returns the dequantised weights of blocks."""
    integers, scales = block_quantize(weights)
    return (integers.astype(np.float32) - 128) * np.repeat(scales, 32, axis=1)


def test_quantising_dequantised_weights_is_lossless() -> None:
    weights = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    weights[3, :32] = 0
    once = rounded(weights)
    np.testing.assert_array_equal(once[3, :32], 0)
    np.testing.assert_array_equal(rounded(once), once)


def test_errors_of_blocks_are_at_most_one_step() -> None:
    weights = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)
    steps = np.repeat(np.abs(block_quantize(weights)[1]), 32, axis=1)
    error = np.abs(rounded(weights) - weights)
    # A block has one integer less on the side opposite to its weight of largest magnitude.
    assert (error <= steps * 1.001).all()
    assert (error <= steps * 0.501).mean() > 0.95


def test_int8_scales_are_fixed_and_outliers_are_divided(graph: onnx.ModelProto) -> None:
    texts = [np.arange(i, i + 9) for i in range(0, 90, 9)]
    quantized = quantize_int8(graph, texts)
    found = operators(quantized)
    assert found["up"] == found["down"] == "MatMulIntegerToFloat"
    tensors = {t.name: numpy_helper.to_array(t) for t in quantized.graph.initializer}
    before, after = dequantize(graph), dequantize(quantized)
    np.testing.assert_array_equal(after["words"], rounded(before["words"]))
    for name, source in (("up", "words"), ("down", "peaked")):
        factors = 1 / tensors[f"{source}_inverse_factors"]
        assert factors.min() == 1 < factors.max()
        assert np.median(factors) < 1.1
        # Seven bits, with a scale per column, of rows that are multiplied by the factors.
        steps = np.abs(before[name] * factors[:, None]).max(axis=0) / 63 / factors[:, None]
        assert (np.abs(after[name] - before[name]) <= 0.501 * steps).all()
    ids = np.array(texts)
    together = run(quantized, ids)
    alone = np.concatenate([run(quantized, row[None]) for row in ids])
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    assert cosines(together, run(graph, ids)).min() > 0.99
