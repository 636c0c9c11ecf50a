"""Checkpoints of transformers as all backends read them: folder, tokens, result."""

from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from core.encoders import EncoderSpec, Encoding
from core.errors import PairError
from core.types import FloatArray
from models.encoders.tokenizer import TextTokenizer, Tokens, as_encoding

# Copies of the weights for other frameworks.
_UNREAD = ["*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "onnx/*", "openvino/*"]
# What a tokenizer is read from; the weights, gigabytes, are not among it.
_TOKENIZER = ["*.json", "*.txt", "*.model", "*.jinja"]


def checkpoint_folder(spec: EncoderSpec, folder: Path, *, tokenizer_only: bool = False) -> Path:
    """Returns the folder of the checkpoint: the local one, or the download from the hub.

    The spec's paths are relative to `folder`.

    Raises:
        PairError: If there is no such folder, or the download fails.
    """
    if not spec.weights:
        patterns = _TOKENIZER if tokenizer_only else None
        return _download(spec.model, spec.revision, "weights", patterns)
    path = folder / spec.weights
    if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
        reason = (
            f"is no checkpoint of {spec.model}: it has no config.json; put the trained "
            "checkpoint there, or name its folder as weights in the pair's TOML"
        )
        raise PairError.at(normpath(path), reason, "no_checkpoint")
    return path


def adapter_folder(spec: EncoderSpec, folder: Path) -> Path:
    """Returns the folder of the LoRA adapter; see `checkpoint_folder`."""
    path = folder / spec.adapter
    return path if path.is_dir() else _download(spec.adapter, None, "adapter")


def _download(
    model: str, revision: str | None, field: str, patterns: list[str] | None = None
) -> Path:
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=_UNREAD
        )
    except (OSError, ValueError) as error:  # the hub's errors are one or the other
        at = f" at revision '{revision}'" if revision else ""
        message = (
            f"download of {model}{at} from the Hugging Face Hub failed "
            f"({type(error).__name__}): name a local folder as {field} in the pair's TOML"
        )
        raise PairError(
            message, code="download_failed", model=model, revision=revision, field=field
        ) from error
    return Path(folder)


def checkpoint_tokenizer(spec: EncoderSpec, checkpoint: Path) -> TextTokenizer:
    """Loads the tokenizer of a checkpoint folder.

    Its post-processor says which special tokens frame a text. If it ends none and pooling
    reads the last token, the end-of-text token is put there.

    Raises:
        PairError: If the tokenizer does not load or lacks the token that pooling reads.
    """
    try:
        loaded = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        tokenizer = loaded.backend_tokenizer
    except Exception as error:  # the library raises nothing narrower
        reason = f"has no readable fast tokenizer: {error}"
        raise PairError.at(checkpoint, reason, "bad_tokenizer") from error
    tokenizer.no_truncation()
    if spec.pooling != "last_token" or tokenizer.encode("a").special_tokens_mask[-1]:
        return TextTokenizer(tokenizer, spec)
    if loaded.eos_token_id is None:
        reason = "has no end-of-text token, which last_token reads"
        raise PairError.at(checkpoint, reason, "no_end_token")
    return TextTokenizer(tokenizer, spec, loaded.eos_token_id)


def native_encoding(spec: EncoderSpec, vectors: FloatArray, tokens: Sequence[Tokens]) -> Encoding:
    """Returns what an encoder returns for pooled vectors, float32 [n, native dimension].

    Raises:
        PairError: If the model computes other dimensions than its spec says.
    """
    if vectors.shape[1] != spec.native_dimension:
        raise PairError(
            f"{spec.model} computes {vectors.shape[1]} dimensions, "
            f"not the native_dimension {spec.native_dimension}",
            code="other_dimension",
            found=vectors.shape[1],
            expected=spec.native_dimension,
        )
    return as_encoding(spec, vectors, tokens)
