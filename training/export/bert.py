"""Building BERT in torch from its parameters or from an exported ONNX graph."""

from collections.abc import Mapping
from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from core.encoders import EncoderSpec
from core.errors import PairError
from core.types import FloatArray
from training.export.quantization import dequantize

_ROOT = "transformer."
_TABLE = "embeddings.{}_embeddings.weight"


def build_bert(
    parameters: Mapping[str, FloatArray], *, heads: int, layer_norm_eps: float, pad_token_id: int
) -> BertModel:
    """Builds the float32 model, without a pooler, in evaluation mode.

    `parameters` are float32 arrays by their names in `BertModel`; they define all sizes.
    """
    words, hidden = parameters[_TABLE.format("word")].shape
    config = BertConfig(
        vocab_size=words,
        hidden_size=hidden,
        num_hidden_layers=sum(name.endswith("query.weight") for name in parameters),
        num_attention_heads=heads,
        intermediate_size=len(parameters["encoder.layer.0.intermediate.dense.bias"]),
        max_position_embeddings=len(parameters[_TABLE.format("position")]),
        type_vocab_size=len(parameters[_TABLE.format("token_type")]),
        layer_norm_eps=layer_norm_eps,
        pad_token_id=pad_token_id,
    )
    model = BertModel(config, add_pooling_layer=False)
    # ONNX Runtime's optimizer recognises attention in graphs of the eager implementation only.
    model.set_attn_implementation("eager")
    model.load_state_dict({name: torch.tensor(x).float() for name, x in parameters.items()})
    model.train(False)
    return model


def bert_of_graph(spec: EncoderSpec, folder: Path) -> BertModel:
    """Rebuilds the torch model of a graph that this package exported, with dequantised weights.

    The model does not quantise activations, so its vectors are close to the graph's but not equal.
    """
    path = folder / spec.weights
    model = onnx.load(path)
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    parameters = {
        name.removeprefix(_ROOT): array
        for name, array in tensors.items()
        if name.startswith(_ROOT) and array.ndim == 1
    }
    for node, matrix in dequantize(model).items():
        module = _module(node)
        parameters[f"{module}.weight"] = matrix if module.startswith("embeddings.") else matrix.T
    attention, normalisation = (
        [node for node in model.graph.node if node.op_type == kind]
        for kind in ("MultiHeadAttention", "LayerNormalization")
    )
    for node in attention:
        # The first input is the output of the query projection.
        module = _module(node.input[0]).removesuffix("query")
        biases = tensors[node.input[3]].reshape(3, -1)
        for part, bias in zip(("query", "key", "value"), biases, strict=True):
            parameters[f"{module}{part}.bias"] = bias
    try:
        return build_bert(
            parameters,
            heads=helper.get_node_attr_value(attention[0], "num_heads"),
            layer_norm_eps=helper.get_node_attr_value(normalisation[0], "epsilon"),
            pad_token_id=pad_token_id(Tokenizer.from_file(str(folder / spec.tokenizer))),
        )
    except (IndexError, KeyError, RuntimeError, ValueError) as error:
        reason = (
            "is not a BERT graph of this package: use the pair of checkpoints it was exported from"
        )
        raise PairError.at(path, reason, "unsupported_graph") from error


def _module(name: str) -> str:
    """Returns the module of a node or of a tensor, from its name.

    "/transformer/encoder/layer.0/output/dense/MatMul" gives "encoder.layer.0.output.dense".
    """
    return name.strip("/").replace("/", ".").rpartition(".")[0].removeprefix(_ROOT)


def pad_token_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the padding token, 0 if the tokenizer has none."""
    added = tokenizer.get_added_tokens_decoder().items()
    return next((id_ for id_, token in added if "pad" in token.content.lower()), 0)
