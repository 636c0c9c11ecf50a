"""Encoders: their specification, their result, and the protocols that they implement."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from core.choices import Codec
from core.types import FloatArray, Mode

Role = Literal["query", "document"]
Pooling = Literal["cls", "mean", "last_token"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Result of an encoder for n texts."""

    vectors: FloatArray  # float32 [n, dimension], unit L2 norm
    token_counts: NDArray[np.int32]  # int32 [n], input tokens after truncation, with special tokens
    # bool [n], whether the text was longer than the encoder's maximum length.
    truncated: NDArray[np.bool_]
    # For each text its token vectors as they are stored, uint8 [tokens, bytes], if the encoder
    # computes them; see `TokenVectorSpec`.
    token_vectors: Sequence[NDArray[np.uint8]] | None = None


class FrozenModel(BaseModel):
    """A pydantic model that is immutable and rejects unknown fields, NaN and infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_SHA256 = r"^([0-9a-f]{64})?$"


class EncoderSpec(FrozenModel):
    """Specification of one encoder of a pair; the only place where these values are defined.

    Paths are relative to the pair's TOML file.
    """

    model: str
    # Revision of the model. A checkpoint of format `transformers` has no checksum: model and
    # revision identify it, so other weights need another revision.
    revision: str
    # `onnx`, a weights file and a tokenizer file; or `transformers`, a checkpoint folder.
    format: Literal["onnx", "transformers"] = "onnx"
    # A file, or for `transformers` a folder; "" downloads `model` at `revision` from the Hugging
    # Face Hub.
    weights: str = ""
    # Checksum of the weights file; `onnx` only.
    weights_sha256: str = Field(default="", pattern=_SHA256)
    tokenizer: str = ""  # path of `tokenizer.json`; `onnx` only
    # Checksum of the tokenizer file; `onnx` only.
    tokenizer_sha256: str = Field(default="", pattern=_SHA256)
    # LoRA adapter of a `transformers` checkpoint: a folder, or a model on the Hugging Face Hub; ""
    # for none.
    adapter: str = ""
    # Entries that override those of a `transformers` checkpoint's config.json.
    config: dict[str, Any] = Field(default_factory=dict)
    role: Role  # whether the encoder encodes queries or documents
    dimension: int = Field(gt=0)  # dimensions of the vectors after truncation
    native_dimension: int = Field(gt=0)  # dimensions of the model's output
    max_length: int = Field(gt=2)  # maximum input length [tokens], with special tokens
    pooling: Pooling  # how token vectors are pooled
    normalize: Literal[True]  # whether vectors are scaled to unit L2 norm; always true
    prompt: str  # text that is prepended to each input
    # Name of the embedding space that both encoders of a pair share.
    embedding_space: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_fields_of_format(self) -> Self:
        files = ("weights", "weights_sha256", "tokenizer", "tokenizer_sha256")
        needed = files if self.format == "onnx" else ()
        forbidden = ("adapter", "config") if self.format == "onnx" else files[1:]
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"format '{self.format}' requires {', '.join(missing)}")
        if extra := [name for name in forbidden if getattr(self, name)]:
            raise ValueError(f"format '{self.format}' does not allow {', '.join(extra)}")
        return self


# Of a search, for `Answerability`. The lexical ones need full text.
Feature = Literal["cosine", "length", "size", "lexical", "overlap", "idf"]
_OF_FULL_TEXT = {"lexical", "overlap", "idf"}


class Answerability(FrozenModel):
    """How one mode of search judges whether an index answers a query (search/answerable.py)."""

    # Fewest and most vectors of an index that it is used for. A single number, as older releases
    # wrote it, is the size that it was fitted on: it is used for indexes of a tenth to ten times as
    # many.
    vectors: Annotated[
        tuple[PositiveInt, PositiveInt],
        BeforeValidator(lambda n: (-(-n // 10), 10 * n) if isinstance(n, int) else n),
    ]
    threshold: float = Field(ge=0, le=1)  # below this score, nothing in the index seems to answer
    intercept: float  # intercept of the logistic regression over the features of `weights`
    weights: dict[Feature, float] = Field(min_length=1)


class TokenVectorSpec(FrozenModel):
    """Token vectors of documents, for late interaction (models/late_interaction.py)."""

    # Name of the space of the token vectors, which both encoders of a pair share.
    space: str = Field(min_length=1)
    dimension: int = Field(gt=0, multiple_of=8)  # dimensions of a token vector
    pooling: int = Field(gt=0)  # tokens of a document per stored vector
    codec: Codec


class LateInteraction(TokenVectorSpec):
    """Token vectors of a pair, and how a search reranks its hits with them."""

    weight: float = Field(gt=0)  # of MaxSim, which is added to the score of the search

    @property
    def stored(self) -> TokenVectorSpec:
        """What an index version says of its token vectors."""
        return TokenVectorSpec(**self.model_dump(exclude={"weight"}))


class Pair(FrozenModel):
    """A query encoder and a document encoder that share one embedding space."""

    name: str
    description: str
    folder: Path  # folder of the pair's TOML file; paths of weights are relative to it
    query: EncoderSpec  # the encoder that the service uses
    document: EncoderSpec  # the encoder that the indexer uses
    # How a hybrid search fuses vectors and full text (search/fusion.py); empty if that was not
    # measured.
    fusion: dict[Literal["lexical", "rank_constant"], Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict
    )
    # How each mode of search judges whether an index answers a query; empty if that was not
    # calibrated. A calibration holds for indexes like the one that it was made on.
    answerable: dict[Mode, Answerability] = Field(default_factory=dict)
    # The token vectors that both encoders compute; None if they compute none.
    late_interaction: LateInteraction | None = None

    @model_validator(mode="after")
    def _check_features_of_modes(self) -> Self:
        for mode, judge in self.answerable.items():
            if mode == "lexical" or (mode == "dense" and _OF_FULL_TEXT & set(judge.weights)):
                raise ValueError(f"answerable.{mode}: only a hybrid search has these features")
        return self

    @property
    def embedding_space(self) -> str:
        return self.query.embedding_space


class Encoder(Protocol):
    """An encoder of a pair, for queries or documents."""

    @property
    def spec(self) -> EncoderSpec: ...

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes n texts as one batch; the encoder prepends the prompt."""
        ...


class QueryEncoder(Encoder, Protocol):
    """An encoder with separate, thread-safe steps for tokenizing and encoding."""

    def tokenize(self, texts: Sequence[str]) -> Sequence[Sized]:
        """Tokenizes texts with the prompt; `len` of an item is its number of tokens."""
        ...

    def encode_tokens(self, tokens: Sequence[Any]) -> Encoding:
        """Encodes items that `tokenize` returned, as one batch."""
        ...


@runtime_checkable
class TokenVectorEncoder(QueryEncoder, Protocol):
    """An encoder that can also compute token vectors, for late interaction."""

    @property
    def token_dimension(self) -> int:
        """Dimensions of the token vectors, 0 if the model has none."""
        ...

    def encode_token_vectors(self, tokens: Sequence[Any]) -> tuple[Encoding, list[FloatArray]]:
        """Encodes items as `encode_tokens`, and returns the token vectors of the same pass.

        The latter are for each text float32 [tokens, `token_dimension`] of unit norm.
        """
        ...


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that returns the positions of an encoder's tokens in a text."""

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns the start and end of each token of a text, which is not truncated.

        Tokens of the prompt and special tokens are included, with equal start and end.
        """
        ...
