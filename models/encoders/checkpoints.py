"""What all engines share that read a transformers checkpoint: its folder, tokens, result."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from core.errors import PairError
from core.text import with_prompt
from core.types import EncoderSpec, Encoding, FloatArray
from core.vectors import truncate_normalize
from models.encoders.tokens import text_offsets

# Copies of the weights for other frameworks.
_UNREAD = ["*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "onnx/*", "openvino/*"]
# What a tokenizer is read from; the weights, gigabytes, are not among it.
_TOKENIZER = ["*.json", "*.txt", "*.model", "*.jinja"]


def checkpoint_folder(spec: EncoderSpec, folder: Path, *, tokenizer_only: bool = False) -> Path:
    """Returns where the checkpoint lies: the local folder, or what the hub delivered.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.
        tokenizer_only: Whether the hub need not deliver the weights.

    Raises:
        PairError: If there is no such folder, or the hub does not deliver the model.
    """
    if not spec.weights:
        files = _TOKENIZER if tokenizer_only else None
        return _download(spec.model, spec.revision, "weights", files)
    path = folder / spec.weights
    if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
        raise PairError(
            f"{normpath(path)} is no checkpoint of {spec.model}: it has no config.json; put the "
            "trained checkpoint there, or name its folder as weights in the pair's TOML"
        )
    return path


def adapter_folder(spec: EncoderSpec, folder: Path) -> Path:
    """Returns where the LoRA adapter lies: the local folder, or what the hub delivered.

    Raises:
        PairError: If the hub does not deliver the adapter.
    """
    path = folder / spec.adapter
    return path if path.is_dir() else _download(spec.adapter, None, "adapter")


def _download(model: str, revision: str | None, field: str, files: list[str] | None = None) -> Path:
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=files, ignore_patterns=_UNREAD
            )
        )
    except (OSError, ValueError) as error:  # the hub's errors are one or the other
        at = f" at revision '{revision}'" if revision else ""
        raise PairError(
            f"{model}{at} cannot be had from the hub ({type(error).__name__}): "
            f"name a local folder as {field} in the pair's TOML"
        ) from error


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as its model reads it: token ids, and whether the text was cut."""

    ids: list[int]
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint, behind the prompt and within the length of a spec.

    The tokenizer's post-processor says which special tokens frame a text. If it ends none
    and pooling reads the last token, the end-of-text token is put there.

    Args:
        spec: The facts of the encoder.
        checkpoint: Folder of the checkpoint.

    Raises:
        PairError: If the tokenizer does not load or lacks the token that pooling reads.
    """

    def __init__(self, spec: EncoderSpec, checkpoint: Path) -> None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
            self._tokenizer = tokenizer.backend_tokenizer
        except Exception as error:  # the library raises nothing narrower
            raise PairError(f"{checkpoint} has no readable fast tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A text that holds "</s>" means those letters.
        self._tokenizer.encode_special_tokens = True
        self._prompt = spec.prompt
        self._end: list[int] = []
        if spec.pooling == "last_token" and not self._ends_texts():
            if tokenizer.eos_token_id is None:
                raise PairError(f"{checkpoint} has no end-of-text token, which last_token reads")
            self._end = [tokenizer.eos_token_id]
        self._tokenizer.enable_truncation(spec.max_length - len(self._end))

    def _ends_texts(self) -> bool:
        return bool(self._tokenizer.encode("a").special_tokens_mask[-1])

    def whole(self) -> Tokenizer:
        """Returns a tokenizer that ends texts by itself, whose file makes the same tokens."""
        tokenizer: Tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.no_truncation()
        if self._end:
            piece = tokenizer.id_to_token(self._end[0])
            end = processors.TemplateProcessing(
                single=["$A", piece], special_tokens=[(piece, self._end[0])]
            )
            first = tokenizer.post_processor
            tokenizer.post_processor = processors.Sequence([first, end]) if first else end
        return tokenizer

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes texts behind the prompt; what is cut is cut before the special tokens."""
        encoded = self._tokenizer.encode_batch([with_prompt(self._prompt, text) for text in texts])
        return [Tokens(e.ids + self._end, bool(e.overflowing)) for e in encoded]

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token that stands for a text; see `text_offsets`."""
        return text_offsets(self._tokenizer, self._prompt, text) + [(0, 0)] * len(self._end)


def as_encoding(spec: EncoderSpec, vectors: FloatArray, tokens: Sequence[Tokens]) -> Encoding:
    """Returns what an encoder returns for pooled vectors, float32 [n, native dimension].

    Raises:
        PairError: If the model computes other dimensions than its spec says.
        VectorError: If a vector is zero, NaN or infinite.
    """
    if vectors.shape[1] != spec.native_dimension:
        raise PairError(
            f"{spec.model} computes {vectors.shape[1]} dimensions, "
            f"not the native_dimension {spec.native_dimension}"
        )
    return Encoding(
        vectors=truncate_normalize(vectors, spec.dimension),
        token_counts=np.array([len(t.ids) for t in tokens], dtype=np.int32),
        truncated=np.array([t.truncated for t in tokens]),
    )
