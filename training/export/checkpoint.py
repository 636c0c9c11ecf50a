"""Export of a side of a pair as a checkpoint.

BERT is also built from parameters or from an exported ONNX graph.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import onnx
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedConfig, PreTrainedModel

from core.encoders import EncoderSpec, Pair
from core.errors import CareError, PairError
from core.records import write_json
from core.types import FloatArray
from models.encoders.checkpoints import adapter_folder, checkpoint_folder
from models.encoders.modules import read_modules, write_modules
from models.encoders.transformers import TransformersEncoder
from training.export.quantization import dequantize
from training.files import read_json, writing

DocumentForm = Literal["merged", "adapter", "none"]

_TRUNCATION = "3_Dense"
_HALF = (torch.bfloat16, torch.float16)
_ADAPTER = "adapter_config.json"


def export_document_side(
    pair: Pair, form: DocumentForm, folder: Path, texts: list[str]
) -> tuple[EncoderSpec, float]:
    """Writes the document side in a form that transformers and vLLM load.

    The form `adapter` is a peft folder with a tokenizer that appends the end token; the base
    model is not copied. Returns the spec of the exported side, and the lowest cosine between its
    vectors of `texts` and the original ones.
    """
    spec = pair.document
    side = f"the document side of '{pair.name}'"
    if spec.format != "transformers":
        message = f"{side} is not a checkpoint: use --document none"
        raise PairError(message, code="not_a_checkpoint", pair=pair.name)
    if form == "adapter" and not spec.adapter:
        message = f"{side} has no adapter: use --document merged"
        raise PairError(message, code="no_adapter", pair=pair.name)
    encoder = TransformersEncoder(spec, pair.folder, device="cpu", dtype="float32")
    expected, tokenizer = encoder.encode(texts).vectors, encoder.parts()[2]
    # Frees the model before the next one is loaded.
    del encoder
    if form == "merged":
        written = write_checkpoint(spec, pair.folder, folder)
    else:
        folder.mkdir(parents=True)
        _copy_adapter(adapter_folder(spec, pair.folder), spec, pair.folder, folder)
        written = spec.model_copy(update={"adapter": str(folder)})
        transformer, _ = read_modules(checkpoint_folder(spec, pair.folder), spec.pooling)
        _copy_tokenizer(transformer, tokenizer, folder)
    again = TransformersEncoder(written, pair.folder, device="cpu", dtype="float32")
    return written, check_vectors(again.encode(texts).vectors, expected, written, pair.folder)


def write_checkpoint(
    spec: EncoderSpec, base: Path, folder: Path, *, truncate: bool = False
) -> EncoderSpec:
    """Writes a side as a checkpoint with merged LoRA layers, or dequantised from an ONNX graph.

    The tokenizer appends the end token. The modules of sentence-transformers are transformer,
    pooling, Dense modules and normalisation; with `truncate`, a linear module before the latter
    truncates vectors to `spec.dimension`. Weights keep the dtype of the original checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dense: list[str] = []
    if spec.format == "onnx":
        model = bert_of_graph(spec, base)
        _write_tokenizer(Tokenizer.from_file(str(base / spec.tokenizer)), spec, folder)
    else:
        source = checkpoint_folder(spec, base)
        transformer, modules = read_modules(source, spec.pooling)
        encoder = TransformersEncoder(spec, base, device="cpu", dtype="float32")
        model, _, tokenizer = encoder.parts()
        model = model.to(stored_dtype(transformer))
        _copy_tokenizer(transformer, tokenizer, folder)
        for path in modules:
            dense.append(path.relative_to(source).as_posix())
            shutil.copytree(path, folder / dense[-1])
    _save(model, folder)
    changes: dict[str, object] = {"weights": str(folder), "format": "transformers"}
    if truncate and spec.dimension < spec.native_dimension:
        dense.append(_TRUNCATION)
        (folder / _TRUNCATION).mkdir()
        sizes = {"in_features": spec.native_dimension, "out_features": spec.dimension}
        activation = {"activation_function": "torch.nn.modules.linear.Identity"}
        write_json(folder / _TRUNCATION / "config.json", {**sizes, "bias": False, **activation})
        first = {"linear.weight": torch.eye(spec.dimension, spec.native_dimension)}
        save_file(first, folder / _TRUNCATION / "model.safetensors")
        changes["native_dimension"] = spec.dimension
    write_modules(
        folder,
        spec.pooling,
        max_length=spec.max_length,
        prompts={spec.role: spec.prompt},
        dense=dense,
        default_prompt=spec.role,
    )
    obsolete = {"adapter", "config", "weights_sha256", "tokenizer", "tokenizer_sha256"}
    return EncoderSpec.model_validate(spec.model_dump(exclude=obsolete) | changes)


def check_vectors(
    found: FloatArray, expected: FloatArray, written: EncoderSpec, base: Path, least: float = 0.9999
) -> float:
    """Returns the lowest cosine between vectors, float32 [n, dimension] of unit norm.

    It is an error below `least`, or below 0.999 for weights in half precision.
    """
    cosine = float((found * expected).sum(axis=1).min())
    # Rounding merged weights to an 8-bit mantissa lowers cosines by about 0.0001.
    half = not written.adapter and stored_dtype(base / written.weights) in _HALF
    if not cosine >= (min(least, 0.999) if half else least):
        message = f"the exported {written.role} side computes different vectors: lowest cosine "
        message += f"{cosine:.6f} to the original"
        raise CareError(message, code="other_vectors", role=written.role, cosine=cosine)
    return cosine


def stored_dtype(transformer: Path) -> torch.dtype:
    config, _ = PreTrainedConfig.get_config_dict(transformer)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return dtype


def _save(model: PreTrainedModel, folder: Path) -> None:
    with writing(folder):
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        # transformers creates the files readable by the owner only.
        path.chmod(0o644)


def _copy_tokenizer(source: Path, tokenizer: Tokenizer, folder: Path) -> None:
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    # This tokenizer also appends the end token if pooling uses the last token.
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    # "</s>" in a text is tokenized as letters.
    _update(folder / "tokenizer_config.json", {"split_special_tokens": True})


def _write_tokenizer(tokenizer: Tokenizer, spec: EncoderSpec, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    begin, end = (tokenizer.encode("").tokens[i] for i in (0, -1))
    config = {
        # A class that both transformers 4 and 5 support.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,
        **dict.fromkeys(("bos_token", "cls_token"), begin),
        **dict.fromkeys(("eos_token", "sep_token"), end),
        "pad_token": tokenizer.id_to_token(pad_token_id(tokenizer)),
    }
    write_json(folder / "tokenizer_config.json", config)


def _copy_adapter(adapter: Path, spec: EncoderSpec, base: Path, folder: Path) -> None:
    for path in (adapter / _ADAPTER, *adapter.glob("adapter_model.*")):
        shutil.copyfile(path, folder / path.name)
    facts = {"base_model_name_or_path": spec.model, "revision": spec.revision}
    if spec.weights:
        facts = {"base_model_name_or_path": str((base / spec.weights).resolve())}
    _update(folder / _ADAPTER, facts)


def _update(file: Path, entries: dict[str, Any]) -> None:
    write_json(file, read_json(file) | entries)


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
