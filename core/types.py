"""The words that all rooms share."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

FloatArray = NDArray[np.float32]
RowArray = NDArray[np.int64]

Role = Literal["query", "document"]
Pooling = Literal["cls", "mean", "last_token"]
FilterValue = str | int | bool
Filter = Mapping[str, Sequence[FilterValue]]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of the corpus.

    Attributes:
        id: Its id, unique in an index.
        text: Its text.
        title: Its title.
        metadata: What it can be filtered by, and more.
        parent: In an index of chunks the id of the document that this is a chunk of.
        chunk: The number of the chunk, from 0.
        chunks: The number of chunks of the parent.
    """

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent: str | None = None
    chunk: int = 0
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the index.

    Attributes:
        text: The question as the user typed it.
        top_k: The number of hits wanted.
        filter: For each metadata field the accepted values; all fields must match.
        min_score: The lowest cosine similarity of a hit, or None for no limit.
        collapse: Whether each document is found once, by its best chunk.
    """

    text: str
    top_k: int = 10
    filter: Filter = field(default_factory=dict)
    min_score: float | None = None
    collapse: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found for a query; rank counts from 1, score is the cosine similarity."""

    id: str
    score: float
    rank: int
    title: str
    text: str
    metadata: Mapping[str, Any]
    parent: str | None = None
    chunk: int = 0
    chunks: int = 1


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


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_SHA256 = r"^([0-9a-f]{64})?$"


class EncoderSpec(_Frozen):
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
        role: The side that this encoder serves.
        dimension: Dimensions of the vectors after truncation.
        native_dimension: Dimensions that the model computes.
        max_length: Tokens that the model reads, special tokens included.
        pooling: How token vectors become one vector.
        normalize: Whether vectors are scaled to unit L2 norm.
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


class Pair(_Frozen):
    """A query encoder and a document encoder that share one embedding space.

    Attributes:
        name: The pair's name in the registry.
        description: One sentence.
        folder: Where the file lies that describes the pair; weights are relative to it.
        query: The online side.
        document: The offline side.
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


class FileRecord(_Frozen):
    """Size [bytes] and checksum of one file of an index version."""

    bytes: int = Field(ge=0)
    sha256: str


class UpdateRecord(_Frozen):
    """What an update changed, counted in documents, and the version that it changed.

    Attributes:
        base: The version's id.
        added: Documents with new ids.
        replaced: Documents whose text, title or metadata differ from those of the same id.
        deleted: Documents left out.
        unchanged: Documents that are as they were.
    """

    base: str
    added: int = Field(ge=0)
    replaced: int = Field(ge=0)
    deleted: int = Field(ge=0)
    unchanged: int = Field(ge=0)


class Chunking(_Frozen):
    """How long documents are cut.

    Attributes:
        tokens: The most tokens of a chunk, with prompt, title and special tokens.
        overlap: The most tokens that a chunk shares with the one before.
    """

    tokens: int = Field(gt=0)
    overlap: int = Field(0, ge=0)


class CorpusRecord(_Frozen):
    """Where an index's documents came from.

    Attributes:
        checksum: Of the corpus files or, after an update, of the documents that it left.
        files: Names of the corpus files; after an update also of those that were added.
        documents: Documents in the index.
        unique_texts: Different texts among them.
        rejected: Records that were left out.
        truncated: Texts that were longer than the encoder reads; reused ones do not count.
        tokens: Tokens that were encoded; those of reused texts do not count.
        reused_texts: Texts whose vectors were taken from the version before.
        chunks: Chunks of all documents, or None if none was cut.
        update: What was changed, or None if the index was built from files alone.
    """

    checksum: str
    files: list[str]
    documents: int = Field(ge=0)
    unique_texts: int = Field(ge=0)
    rejected: int = Field(ge=0)
    truncated: int = Field(ge=0)
    tokens: int = Field(ge=0)
    reused_texts: int = Field(0, ge=0)
    update: UpdateRecord | None = None
    chunks: int | None = Field(None, gt=0)


class RecallReport(_Frozen):
    """How the search parameters were chosen.

    Attributes:
        k: Depth at which recall is measured.
        queries: Number of held-out queries.
        source: Where those queries came from.
        target: The recall asked for.
        recall: Mean recall@k against exact search, with the chosen parameters.
        tried: Recall@k of each parameter value that was tried.
    """

    k: int
    queries: int
    source: str
    target: float
    recall: float
    tried: dict[str, float]


class Canary(_Frozen):
    """A document's text and its vector (float32, little-endian, base64)."""

    text: str
    vector: str


class IndexManifest(_Frozen):
    """Description of one immutable index version; written last, as `manifest.json`.

    `count` is the number of rows: of documents or, with `chunking`, of chunks.
    """

    schema_version: int
    name: str
    version: str
    encoder: EncoderSpec
    metric: Literal["cosine"]
    factory: str
    search_parameters: dict[str, int]
    count: int = Field(gt=0)
    filter_fields: dict[str, int]
    files: dict[str, FileRecord]
    corpus: CorpusRecord
    recall: RecallReport
    canaries: list[Canary] = Field(min_length=1)
    created_at: datetime
    build_seconds: float
    libraries: dict[str, str]
    chunking: Chunking | None = None
