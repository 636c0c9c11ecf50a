"""Document encoders in OpenVINO, which reads the graphs of ONNX Runtime and has faster products.

The weights of `MatMulNBits` operators are converted when a graph is loaded: to floating-point
numbers, or to int8 in longer blocks, which VNNI multiplies faster.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as operators
from numpy.typing import NDArray
from openvino.frontend.onnx import ConversionExtension

from core.encoders import EncoderSpec, Encoding
from core.errors import PairError, ProviderError
from core.machine import cpu_flags
from core.types import FloatArray
from models.encoders.onnx import OUTPUT
from models.encoders.tokenizer import (
    TokenEncoder,
    Tokens,
    file_tokenizer,
    make_encoding,
    pad,
    verified_file,
)

# Values of weights and activations that share a scale, with dtype int8.
_BLOCK = 128


class OpenVinoEncoder(TokenEncoder):
    """An encoder from an ONNX file and a `tokenizer.json`.

    Args:
        folder: Folder to which paths in the specification are relative.
        threads: Threads per call.
        dtype: "float32", "bfloat16", or "int8": products with weights have int8 operands, weights
            and activations with one scale per 128 values of a row, so vectors do not depend on
            the batch; the rest is bfloat16 if the processor has instructions for it, and otherwise
            float32.
    """

    def __init__(self, spec: EncoderSpec, folder: Path, threads: int, dtype: str) -> None:
        self.tokenize = file_tokenizer(spec, folder)
        weights = verified_file(spec, folder / spec.weights, spec.weights_sha256)
        self.spec = spec
        block = _BLOCK if dtype == "int8" else 0
        core = openvino.Core()
        products = _Products(block)
        core.add_extension(ConversionExtension("MatMulNBits", "com.microsoft", products.convert))
        try:
            model = core.read_model(weights)
        except RuntimeError as error:
            reason = f"is not a graph that OpenVINO reads: {_cause(error)}"
            raise PairError.at(weights, reason, "bad_graph") from error
        if block and not products.count:
            reason = "has no MatMulNBits weights to compute with in int8: use another --dtype"
            raise PairError.at(weights, reason, "no_int8_weights")
        # OpenVINO would emulate bfloat16 on other processors with AVX-512, some 20 times as slow.
        half = dtype == "bfloat16" or (block and "avx512_bf16" in cpu_flags())
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": block,
            "NUM_STREAMS": 1,
        }
        self._request = _calling(
            f"does not compile {weights.name} for {dtype}",
            lambda: core.compile_model(model, "CPU", options).create_infer_request(),
        )

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        ids, mask = pad(tokens)
        inputs = {"input_ids": ids, "attention_mask": mask}
        found = _calling("failed", lambda: self._request.infer(inputs)[OUTPUT])
        return make_encoding(self.spec, np.array(found, dtype=np.float32), tokens)


class _Products:
    """Converts `MatMulNBits` operators; `block` values share a scale, 0 converts to float32."""

    def __init__(self, block: int) -> None:
        self._block = block
        self.count = 0

    def convert(self, node: Any) -> list[Any]:
        """Returns the product of the operator's input and its converted weights."""
        rows, width = node.get_attribute("N"), node.get_attribute("K")
        if (
            node.get_attribute("bits") != 8
            or node.get_input_size() > 3
            or width % (self._block or 1)
        ):
            raise RuntimeError(
                f"MatMulNBits {node.get_name()} has weights of other than 8 bits, zero points, or "
                f"a width that is no multiple of {self._block}"
            )
        self.count += 1
        packed, scales = (node.get_input(i).get_node().get_data() for i in (1, 2))
        values = (packed.astype(np.float32) - 128) * scales.reshape(rows, -1, 1)
        if self._block:
            weights = _int8_weights(values.reshape(rows, -1, self._block), width)
        else:
            weights = operators.constant(values.reshape(rows, width))
        return [operators.matmul(node.get_input(0), weights, False, True).output(0)]


def _int8_weights(blocks: FloatArray, width: int) -> Any:
    """Returns the operators that restore weights from 8-bit integers and a scale per block.

    `blocks` are float32 [rows, blocks, values of a block]; a row has `width` values.
    """
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    integers: NDArray[np.float32] = np.rint(blocks / np.where(scales, scales, 1))
    # OpenVINO recognises quantised weights by these operators.
    zero = operators.convert(operators.constant(np.uint8(128)), "f32")
    stored = operators.convert(operators.constant((integers + 128).astype(np.uint8)), "f32")
    restored = operators.multiply(operators.subtract(stored, zero), operators.constant(scales))
    return operators.reshape(restored, operators.constant([len(blocks), width]), False)


def _calling(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:  # OpenVINO raises nothing narrower
        message = f"OpenVINO {what}: {_cause(error)}"
        raise ProviderError(message, code="engine_failed") from error


def _cause(error: Exception) -> str:
    """Returns the last line of OpenVINO's message; the lines before it name places in its code."""
    return str(error).strip().splitlines()[-1]
