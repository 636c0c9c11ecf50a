"""Encoders: the facts of one, what it returns, and the protocols that all of them follow."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.types import FloatArray

Role = Literal["query", "document"]
Pooling = Literal["cls", "mean", "last_token"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """What an encoder returns for n texts.

    Attributes:
        vectors: float32 [n, dimension], each of unit L2 norm.
        token_counts: int32 [n], tokens that the model read, special tokens included.
        truncated: bool [n], whether the text was longer than the encoder reads.
    """

    vectors: FloatArray
    token_counts: NDArray[np.int32]
    truncated: NDArray[np.bool_]


class Frozen(BaseModel):
    """A model whose fields cannot be changed or added to."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_SHA256 = r"^([0-9a-f]{64})?$"


class EncoderSpec(Frozen):
    """All facts of one side of a pair; nothing else in the project repeats one.

    Attributes:
        model: The model that the weights come from.
        revision: The model's revision. A checkpoint of format `transformers` has no checksum:
            model and revision are its identity, so other weights need another revision.
        format: `onnx`, one file of weights and one of the tokenizer; or `transformers`, a
            checkpoint folder.
        weights: Path of the weights, relative to the file that describes the pair: a file, or
            for `transformers` a folder, or "" for `model` at `revision` on the hub.
        weights_sha256: Checksum of the weights file; of `onnx` alone.
        tokenizer: Path of `tokenizer.json`, relative likewise; of `onnx` alone.
        tokenizer_sha256: Checksum of the tokenizer file; of `onnx` alone.
        adapter: LoRA adapter on a `transformers` checkpoint: a folder, relative likewise, or a
            model on the hub; "" for none.
        config: Entries that replace those of a `transformers` checkpoint's config.json.
        dimension: Dimensions of the vectors after truncation.
        native_dimension: Dimensions that the model computes.
        max_length: Tokens that the model reads, special tokens included.
        prompt: Text put before each input.
        embedding_space: Identity of the space that both sides of a pair share.
    """

    model: str
    revision: str
    format: Literal["onnx", "transformers"] = "onnx"
    weights: str = ""
    weights_sha256: str = Field(default="", pattern=_SHA256)
    tokenizer: str = ""
    tokenizer_sha256: str = Field(default="", pattern=_SHA256)
    adapter: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    role: Role
    dimension: int = Field(gt=0)
    native_dimension: int = Field(gt=0)
    max_length: int = Field(gt=2)
    pooling: Pooling
    normalize: Literal[True]
    prompt: str
    embedding_space: str = Field(min_length=1)

    @model_validator(mode="after")
    def _has_the_fields_of_its_format(self) -> Self:
        files = ("weights", "weights_sha256", "tokenizer", "tokenizer_sha256")
        needed = files if self.format == "onnx" else ()
        barred = ("adapter", "config") if self.format == "onnx" else files[1:]
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"format '{self.format}' needs {', '.join(missing)}")
        if extra := [name for name in barred if getattr(self, name)]:
            raise ValueError(f"format '{self.format}' has no {', '.join(extra)}")
        return self


class Pair(Frozen):
    """A query encoder and a document encoder that share one embedding space.

    Attributes:
        folder: Where the file lies that describes the pair; weights are relative to it.
        query: The online side; the document side is the offline one.
    """

    name: str
    description: str
    folder: Path
    query: EncoderSpec
    document: EncoderSpec

    @property
    def embedding_space(self) -> str:
        """Identity of the space that both sides share."""
        return self.query.embedding_space


class Encoder(Protocol):
    """Either side of a pair."""

    @property
    def spec(self) -> EncoderSpec:
        """The facts of this encoder."""
        ...

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch; the prompt is added by the encoder."""
        ...


class QueryEncoder(Encoder, Protocol):
    """The online side: tokenising and encoding can be called apart, from several threads."""

    def tokenize(self, texts: Sequence[str]) -> Sequence[Sized]:
        """Tokenizes texts behind the prompt; the size of each is its number of tokens."""
        ...

    def encode_tokens(self, tokens: Sequence[Any]) -> Encoding:
        """Encodes what `tokenize` returned, as one batch."""
        ...


@runtime_checkable
class OffsetTokenizer(Protocol):
    """What counts tokens as an encoder does, and shows where they lie in the text."""

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns start and end of each token that stands for the text, however long it is.

        Prompt and special tokens are among them, and empty.
        """
        ...
