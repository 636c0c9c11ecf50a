"""Smaller weights and integer products for graphs that `models.export.onnx` makes.

Each function returns a new graph, and they combine: what one leaves alone, the next may
take. In all of them a text's vector is the same alone and in any batch. Dynamic int8
quantisation, the usual choice, lacks this: it takes one scale for the activations of the
whole batch, so that a query's hits depend on the queries beside it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from models.export.onnx import INPUTS, MICROSOFT

BLOCK = 32
Bits = Literal[4, 8]

# Smaller tables (positions, token types) are not worth a look-up that dequantises.
_SMALLEST_TABLE = 1000
# Seven bits: processors without VNNI add two products of 8 bits in a 16-bit register, and
# 2 * 63 * 255 is the most that fits. The eighth bit would gain 0.0002 of cosine.
_WEIGHT_LIMIT = 63
# A peak so far above the mean magnitude leaves 8-bit integers too few values for all the
# rest. Of the 48 inputs of multilingual-e5-small 8 are like that, most of them behind a
# GELU; sparing their products raises the cosine to float32 from .9968 to .9989.
_HIGHEST_PEAK = 100.0


@dataclass(frozen=True)
class Activation:
    """What a tensor held while texts were encoded.

    Attributes:
        low: The smallest value.
        high: The largest value.
        mean: The mean magnitude.
    """

    low: float
    high: float
    mean: float

    @property
    def has_outliers(self) -> bool:
        """Whether a few values are so large that 8 bits are too few for the others."""
        return max(-self.low, self.high) > _HIGHEST_PEAK * self.mean


def measure_activations(
    model: onnx.ModelProto, texts: Iterable[NDArray[np.int64]]
) -> dict[str, Activation]:
    """Measures the inputs of all matrix products while a float32 graph encodes texts.

    Args:
        model: A float32 graph.
        texts: Of each text its token ids, int64 [length].

    Returns:
        By tensor name, figures of three significant digits: processors differ in the last
        bits of a float, and should all write the same file.
    """
    names = list(dict.fromkeys(node.input[0] for node in _products(model)))
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    figures = []
    for text in texts:
        feed = dict(zip(INPUTS, (text[None], np.ones_like(text[None])), strict=True))
        arrays = session.run(names, feed)
        figures.append([(x.min(), x.max(), np.abs(x).mean()) for x in arrays])
    table = np.array(figures)
    columns = (table[..., 0].min(axis=0), table[..., 1].max(axis=0), table[..., 2].mean(axis=0))
    return {
        name: Activation(*(float(f"{value:.3g}") for value in row))
        for name, *row in zip(names, *columns, strict=True)
    }


def quantize_int8(model: onnx.ModelProto, activations: Mapping[str, Activation]) -> onnx.ModelProto:
    """Lets matrix products compute with integers, by scales that are fixed beforehand.

    Activations become 8-bit integers by the range that was measured; values outside it
    take its ends. Weights become 7-bit integers with a scale for each output column.

    Args:
        model: A float32 graph.
        activations: What `measure_activations` returned for typical texts.

    Returns:
        A graph with `MatMulIntegerToFloat` operators. Products whose input has outliers
        are left as they are.
    """
    quantized, weights = _copy(model)
    inputs: dict[str, list[str]] = {}
    nodes = []
    for node in quantized.graph.node:
        source = node.input[0] if node.input else ""
        if not _is_product(node, weights) or activations[source].has_outliers:
            nodes.append(node)
            continue
        if source not in inputs:
            inputs[source] = [f"{source}_{part}" for part in ("int8", "scale", "zero")]
            nodes.append(_quantize_input(quantized.graph, activations[source], source, inputs))
        nodes.append(_integer_product(quantized.graph, node, weights, inputs[source]))
    _finish(quantized, nodes)
    return quantized


def _quantize_input(
    graph: onnx.GraphProto,
    activation: Activation,
    source: str,
    inputs: Mapping[str, list[str]],
) -> NodeProto:
    low, high = min(activation.low, 0.0), max(activation.high, 0.0)
    scale = np.float32((high - low) / 255)
    zero = np.uint8(np.rint(-low / scale))
    integers, *constants = inputs[source]
    _add(graph, dict(zip(constants, (np.array(scale), np.array(zero)), strict=True)))
    return helper.make_node("QuantizeLinear", [source, *constants], [integers], name=integers)


def _integer_product(
    graph: onnx.GraphProto,
    node: NodeProto,
    weights: Mapping[str, NDArray[np.float32]],
    inputs: list[str],
) -> NodeProto:
    matrix = weights[node.input[1]]
    scales = np.abs(matrix).max(axis=0) / np.float32(_WEIGHT_LIMIT)
    integers = np.rint(_divide(matrix, scales)).astype(np.int8)
    names = [f"{node.input[1]}_{part}" for part in ("int8", "scales")]
    _add(graph, dict(zip(names, (integers, scales), strict=True)))
    values, scale, zero = inputs
    return helper.make_node(
        "MatMulIntegerToFloat",
        [values, names[0], scale, names[1], zero],
        node.output,
        name=node.name,
        domain=MICROSOFT,
    )


def quantize_blocks(
    model: onnx.ModelProto, accuracy_level: Literal[0, 4], bits: Bits = 4
) -> onnx.ModelProto:
    """Stores matrices as symmetric blocks of 32 weights (see `block_quantize`).

    Args:
        model: A graph with float32 products.
        accuracy_level: What products compute with: 0 float32; 4 int8 activations, with a
            scale for each 32 values of each row.
        bits: Of a weight.

    Returns:
        A graph with `MatMulNBits` operators. Matrices whose input width is no multiple of
        32 are left as they are.
    """
    quantized, weights = _copy(model)
    nodes = []
    for node in quantized.graph.node:
        if not _is_product(node, weights) or len(weights[node.input[1]]) % BLOCK:
            nodes.append(node)
            continue
        columns = np.ascontiguousarray(weights[node.input[1]].T)
        integers, scales = block_quantize(columns, bits)
        names = [f"{node.input[1]}_{part}" for part in (f"int{bits}", "scales")]
        packed = _pack(integers, bits).reshape(len(columns), -1, BLOCK * bits // 8)
        _add(quantized.graph, dict(zip(names, (packed, scales.reshape(-1)), strict=True)))
        product = helper.make_node(
            "MatMulNBits",
            [node.input[0], *names],
            node.output,
            name=node.name,
            domain=MICROSOFT,
            K=columns.shape[1],
            N=columns.shape[0],
            bits=bits,
            block_size=BLOCK,
            accuracy_level=accuracy_level,
        )
        nodes.append(product)
    _finish(quantized, nodes)
    return quantized


def quantize_tables(model: onnx.ModelProto, bits: Bits = 4) -> onnx.ModelProto:
    """Stores large embedding tables as blocks of 32 weights (see `block_quantize`).

    Args:
        model: A graph with float32 look-ups.
        bits: Of a weight.

    Returns:
        A graph with `GatherBlockQuantized` operators, which compute in float32.
    """
    quantized, weights = _copy(model)
    nodes = []
    for node in quantized.graph.node:
        table = weights.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or len(table) < _SMALLEST_TABLE or table.shape[-1] % BLOCK:
            nodes.append(node)
            continue
        integers, scales = block_quantize(table, bits)
        names = [f"{node.input[0]}_{part}" for part in (f"int{bits}", "scales")]
        _add(quantized.graph, dict(zip(names, (_pack(integers, bits), scales), strict=True)))
        lookup = helper.make_node(
            "GatherBlockQuantized",
            [names[0], node.input[1], names[1]],
            node.output,
            name=node.name,
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            block_size=BLOCK,
            bits=bits,
        )
        nodes.append(lookup)
    _finish(quantized, nodes)
    return quantized


def block_quantize(
    weights: NDArray[np.float32], bits: Bits = 4
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantises rows of weights to blocks of 32; of 4 bits these are Q4_0.

    A block's scale is its weight of largest magnitude divided by -h, where h = 2 ** (bits - 1).
    Weights that have been in this form before are carried without any loss.

    Args:
        weights: float32 [rows, columns]; columns a multiple of 32.
        bits: Of a weight.

    Returns:
        uint8 [rows, columns], integers from 0 to 2 h - 1, and float32 [rows, columns / 32],
        the scales: a weight is (integer - h) * scale.
    """
    half = 2 ** (bits - 1)
    blocks = weights.reshape(len(weights), -1, BLOCK)
    largest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scales = np.take_along_axis(blocks, largest, axis=-1) / np.float32(-half)
    integers = np.rint(_divide(blocks, scales)) + half
    integers = np.clip(integers, 0, 2 * half - 1).astype(np.uint8)
    return integers.reshape(weights.shape), scales[..., 0]


def _divide(weights: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divides; weights without a scale are zero and stay so."""
    return np.divide(weights, scales, out=np.zeros_like(weights), where=scales != 0)


def _pack(integers: NDArray[np.uint8], bits: Bits) -> NDArray[np.uint8]:
    """Puts neighbours of 4 bits into one byte, the first in its low half."""
    if bits == 8:
        return integers
    return integers[:, 0::2] | (integers[:, 1::2] << np.uint8(4))


def _copy(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]:
    """Returns a copy of the graph, and its float32 matrices by name."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy, _matrices(copy)


def _matrices(model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT
    }


def _products(model: onnx.ModelProto) -> list[NodeProto]:
    weights = _matrices(model)
    return [node for node in model.graph.node if _is_product(node, weights)]


def _is_product(node: NodeProto, weights: Mapping[str, NDArray[np.float32]]) -> bool:
    return node.op_type == "MatMul" and node.input[1] in weights


def _add(graph: onnx.GraphProto, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in arrays.items())


def _finish(model: onnx.ModelProto, nodes: list[NodeProto]) -> None:
    """Puts the nodes into the graph and drops the weights that none of them uses."""
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(kept)
