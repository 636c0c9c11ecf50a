"""From a transformer in torch to an ONNX graph that ONNX Runtime runs fast on a processor.

Pooling and normalisation are in the graph, so that a reader needs no knowledge of them.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Literal

import onnx
import torch
from onnx import helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model
from transformers import PreTrainedModel

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"
OPSET = 17
MICROSOFT = "com.microsoft"

Pooling = Literal["cls", "mean"]


class _SentenceEncoder(torch.nn.Module):
    """A transformer, its pooling and L2 normalisation."""

    def __init__(self, transformer: PreTrainedModel, pooling: Pooling) -> None:
        super().__init__()
        self.transformer = transformer
        self.pooling = pooling

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, hidden] for int64 [n, length] ids and mask."""
        states = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        if self.pooling == "cls":
            pooled = states[:, 0]
        else:
            mask = attention_mask.unsqueeze(-1).to(states.dtype)
            pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(pooled, dim=1)


def export_encoder(transformer: PreTrainedModel, pooling: Pooling) -> onnx.ModelProto:
    """Exports a BERT-like transformer as a fused float32 graph.

    The graph takes `input_ids` and `attention_mask`, int64 [n, length] with both axes
    dynamic, and returns `sentence_embedding`, float32 [n, hidden], rows of unit L2 norm.

    Args:
        transformer: The model, float32, in evaluation mode, with eager attention: the
            fused attention of ONNX Runtime is found in that form of the graph only.
        pooling: How token vectors become one vector.

    Raises:
        ValueError: If attention did not fuse, as happens to other kinds of model.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traced.onnx"
        _trace(_SentenceEncoder(transformer, pooling).eval(), path)
        return _fuse(path, transformer)


def _trace(module: torch.nn.Module, path: Path) -> None:
    ids = torch.ones((2, 7), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    axes = {0: "n", 1: "length"}
    with warnings.catch_warnings():
        # The optimizer fuses attention only in graphs of the exporter that torch deprecates.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (ids, mask),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_axes={**dict.fromkeys(INPUTS, axes), OUTPUT: {0: "n"}},
        )


def _fuse(path: Path, transformer: PreTrainedModel) -> onnx.ModelProto:
    options = FusionOptions("bert")
    # Quantised products and look-ups exist as operators of their own, not inside the
    # operators that fuse them with attention or with the embeddings' normalisation.
    options.use_multi_head_attention = True
    options.enable_embed_layer_norm = False
    # The other form of the mask is a length: wrong for texts padded on the left.
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
    model: onnx.ModelProto = optimized.model
    fused = sum(node.op_type == "MultiHeadAttention" for node in model.graph.node)
    if fused != config.num_hidden_layers:
        raise ValueError(f"{fused} of {config.num_hidden_layers} attention layers were fused")
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return model


def save(model: onnx.ModelProto, path: Path) -> None:
    """Checks the graph and writes it; equal graphs give equal bytes."""
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString(deterministic=True))
