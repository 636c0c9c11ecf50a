"""Writes the default pair's query side in the formats of other systems.

`care bench weights --out builds/bench/weights` writes

- `sentence-transformers/`: the dequantised model for sentence-transformers,
- `onnx-fp32/`: its float32 graph for infinity's ONNX engine,
- `onnx-int8/`: the service's int8 graph for the same engine.

All three use the same tokenizer, so that every system encodes the same tokens.
"""

import shutil
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from onnx.utils import Extractor
from transformers import BertModel

from core.files import new_folder
from core.terminal import shown
from loadtest.bench.comparison import ONNX_FP32, ONNX_INT8, TORCH
from models.encoders.onnx import OUTPUT
from models.pairs import DEFAULT_PAIR, load_pair
from training.export.checkpoint import write_checkpoint
from training.export.onnx import export_encoder, save

HIDDEN_STATES = "last_hidden_state"
# Operators that a layer can end with.
_NORMALISATIONS = ("SkipLayerNormalization", "LayerNormalization")


def write_weights(out: Path) -> None:
    """Writes the default pair's query side in all three formats; replaces an earlier output."""
    pair = load_pair(DEFAULT_PAIR)
    with new_folder(out, replace=True) as folder:
        write_checkpoint(pair.query, pair.folder, folder / TORCH)
        bert = BertModel.from_pretrained(
            folder / TORCH, add_pooling_layer=False, attn_implementation="eager"
        )
        bert.train(False)
        graphs = {
            ONNX_FP32: export_encoder(bert, pair.query.pooling),
            ONNX_INT8: onnx.load(pair.folder / pair.query.weights),
        }
        for name, graph in graphs.items():
            (folder / name).mkdir()
            save(without_pooling(graph, bert.config.hidden_size), folder / name / "model.onnx")
            for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(folder / TORCH / file, folder / name / file)
        (folder / "complete").touch()
    print(shown(f"wrote {TORCH}, {ONNX_FP32} and {ONNX_INT8} in {out}"))


def without_pooling(model: onnx.ModelProto, width: int) -> onnx.ModelProto:
    """Cuts a sentence encoder's graph after its last layer.

    The input is a graph of `export_encoder` with the output `sentence_embedding`; the result has
    the output `last_hidden_state`, float32 [n, length, width].

    Raises:
        ValueError: If the graph has other outputs.
    """
    if [output.name for output in model.graph.output] != [OUTPUT]:
        raise ValueError(f"the graph must have {OUTPUT} as its only output")
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    last = max(i for i, node in enumerate(cut.graph.node) if node.op_type in _NORMALISATIONS)
    cut.graph.node[last].output[0] = HIDDEN_STATES
    shape: list[str | int | None] = ["n", "length", width]
    states = helper.make_tensor_value_info(HIDDEN_STATES, TensorProto.FLOAT, shape)
    cut.graph.value_info.append(states)
    inputs = [value.name for value in cut.graph.input]
    return Extractor(cut).extract_model(inputs, [HIDDEN_STATES])
