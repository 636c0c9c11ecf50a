"""Export of a torch transformer to an ONNX graph for ONNX Runtime.

The graph includes pooling and normalisation, so that its users need no settings for them.
"""

import warnings
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import onnx
import torch
from onnx import helper
from onnx.external_data_helper import convert_model_to_external_data, write_external_data_tensors
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.onnx_model import OnnxModel
from onnxruntime.transformers.optimizer import optimize_model
from transformers import PreTrainedModel

from core.encoders import EncoderSpec, Pooling
from core.files import sha256_file
from core.scratch import temporary_folder
from models.encoders.onnx import DATA_SHA256, OUTPUT
from models.encoders.transformers import pool_states
from training.export.attention import one_operator, rotary_table

INPUTS = ("input_ids", "attention_mask")
TOKENIZER = "tokenizer.json"
OPSET = 17
MICROSOFT = "com.microsoft"
# Model types whose attention the optimizer fuses, and those that are exported with fused attention.
FUSED = ("bert", "xlm-roberta")
EXPORTED_FUSED = ("gte",)
# Operators whose values exceed the range or the precision of float16.
_WIDE = ("Pow", "ReduceMean", "ReduceL2", "Sqrt", "Reciprocal", "Sin", "Cos")
# Protobuf files are limited to 2 GiB; the margin is for everything except weights [bytes].
_LARGEST_FILE = 2_000_000_000


class SentenceEncoder(torch.nn.Module):
    """A transformer, its pooling, Dense modules, truncation and L2 normalisation."""

    def __init__(
        self,
        transformer: PreTrainedModel,
        pooling: Pooling,
        dense: torch.nn.Module | None,
        dimension: int | None,
    ) -> None:
        super().__init__()
        self.transformer = transformer
        self.pooling = pooling
        self.dense = dense
        self.dimension = dimension

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, dimension] for int64 [n, length] ids and mask."""
        states = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        pooled = pool_states(states, attention_mask, self.pooling)
        if self.dense is not None:
            pooled = self.dense(pooled)
        if self.dimension is not None:
            pooled = pooled[:, : self.dimension]
        return torch.nn.functional.normalize(pooled, dim=1)


def export_encoder(
    transformer: PreTrainedModel,
    pooling: Pooling,
    dense: torch.nn.Module | None = None,
    dimension: int | None = None,
    *,
    fuse: bool = True,
    max_length: int = 512,
) -> onnx.ModelProto:
    """Exports a transformer as a float32 graph; the attention of bidirectional encoders is fused.

    The graph takes `input_ids` and `attention_mask`, int64 [n, length] with both axes
    dynamic, and returns `sentence_embedding`, float32 [n, dimension], rows of unit L2 norm.

    Args:
        transformer: A float32 model in evaluation mode, with eager attention: ONNX Runtime's
            optimizer recognises attention in this form only.
        dense: Dense modules after pooling.
        dimension: Dimensions to keep; None for all.
        fuse: Whether to fuse attention. Without fusion the graph has standard ONNX operators
            only, which TensorRT requires.
        max_length: Most tokens of a text; the graph of a model with rotary positions takes no more.
    """
    kind = transformer.config.model_type
    encoder = SentenceEncoder(transformer, pooling, dense, dimension).eval()
    with temporary_folder() as folder, rotary_table(transformer, max_length):
        path = folder / "traced.onnx"
        if fuse and kind in EXPORTED_FUSED:
            with one_operator(transformer):
                _trace(encoder, path)
            return _with_fused_attention(onnx.load(path), transformer)
        _trace(encoder, path)
        return _fuse(path, transformer) if fuse and kind in FUSED else onnx.load(path)


def _trace(module: torch.nn.Module, path: Path) -> None:
    ids = torch.ones((2, 7), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    axes = {0: "n", 1: "length"}
    with warnings.catch_warnings():
        # The optimizer fuses attention only in graphs of torch's deprecated exporter.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (ids, mask),
            # The exporter writes weights above 2 GiB to a second file only if the path is a str.
            str(path),
            dynamo=False,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={**dict.fromkeys(INPUTS, axes), OUTPUT: {0: "n"}},
        )


def _fuse(path: Path, transformer: PreTrainedModel) -> onnx.ModelProto:
    options = FusionOptions("bert")
    # Matrix products and look-ups must stay separate operators to be quantised: operators that
    # fuse them with attention or embedding normalisation have no quantised form.
    options.use_multi_head_attention = True
    options.enable_embed_layer_norm = False
    # The alternative mask format is a length, which is wrong for left padding.
    options.use_raw_attention_mask(True)
    config = transformer.config
    optimized = optimize_model(
        str(path),
        "bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=options,
        opt_level=0,
    )
    optimized.topological_sort()
    optimized.model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return _with_fused_attention(optimized.model, transformer)


def _with_fused_attention(model: onnx.ModelProto, transformer: PreTrainedModel) -> onnx.ModelProto:
    fused = sum(node.op_type == "MultiHeadAttention" for node in model.graph.node)
    layers = transformer.config.num_hidden_layers
    if fused != layers:
        raise ValueError(f"{fused} of {layers} attention layers were fused")
    return model


def half_precision(model: onnx.ModelProto) -> onnx.ModelProto:
    """Converts weights and computation to float16; the output stays float32.

    Operators that sum squares or compute rotary position embeddings stay in float32.
    """
    half = OnnxModel(deepcopy(model))
    wide = [*DEFAULT_OP_BLOCK_LIST, *_WIDE]
    half.convert_float_to_float16(keep_io_types=True, op_block_list=wide)
    half.topological_sort()
    converted: onnx.ModelProto = half.model
    return converted


def describe(facts: Mapping[str, object], weights: Path) -> EncoderSpec:
    """Returns the spec of a side whose graph and tokenizer are in the same folder.

    `facts` are the fields of the spec except those of the files.
    """
    files = {"weights": weights, "tokenizer": weights.with_name(TOKENIZER)}
    return EncoderSpec.model_validate(
        {**facts, "format": "onnx"}
        | {name: str(path) for name, path in files.items()}
        | {f"{name}_sha256": sha256_file(path) for name, path in files.items()}
    )


def save(model: onnx.ModelProto, path: Path, largest: int = _LARGEST_FILE) -> None:
    """Checks a graph and writes it; equal graphs give equal bytes.

    If the weights exceed `largest` bytes, the tensors are moved from `model` to a second file
    with the suffix `.data`. The graph's metadata hold the checksum of this file, so that the
    checksum of the graph covers both.
    """
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > largest:
        convert_model_to_external_data(model, location=data.name)
        write_external_data_tensors(model, str(path.parent))
        # onnx creates the file readable by the owner only.
        data.chmod(0o644)
        helper.set_model_props(model, {DATA_SHA256: sha256_file(data)})
        path.write_bytes(model.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(path))
    else:
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString(deterministic=True))
