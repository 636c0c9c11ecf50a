"""Tokenization of texts, and conversion of batches of tokens to arrays."""

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
from core.types import FloatArray
from core.vectors import truncate_normalize


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text, and whether the text was truncated."""

    ids: list[int]
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)


class TextTokenizer:
    """A tokenizer that prepends the prompt and truncates at the maximum length of a specification.

    Its post-processor adds special tokens; `end` is a token id to append besides, or None.
    """

    def __init__(self, tokenizer: Tokenizer, spec: EncoderSpec, end: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt = spec.prompt
        self._end = [] if end is None else [end]
        tokenizer.no_padding()
        tokenizer.enable_truncation(spec.max_length - len(self._end))
        # Special tokens in the input, such as "</s>", are encoded as plain text.
        tokenizer.encode_special_tokens = True

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes texts with the prompt; truncation keeps special tokens."""
        prompted = [self._prompt + text for text in texts]
        encoded = self._tokenizer.encode_batch_fast(prompted)
        return [Tokens(e.ids + self._end, bool(e.overflowing)) for e in encoded]

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and end of each token of a text, which is not truncated.

        Tokens of the prompt and special tokens have equal start and end. Tokens that are parts of
        one character, as in byte-level BPE, have the span of that character.
        """
        head = self._tokenizer.encode(self._prompt + text)
        prompt_length = len(self._prompt)
        special_tokens = sum(head.special_tokens_mask) + len(self._end)
        return [(0, 0)] * special_tokens + [
            (max(start - prompt_length, 0), max(end - prompt_length, 0))
            for part in (head, *head.overflowing)
            for (start, end), special in zip(part.offsets, part.special_tokens_mask, strict=True)
            if not special
        ]

    def standalone(self) -> Tokenizer:
        """Returns an equivalent tokenizer that appends the end token itself, without truncation."""
        tokenizer: Tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.no_truncation()
        for id_ in self._end:
            piece = tokenizer.id_to_token(id_)
            end = processors.TemplateProcessing(single=["$A", piece], special_tokens=[(piece, id_)])
            first = tokenizer.post_processor
            tokenizer.post_processor = processors.Sequence([first, end]) if first else end
        return tokenizer


class TokenEncoder(ABC):
    """Base class of encoders that tokenize texts in this process; subclasses set spec and tokenize.

    Attributes:
        concurrent_calls: Number of concurrent calls of `encode_tokens` that use the encoder fully.
    """

    spec: EncoderSpec
    tokenize: TextTokenizer
    concurrent_calls = 1

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes at least one text, normalised by `core.text`, as one batch."""
        return self.encode_tokens(self.tokenize(texts))

    @abstractmethod
    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes texts that `tokenize` returned, as one batch."""

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        return self.tokenize.token_offsets(text)


def file_tokenizer(spec: EncoderSpec, folder: Path) -> TextTokenizer:
    """Loads the `tokenizer.json` of a specification with paths relative to `folder`."""
    path = verified_file(spec, folder / spec.tokenizer, spec.tokenizer_sha256)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        reason = f"is not a readable tokenizer: {error}"
        raise PairError.at(path, reason, "bad_tokenizer") from error
    return TextTokenizer(tokenizer, spec)


def verified_file(spec: EncoderSpec, path: Path, checksum: str) -> Path:
    """Returns the path of a file; PairError if it is missing or its SHA-256 differs."""
    if not path.is_file():
        raise PairError.at(path, f"is missing: copy this file of {spec.model}", "missing_file")
    if sha256_file(path) != checksum:
        reason = "does not match the SHA-256 in the pair's TOML file: use the original file"
        raise PairError.at(path, reason, "checksum_mismatch")
    return path


def pad(
    tokens: Sequence[Tokens], shape: tuple[int, int] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns token ids and mask, int64 [rows, length], padded on the right to `shape`."""
    ids = np.zeros(shape or (len(tokens), max(map(len, tokens))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, token in enumerate(tokens):
        ids[row, : len(token)] = token.ids
        mask[row, : len(token)] = 1
    return ids, mask


def make_encoding(spec: EncoderSpec, vectors: FloatArray, tokens: Sequence[Tokens]) -> Encoding:
    """Returns the encoding of pooled vectors, float32 [n, m] with m ≥ `spec.dimension`."""
    return Encoding(
        vectors=truncate_normalize(vectors, spec.dimension),
        token_counts=np.array([len(t) for t in tokens], dtype=np.int32),
        truncated=np.array([t.truncated for t in tokens]),
    )
