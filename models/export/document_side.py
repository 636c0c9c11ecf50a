"""A document side as one folder: its LoRA adapter merged, or kept beside the base model."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig

from core.errors import CareError, PairError
from core.types import EncoderSpec, Pair, Pooling
from models.encoders.checkpoints import adapter_folder, checkpoint_folder
from models.encoders.transformers import TransformersEncoder

DocumentForm = Literal["merged", "adapter", "none"]

# Names that vLLM and all versions of sentence-transformers read.
_TYPES = "sentence_transformers.models."
_MODES: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}
_HALF = (torch.bfloat16, torch.float16)
_ADAPTER = ("adapter_config.json", "adapter_model.*")


def export_document_side(
    pair: Pair, form: DocumentForm, folder: Path, texts: list[str]
) -> tuple[EncoderSpec, float]:
    """Writes the document side in a form that transformers and vLLM load.

    Merged, it is a checkpoint with a tokenizer that ends texts by itself, and with the
    `modules.json` of sentence-transformers: transformer, pooling, Dense modules, unit norm.
    Weights have the type of the checkpoint's. As an adapter it is peft's folder with that
    tokenizer; the base model stays where it is.

    Args:
        pair: A pair whose document side is a checkpoint of transformers.
        form: `merged` or `adapter`.
        folder: A new folder.
        texts: Texts that both must encode alike.

    Returns:
        The facts of what was written, and the lowest cosine of its vectors to those before.

    Raises:
        PairError: If the document side is no checkpoint, or has no adapter to keep.
        CareError: If the vectors are not those of the document side, or the disk fails.
    """
    spec = pair.document
    if spec.format != "transformers":
        raise PairError(f"the document side of '{pair.name}' is no checkpoint: --document none")
    if form == "adapter" and not spec.adapter:
        raise PairError(f"the document side of '{pair.name}' has no adapter: --document merged")
    source = checkpoint_folder(spec, pair.folder)
    encoder = TransformersEncoder(spec, pair.folder, device="cpu", dtype="float32")
    expected = encoder.encode(texts).vectors
    model, _, tokenizer = encoder.parts()
    folder.mkdir(parents=True)
    if form == "merged":
        dtype = _stored_dtype(source)
        model.to(dtype).save_pretrained(folder)
        _write_modules(spec, source, folder)
        written = spec.model_copy(update={"weights": str(folder), "adapter": "", "config": {}})
    else:
        dtype = torch.float32
        _copy_adapter(adapter_folder(spec, pair.folder), spec, pair.folder, folder)
        written = spec.model_copy(update={"adapter": str(folder)})
    _write_tokenizer(_transformer_folder(source), tokenizer, folder)
    del encoder, model
    again = TransformersEncoder(written, pair.folder, device="cpu", dtype="float32")
    cosine = float((again.encode(texts).vectors * expected).sum(axis=1).min())
    # Rounding merged weights to 8 bits of mantissa turns vectors by about 0.0001.
    if not cosine >= (0.999 if dtype in _HALF else 0.9999):
        raise CareError(f"the {form} document side has other vectors: cosine {cosine:.6f}")
    return written, cosine


def _stored_dtype(source: Path) -> torch.dtype:
    config, _ = PreTrainedConfig.get_config_dict(_transformer_folder(source))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return dtype


def _rows(source: Path) -> list[dict[str, Any]]:
    file = source / "modules.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.is_file() else []
    return rows


def _transformer_folder(source: Path) -> Path:
    found = [source / row["path"] for row in _rows(source) if row["type"].endswith(".Transformer")]
    return found[0] if found else source


def _write_modules(spec: EncoderSpec, source: Path, folder: Path) -> None:
    dense = [row["path"] for row in _rows(source) if row["type"].endswith(".Dense")]
    for path in dense:
        shutil.copytree(source / path, folder / path)
    config, _ = PreTrainedConfig.get_config_dict(folder)
    modes = dict.fromkeys(_MODES.values(), False) | {_MODES[spec.pooling]: True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "2_Normalize").mkdir(exist_ok=True)
    modules = [
        ("Transformer", ""),
        ("Pooling", "1_Pooling"),
        *(("Dense", path) for path in dense),
        ("Normalize", "2_Normalize"),
    ]
    files: dict[str, object] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{_TYPES}{kind}"}
            for i, (kind, path) in enumerate(modules)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": config["hidden_size"],
            **modes,
            "include_prompt": True,
        },
        "sentence_bert_config.json": {"max_seq_length": spec.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {spec.role: spec.prompt},
            "default_prompt_name": spec.role,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in files.items():
        _write_json(folder / name, content)


def _write_tokenizer(source: Path, tokenizer: Tokenizer, folder: Path) -> None:
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    # The same, and it ends texts by itself where pooling reads their end.
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _copy_adapter(adapter: Path, spec: EncoderSpec, base: Path, folder: Path) -> None:
    for pattern in _ADAPTER:
        for path in adapter.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    name = str((base / spec.weights).resolve()) if spec.weights else spec.model
    config |= {"base_model_name_or_path": name}
    if not spec.weights:
        config |= {"revision": spec.revision}
    _write_json(folder / "adapter_config.json", config)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
