"""Writes the default pair's query side in the forms that other libraries load.

`python -m loadtest.bench.weights --out builds/bench/weights` makes

- `sentence-transformers/`: the dequantised model for sentence-transformers,
- `onnx-fp32/`: its graph for infinity's ONNX engine,
- `onnx-int8/`: the graph that the service itself runs, for the same engine.

All three are behind one tokenizer, so that every system reads the same tokens.
"""

import argparse
import shutil
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from transformers import BertModel

from core.cli import run
from core.files import new_folder
from loadtest.bench.weights_folders import ONNX_FP32, ONNX_INT8, TORCH
from models.encoders.onnx import OUTPUT
from models.pairs import DEFAULT_PAIR, load_pair
from training.export.checkpoint import write_checkpoint
from training.export.onnx import export_encoder, save

HIDDEN_STATES = "last_hidden_state"

_COMPLETE = "complete"
_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.weights", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the three forms")
    out: Path = parser.parse_args().out
    return run(lambda: write_weights(out))


def write_weights(out: Path) -> None:
    """Writes the three forms of the default pair's query side; earlier ones are replaced."""
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
            for file in _COPIED:
                shutil.copyfile(folder / TORCH / file, folder / name / file)
        (folder / _COMPLETE).touch()
    print(f"wrote {TORCH}, {ONNX_FP32} and {ONNX_INT8} in {out}")


def without_pooling(model: onnx.ModelProto, width: int) -> onnx.ModelProto:
    """Cuts a sentence encoder's graph behind its last layer.

    Args:
        model: A graph with the one output `sentence_embedding`, as `export_encoder` makes.
        width: Elements of a token's vector.

    Returns:
        The graph with the one output `last_hidden_state`, float32 [n, length, width].
    """
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    graph = cut.graph
    if [output.name for output in graph.output] != [OUTPUT]:
        raise ValueError(f"the graph has other outputs than {OUTPUT}")
    last = max(i for i, n in enumerate(graph.node) if n.op_type == "SkipLayerNormalization")
    graph.node[last].output[0] = HIDDEN_STATES
    needed = {HIDDEN_STATES}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    weights = [weight for weight in graph.initializer if weight.name in needed]
    del graph.node[:], graph.initializer[:], graph.output[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(weights)
    shape: list[str | int | None] = ["n", "length", width]
    graph.output.append(helper.make_tensor_value_info(HIDDEN_STATES, TensorProto.FLOAT, shape))
    return cut


if __name__ == "__main__":
    sys.exit(main())
