"""Writes the pair's weights in the forms that other libraries load.

`python -m loadtest.bench.weights --out builds/bench/weights` makes

- `e5-small/`: the unquantised model for sentence-transformers,
- `onnx-fp32/`: the unquantised graph for infinity's ONNX engine,
- `onnx-int8/`: the graph that the service itself runs, for the same engine.

All three are behind one tokenizer, so that every system reads the same tokens.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from tokenizers import Tokenizer
from transformers import BertModel

from loadtest.bench.weights_folders import ONNX_FP32, ONNX_INT8, TORCH
from models.conversion.bert import build_bert
from models.conversion.source import load_source
from models.conversion.vocabulary import build_tokenizer, kept_pieces
from models.export.onnx import OUTPUT, export_encoder, save
from models.pairs import DEFAULT_PAIR, load_pair

HIDDEN_STATES = "last_hidden_state"

_COMPLETE = "complete"
_CONTROLS = {
    **{"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>"},
    **{"eos_token": "</s>", "sep_token": "</s>"},
}
_MODULES = ("Transformer", "Pooling", "Normalize")


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.weights", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the three forms")
    out: Path = parser.parse_args().out
    source = load_source()
    kept = kept_pieces(source)
    tokenizer = build_tokenizer(source, kept)
    bert = build_bert(source, kept)

    graph = export_encoder(bert, "mean")
    bert.set_attn_implementation("sdpa")
    _write_torch(out / TORCH, bert, tokenizer)
    _write_onnx(out / ONNX_FP32, graph, bert, tokenizer)
    pair = load_pair(DEFAULT_PAIR)
    served = onnx.load(pair.folder / pair.query.weights)
    _write_onnx(out / ONNX_INT8, served, bert, tokenizer)
    (out / _COMPLETE).touch()
    print(f"wrote {TORCH}, {ONNX_FP32} and {ONNX_INT8} in {out}")
    return 0


def _write_torch(folder: Path, bert: BertModel, tokenizer: Tokenizer) -> None:
    _write_common(folder, bert, tokenizer)
    bert.save_pretrained(folder)
    width = bert.config.hidden_size
    names = ["", "1_Pooling", "2_Normalize"]
    _dump(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(zip(names, _MODULES, strict=True))
        ],
    )
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    _dump(folder / "1_Pooling" / "config.json", pooling)
    (folder / "2_Normalize").mkdir(exist_ok=True)


def _write_onnx(
    folder: Path, graph: onnx.ModelProto, bert: BertModel, tokenizer: Tokenizer
) -> None:
    _write_common(folder, bert, tokenizer)
    save(without_pooling(graph, bert.config.hidden_size), folder / "model.onnx")


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


def _write_common(folder: Path, bert: BertModel, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    positions = bert.config.max_position_embeddings
    _dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": positions,
            "model_input_names": ["input_ids", "attention_mask"],
            **_CONTROLS,
        },
    )
    bert.config.save_pretrained(folder)


def _dump(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
