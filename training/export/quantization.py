"""Quantisation and dequantisation of graphs of `training.export.onnx`.

A text's vector is the same alone and in any batch. Dynamic int8 quantisation, the usual choice,
does not have this property: it uses one activation scale for a whole batch, so that the hits of a
query depend on the other queries of its batch.

ONNX Runtime's static quantiser has the property too, but it also quantises tensors other than the
inputs of matrix products: for multilingual-e5-small, its lowest cosine to float32 is 0.9966, here
0.9987. Its block quantiser does not support 8-bit look-ups.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from core.types import FloatArray
from training.export.onnx import INPUTS, MICROSOFT

BLOCK = 32

# Smaller tables (positions, token types) stay in float32: quantising them saves little.
_SMALLEST_TABLE = 1000
# Seven bits: CPUs without VNNI add two 8-bit products in a 16-bit register, which must not
# exceed 2 * 63 * 255. An eighth bit would raise the cosine by 0.0002.
_WEIGHT_LIMIT = 63


def quantize_int8(model: onnx.ModelProto, texts: Iterable[NDArray[np.int64]]) -> onnx.ModelProto:
    """Static int8 quantisation of matrix products, with `MatMulIntegerToFloat` operators.

    Activations become 8-bit integers with a fixed range per input, measured on typical texts;
    values outside the range are clipped. Weights become 7-bit integers with a scale per output
    column. Input channels with outliers are divided by fixed factors before quantisation, and the
    rows of the weights multiplied by them, as in SmoothQuant (arXiv 2211.10438); see `_factors`.
    Look-ups store their tables in blocks of 8 bits (see `block_quantize`); small ones stay in
    float32, and so do those whose width is not a multiple of 32.

    Layer normalisations and GELUs become operators that are faster on processors.

    Args:
        model: A float32 graph.
        texts: Token ids of typical texts, each int64 [length].
    """
    model = _with_fast_operators(model)
    inputs = _measured_inputs(model, texts)
    copy, nodes = _Copy(model), []
    scales: dict[str, list[str]] = {}
    for node in copy.nodes:
        if not copy.is_product(node):
            nodes.append(node)
            continue
        source, weights = node.input[:2]
        measured = inputs[source]
        values = f"{source}_int8"
        if source not in scales:
            scales[source] = copy.add(source, scale=measured.scale, zero=measured.zero)
            divided = source
            if measured.factors.max() > 1:
                divided = f"{source}_divided"
                factors = [source, *copy.add(source, inverse_factors=1 / measured.factors)]
                nodes.append(helper.make_node("Mul", factors, [divided], name=divided))
            quantized = [divided, *scales[source]]
            nodes.append(helper.make_node("QuantizeLinear", quantized, [values], name=values))
        matrix = copy.weights[weights] * measured.factors[:, None]
        column_scales = np.abs(matrix).max(axis=0) / np.float32(_WEIGHT_LIMIT)
        integers = np.rint(_divide(matrix, column_scales)).astype(np.int8)
        integers_name, columns_name = copy.add(weights, int8=integers, scales=column_scales)
        scale_name, zero_name = scales[source]
        operands = [values, integers_name, scale_name, columns_name, zero_name]
        nodes.append(_operator("MatMulIntegerToFloat", node, operands))
    return _quantize_tables(copy.finish(nodes))


def _with_fast_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replaces operators that ONNX Runtime computes slowly on processors.

    `SkipLayerNormalization` becomes a sum and `LayerNormalization`; the sum is of type `Sum`, since
    ONNX Runtime would fuse `Add` again. `Gelu` and `BiasGelu` become `FastGelu`, which approximates
    them by tanh with an error of at most 0.0005.
    """
    copy, nodes = _Copy(model), []
    for node in copy.nodes:
        if node.op_type in ("Gelu", "BiasGelu"):
            nodes.append(_operator("FastGelu", node, list(node.input)))
        elif node.op_type == "SkipLayerNormalization":
            states, skipped, weight, bias, *product_bias = node.input
            total = f"{node.output[0]}_sum"
            parts = [states, skipped, *product_bias]
            epsilon = helper.get_node_attr_value(node, "epsilon")
            nodes.append(helper.make_node("Sum", parts, [total], name=total))
            normalised = [total, weight, bias]
            nodes.append(
                helper.make_node(
                    "LayerNormalization", normalised, node.output, name=node.name, epsilon=epsilon
                )
            )
        else:
            nodes.append(node)
    return copy.finish(nodes)


@dataclass(frozen=True, slots=True)
class _Input:
    """The quantisation of an input of matrix products."""

    factors: FloatArray  # float32 [channels], by which channels are divided before quantisation
    scale: FloatArray  # float32 [], the step of the integers
    zero: NDArray[np.uint8]  # uint8 [], the integer of 0


def _measured_inputs(
    model: onnx.ModelProto, texts: Iterable[NDArray[np.int64]]
) -> dict[str, _Input]:
    """Returns the quantisation of each input of a matrix product, measured on texts.

    Values are rounded to three significant digits, so that CPUs that differ in the last bits of a
    float write the same file.
    """
    copy = _Copy(model)
    names = list(dict.fromkeys(n.input[0] for n in copy.nodes if copy.is_product(n)))
    if not names:
        return {}
    probe = copy.model
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    lowest: dict[str, FloatArray] = {}
    highest: dict[str, FloatArray] = {}
    for text in texts:
        feed = dict(zip(INPUTS, (text[None], np.ones_like(text[None])), strict=True))
        for name, states in zip(names, session.run(names, feed), strict=True):
            low, high = states.min(axis=(0, 1)), states.max(axis=(0, 1))
            lowest[name] = np.minimum(low, lowest.get(name, 0))
            highest[name] = np.maximum(high, highest.get(name, 0))
    found = {}
    for name in names:
        factors = _factors(np.maximum(-lowest[name], highest[name]))
        low, high = (lowest[name] / factors).min(), (highest[name] / factors).max()
        low, high = (float(f"{value:.3g}") for value in (low, high))
        scale = np.float32((high - low) / 255)
        zero = np.array(np.rint(-low / scale), dtype=np.uint8)
        found[name] = _Input(factors, np.array(scale), zero)
    return found


def _factors(peaks: FloatArray) -> FloatArray:
    """Returns the factors by which the channels of an input are divided, float32 [channels].

    A factor is the square root of the channel's peak, its largest magnitude, over the median peak,
    at least 1. Without factors, a few channels with large values would leave few integers to all
    others. The square root shares the loss of precision between the channel's values and its
    weights, which are multiplied by the factor; as no factor is below 1, other channels are clipped
    no earlier.
    """
    ratios = np.sqrt(_divide(peaks, np.full_like(peaks, np.median(peaks))))
    rounded = [float(f"{max(1.0, ratio):.3g}") for ratio in ratios.tolist()]
    return np.array(rounded, dtype=np.float32)


def _quantize_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    copy, nodes = _Copy(model), []
    for node in copy.nodes:
        table = copy.weights.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or len(table) < _SMALLEST_TABLE or table.shape[-1] % BLOCK:
            nodes.append(node)
            continue
        integers, scales = block_quantize(table)
        weights, names = copy.add(node.input[0], int8=integers, scales=scales)
        inputs = [weights, node.input[1], names]
        options = {"gather_axis": 0, "quantize_axis": 1, "block_size": BLOCK, "bits": 8}
        nodes.append(_operator("GatherBlockQuantized", node, inputs, **options))
    return copy.finish(nodes)


def block_quantize(weights: FloatArray) -> tuple[NDArray[np.uint8], FloatArray]:
    """Quantises weights in blocks of 32 along rows to 8 bits.

    The scale of a block is its weight of largest magnitude divided by -128; a weight is
    approximated by (integer - 128) * scale.

    Args:
        weights: float32 [rows, columns]; columns must be a multiple of 32.

    Returns:
        Integers, uint8 [rows, columns], and scales, float32 [rows, columns / 32].
    """
    blocks = weights.reshape(len(weights), -1, BLOCK)
    largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-128)
    integers = np.clip(np.rint(_divide(blocks, scales)) + 128, 0, 255).astype(np.uint8)
    return integers.reshape(weights.shape), scales[..., 0]


def dequantize(model: onnx.ModelProto) -> dict[str, FloatArray]:
    """Returns the matrices of all products and look-ups by node name, quantised or not.

    They are float32, [inputs, outputs] for products and [rows, width] for look-ups. The factors of
    `quantize_int8` are undone. The document encoder of `care-mini` has blocks of 4 and 8 bits.
    """
    tensors: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    inverse_factors = _inverse_factors(model, tensors)
    found = {}
    for node in model.graph.node:
        inputs: list[Any] = [tensors.get(name) for name in node.input]
        matrix: Any = None
        match node.op_type, inputs:
            case ("MatMul", [_, weights]) | ("Gather", [weights, _]):
                matrix = weights
            case "MatMulIntegerToFloat", [_, integers, _, scales, *_]:
                matrix = integers * scales * inverse_factors.get(node.input[0], 1)
            case "MatMulNBits", [_, packed, scales]:
                matrix = _unpack(packed.reshape(len(packed), -1), scales, node).T
            case "GatherBlockQuantized", [packed, _, scales]:
                matrix = _unpack(packed, scales, node)
        if matrix is not None and matrix.ndim == 2:
            found[node.name] = matrix.astype(np.float32)
    return found


def _inverse_factors(
    model: onnx.ModelProto, tensors: Mapping[str, FloatArray]
) -> dict[str, FloatArray]:
    """Returns the inverse factors of quantised inputs that have any, float32 [channels, 1]."""
    nodes = model.graph.node
    divided = {
        node.output[0]: tensors[node.input[1]]
        for node in nodes
        if node.op_type == "Mul" and node.input[1] in tensors
    }
    return {
        node.output[0]: divided[node.input[0]][:, None]
        for node in nodes
        if node.op_type == "QuantizeLinear" and node.input[0] in divided
    }


def _divide(weights: FloatArray, scales: FloatArray) -> FloatArray:
    """Divides weights by scales; returns zero where the scale is zero."""
    return np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)


def _unpack(packed: NDArray[np.uint8], scales: FloatArray, node: NodeProto) -> FloatArray:
    """Returns the weights of packed blocks, float32 [rows, columns]."""
    bits = helper.get_node_attr_value(node, "bits")
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    blocks = packed.reshape(len(packed), -1, BLOCK).astype(np.float32) - 2 ** (bits - 1)
    weights: FloatArray = (blocks * scales.reshape(len(packed), -1, 1)).reshape(packed.shape)
    return weights


def _operator(kind: str, node: NodeProto, inputs: list[str], **attributes: Any) -> NodeProto:
    """Returns an operator of ONNX Runtime's domain that replaces a node."""
    return helper.make_node(
        kind, inputs, node.output, name=node.name, domain=MICROSOFT, **attributes
    )


class _Copy:
    """A copy of a graph to edit: its nodes, and its float32 matrices by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = deepcopy(model)
        self.weights: dict[str, FloatArray] = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in model.graph.initializer
            if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT
        }
        self.nodes: list[NodeProto] = list(self.model.graph.node)

    def is_product(self, node: NodeProto) -> bool:
        return node.op_type == "MatMul" and node.input[1] in self.weights

    def add(self, name: str, **arrays: Any) -> list[str]:
        """Adds arrays to the graph and returns their names, `name` with the keyword as suffix."""
        names = [f"{name}_{part}" for part in arrays]
        tensors = map(numpy_helper.from_array, arrays.values(), names)
        self.model.graph.initializer.extend(tensors)
        return names

    def finish(self, nodes: list[NodeProto]) -> onnx.ModelProto:
        """Replaces the nodes of the graph and removes unused weights."""
        graph = self.model.graph
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        used = {name for node in nodes for name in node.input}
        kept = [tensor for tensor in graph.initializer if tensor.name in used]
        if not any(imported.domain == MICROSOFT for imported in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend(kept)
        return self.model
