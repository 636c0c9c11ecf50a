"""One side of a pair as a checkpoint folder of transformers and sentence-transformers."""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from core.encoders import EncoderSpec, Pair
from core.errors import CareError, PairError
from core.records import write_json
from core.types import FloatArray
from models.encoders.checkpoints import adapter_folder, checkpoint_folder
from models.encoders.modules import read_modules, write_modules
from models.encoders.transformers import TransformersEncoder
from training.export.bert import bert_of_graph, pad_token_id
from training.files import read_json, writing

DocumentForm = Literal["merged", "adapter", "none"]

_TRUNCATION = "3_Dense"
_HALF = (torch.bfloat16, torch.float16)
_ADAPTER = "adapter_config.json"


def export_document_side(
    pair: Pair, form: DocumentForm, folder: Path, texts: list[str]
) -> tuple[EncoderSpec, float]:
    """Writes the document side in a form that transformers and vLLM load, to a new folder.

    The form is `merged`, see `write_checkpoint`; or `adapter`: the folder of peft with a tokenizer
    that ends texts by itself, the base model stays where it is. Returns the facts of what was
    written, and the lowest cosine of its vectors of `texts` to those before.
    """
    spec = pair.document
    side = f"the document side of '{pair.name}'"
    if spec.format != "transformers":
        message = f"{side} is no checkpoint: --document none"
        raise PairError(message, code="not_a_checkpoint", pair=pair.name)
    if form == "adapter" and not spec.adapter:
        message = f"{side} has no adapter: --document merged"
        raise PairError(message, code="no_adapter", pair=pair.name)
    encoder = TransformersEncoder(spec, pair.folder, device="cpu", dtype="float32")
    expected, tokenizer = encoder.encode(texts).vectors, encoder.parts()[2]
    # One model at a time: it may fill the memory.
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
    """Writes a side as a checkpoint: LoRA layers merged, or dequantised from an ONNX graph.

    It has a tokenizer that ends texts by itself, and the modules of sentence-transformers:
    transformer, pooling, Dense modules, unit norm. Weights have the type of the checkpoint's.

    If asked to truncate, the model itself keeps the first `spec.dimension` dimensions, before
    unit norm, by a linear module. The folder must be new; the spec's paths are relative to `base`.
    Returns the facts of what was written.
    """
    folder.mkdir(parents=True)
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
    gone = {"adapter", "config", "weights_sha256", "tokenizer", "tokenizer_sha256"}
    return EncoderSpec.model_validate(spec.model_dump(exclude=gone) | changes)


def check_vectors(
    found: FloatArray, expected: FloatArray, written: EncoderSpec, base: Path, least: float = 0.9999
) -> float:
    """Returns the lowest cosine of vectors of what was written to those expected.

    Both are float32 [n, dimension]; the paths of `written` are relative to `base`.

    Raises:
        CareError: If it is lower than `least` or, where weights have half precision, .999.
    """
    cosine = float((found * expected).sum(axis=1).min())
    # Rounding merged weights to 8 bits of mantissa turns vectors by about 0.0001.
    half = not written.adapter and stored_dtype(base / written.weights) in _HALF
    if not cosine >= (min(least, 0.999) if half else least):
        message = f"the exported {written.role} side has other vectors: cosine {cosine:.6f}"
        raise CareError(message, code="other_vectors", role=written.role, cosine=cosine)
    return cosine


def stored_dtype(transformer: Path) -> torch.dtype:
    """Returns the type of a checkpoint's weights."""
    config, _ = PreTrainedConfig.get_config_dict(transformer)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return dtype


def _save(model: PreTrainedModel, folder: Path) -> None:
    with writing(folder):
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        # The library lets its own user alone read it.
        path.chmod(0o644)


def _copy_tokenizer(source: Path, tokenizer: Tokenizer, folder: Path) -> None:
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    # The same, and it ends texts by itself where pooling reads their end.
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    # A text that holds "</s>" means those letters.
    _update(folder / "tokenizer_config.json", {"split_special_tokens": True})


def _write_tokenizer(tokenizer: Tokenizer, spec: EncoderSpec, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    begin, end = (tokenizer.encode("").tokens[i] for i in (0, -1))
    config = {
        # The name that versions 4 and 5 of transformers know.
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
