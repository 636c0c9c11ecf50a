"""Texts as the tokens that a model reads, and batches of tokens as arrays."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from core.encoders import EncoderSpec, Encoding
from core.errors import PairError
from core.files import sha256_file
from core.text import with_prompt
from core.types import FloatArray
from core.vectors import truncate_normalize


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as its model reads it: token ids, and whether the text was truncated."""

    ids: list[int]
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)


class TextTokenizer:
    """A tokenizer behind the prompt and within the length of a spec.

    Its post-processor puts special tokens around a text; `end` is one more to put behind it.
    """

    def __init__(self, tokenizer: Tokenizer, spec: EncoderSpec, end: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt = spec.prompt
        self._end = [] if end is None else [end]
        tokenizer.no_padding()
        tokenizer.enable_truncation(spec.max_length - len(self._end))
        # A user who types "</s>" means those letters.
        tokenizer.encode_special_tokens = True

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes texts behind the prompt; truncation leaves the special tokens."""
        prompted = [with_prompt(self._prompt, text) for text in texts]
        encoded = self._tokenizer.encode_batch_fast(prompted)
        return [Tokens(e.ids + self._end, bool(e.overflowing)) for e in encoded]

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token that stands for a text, however long it is.

        Prompt and special tokens are among them, and empty. Tokens that are parts of one
        character, as those of byte-level BPE can be, each have all of it.
        """
        head = self._tokenizer.encode(with_prompt(self._prompt, text))
        behind = len(self._prompt)
        special_tokens = sum(head.special_tokens_mask) + len(self._end)
        return [(0, 0)] * special_tokens + [
            (max(start - behind, 0), max(end - behind, 0))
            for part in (head, *head.overflowing)
            for (start, end), special in zip(part.offsets, part.special_tokens_mask, strict=True)
            if not special
        ]

    def whole(self) -> Tokenizer:
        """Returns a tokenizer that ends texts by itself, whose file makes the same tokens."""
        tokenizer: Tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.no_truncation()
        for id_ in self._end:
            piece = tokenizer.id_to_token(id_)
            end = processors.TemplateProcessing(single=["$A", piece], special_tokens=[(piece, id_)])
            first = tokenizer.post_processor
            tokenizer.post_processor = processors.Sequence([first, end]) if first else end
        return tokenizer


class TokenEncoder(ABC):
    """What encoders have in common that tokenize texts themselves.

    Each sets `spec` and `tokenize` when it is made, and says how tokens are encoded and how
    many calls of `encode_tokens` at once keep it busy.
    """

    spec: EncoderSpec
    tokenize: TextTokenizer
    concurrent_calls = 1

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes at least one text, already under the text rules of `core.text`, as one batch."""
        return self.encode_tokens(self.tokenize(texts))

    @abstractmethod
    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes what `tokenize` returned as one batch."""

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token of a text; see `TextTokenizer`."""
        return self.tokenize.token_offsets(text)


def file_tokenizer(spec: EncoderSpec, folder: Path) -> TextTokenizer:
    """Loads the `tokenizer.json` of a spec, whose paths are relative to a folder.

    Raises:
        PairError: If the file is missing, does not load or is not the one that the spec describes.
    """
    path = described_file(spec, folder / spec.tokenizer, spec.tokenizer_sha256)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = f"is not a readable tokenizer: {error}"
        raise PairError.at(path, reason, "bad_tokenizer") from error
    return TextTokenizer(tokenizer, spec)


def described_file(spec: EncoderSpec, path: Path, checksum: str) -> Path:
    """Returns the path of a file after comparing its SHA-256 with the spec's.

    Raises:
        PairError: If the file is missing or is another one.
    """
    if not path.is_file():
        raise PairError.at(path, f"is missing: it belongs to {spec.model}", "missing_file")
    if sha256_file(path) != checksum:
        reason = "is not the file that the pair describes: its sha256 differs"
        raise PairError.at(path, reason, "checksum_mismatch")
    return path


def pad(
    tokens: Sequence[Tokens], shape: tuple[int, int] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns ids and attention mask of a batch, int64 [rows, length], padded on the right.

    Without a shape they have no more rows and columns than the texts, at least one, need.
    """
    ids = np.zeros(shape or (len(tokens), max(map(len, tokens))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, token in enumerate(tokens):
        ids[row, : len(token)] = token.ids
        mask[row, : len(token)] = 1
    return ids, mask


def as_encoding(spec: EncoderSpec, vectors: FloatArray, tokens: Sequence[Tokens]) -> Encoding:
    """Returns what an encoder returns for pooled vectors, float32 [n, at least spec.dimension]."""
    return Encoding(
        vectors=truncate_normalize(vectors, spec.dimension),
        token_counts=np.array([len(t) for t in tokens], dtype=np.int32),
        truncated=np.array([t.truncated for t in tokens]),
    )
