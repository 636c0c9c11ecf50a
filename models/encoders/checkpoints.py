"""Checkpoints of transformers: download, tokenizer and result, common to all backends."""

import logging
import os
import re
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from core.encoders import EncoderSpec, Encoding
from core.errors import CareError, PairError, required_packages
from core.types import FloatArray
from models.encoders.tokenizer import TextTokenizer, Tokens, make_encoding

_LOG = logging.getLogger("care")

# Names of models on ModelScope; the library of Hugging Face checks them itself.
_MODEL = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Weights for other frameworks, which are not downloaded.
_IGNORED = ["*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "onnx/*", "openvino/*"]
# Files of a tokenizer and of configurations, without weights.
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def checkpoint_folder(spec: EncoderSpec, folder: Path, *, tokenizer_only: bool = False) -> Path:
    """Returns the local folder of a checkpoint, downloaded from the hub (`CARE_HUB`) if needed."""
    if not spec.weights:
        patterns = SMALL_FILES if tokenizer_only else None
        return download(spec.model, spec.revision, "weights", patterns)
    path = folder / spec.weights
    if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
        reason = (
            f"is not a checkpoint of {spec.model} (config.json is missing): copy the trained "
            "checkpoint to this folder, or set weights in the pair's TOML file"
        )
        raise PairError.at(normpath(path), reason, "no_checkpoint")
    return path


def adapter_folder(spec: EncoderSpec, folder: Path) -> Path:
    """Returns the folder of the LoRA adapter; see `checkpoint_folder`."""
    path = folder / spec.adapter
    return path if path.is_dir() else download(spec.adapter, None, "adapter")


def download(
    model: str, revision: str | None, field: str = "", patterns: list[str] | None = None
) -> Path:
    """Returns the folder of a model of the Hugging Face Hub, downloaded if needed.

    `field` is that of a pair's TOML file which may name a folder in its place, if there is one.
    PairError if the download fails.
    """
    hub = os.environ.get("CARE_HUB") or "huggingface"
    if hub not in ("huggingface", "modelscope"):
        message = f"CARE_HUB is '{hub}': set it to huggingface or modelscope"
        raise CareError(message, code="invalid_setting", name="CARE_HUB")
    if hub == "modelscope":
        return _download_from_modelscope(model, field, patterns)
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED
        )
    except (OSError, ValueError) as error:  # base classes of the errors of huggingface_hub
        at = f" at revision '{revision}'" if revision else ""
        instead = f"set {field} in the pair's TOML file to" if field else "give the path of"
        message = (
            f"the download of {model}{at} from the Hugging Face Hub failed "
            f"({type(error).__name__}): set HF_ENDPOINT to a mirror or CARE_HUB=modelscope, or "
            f"{instead} a local folder"
        )
        raise PairError(
            message, code="download_failed", model=model, revision=revision, field=field
        ) from error
    return Path(folder)


def _download_from_modelscope(model: str, field: str, patterns: list[str] | None) -> Path:
    """Downloads the newest files of a model: ModelScope has no commits of the other hub."""
    with required_packages("CARE_HUB=modelscope", "pip install 'modelscope>=1.38,<2'"):
        from modelscope import snapshot_download as download
    try:
        if not _MODEL.fullmatch(model):
            raise ValueError("not OWNER/NAME")
        folder = download(model, allow_patterns=patterns, ignore_patterns=_IGNORED)
    except Exception as error:  # the library raises nothing narrower
        message = (
            f"the download of {model} from ModelScope failed ({type(error).__name__}): if it has "
            f"another name there, download it and set {field} in the pair's TOML file to its folder"
        )
        raise PairError(message, code="download_failed", model=model, field=field) from error
    _LOG.warning(
        "%s is from ModelScope, which does not have the pair's revision: use the same folder for "
        "all that is to share an index",
        model,
    )
    return Path(folder)


def checkpoint_tokenizer(spec: EncoderSpec, checkpoint: Path) -> TextTokenizer:
    """Loads the tokenizer of a checkpoint folder.

    If it adds no token at the end and the pooling is `last_token`, the end-of-text token is
    appended.
    """
    try:
        loaded = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer = loaded.backend_tokenizer
    except Exception as error:  # the library raises nothing narrower
        reason = f"does not have a readable fast tokenizer: {error}"
        raise PairError.at(checkpoint, reason, "bad_tokenizer") from error
    tokenizer.no_truncation()
    if spec.pooling != "last_token" or tokenizer.encode("a").special_tokens_mask[-1]:
        return TextTokenizer(tokenizer, spec)
    if loaded.eos_token_id is None:
        reason = "does not have an end-of-text token, which pooling last_token needs"
        raise PairError.at(checkpoint, reason, "no_end_token")
    return TextTokenizer(tokenizer, spec, loaded.eos_token_id)


def native_encoding(spec: EncoderSpec, vectors: FloatArray, tokens: Sequence[Tokens]) -> Encoding:
    """Returns the encoding of pooled vectors, float32 [n, native dimension]."""
    if vectors.shape[1] != spec.native_dimension:
        raise PairError(
            f"{spec.model} returns {vectors.shape[1]} dimensions instead of "
            f"{spec.native_dimension}: correct native_dimension in the pair's TOML file",
            code="other_dimension",
            found=vectors.shape[1],
            expected=spec.native_dimension,
        )
    return make_encoding(spec, vectors, tokens)
