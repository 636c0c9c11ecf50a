"""The description of an index version, which is written as `manifest.json`."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from core.encoders import EncoderSpec, Frozen

SCHEMA_VERSION = 2
# The oldest schema that is still read.
OLDEST_SCHEMA_VERSION = 1

VECTORS_FILE = "vectors.faiss"
# Backend or dtype of a version whose schema did not record them.
UNKNOWN = "unknown"


class FileRecord(Frozen):
    """Size [bytes] and checksum of one file of an index version."""

    bytes: int = Field(ge=0)
    sha256: str


class UpdateRecord(Frozen):
    """What an update changed, counted in documents, and the version that it changed.

    A document is replaced by one of the same id that differs in text, title or metadata.
    """

    base: str
    added: int = Field(ge=0)
    replaced: int = Field(ge=0)
    deleted: int = Field(ge=0)
    unchanged: int = Field(ge=0)


class Chunking(Frozen):
    """How long documents are cut.

    Attributes:
        tokens: The most tokens of a chunk, with prompt, title and special tokens.
        overlap: The most tokens that a chunk shares with the one before.
    """

    tokens: int = Field(gt=0)
    overlap: int = Field(0, ge=0)


class CorpusRecord(Frozen):
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


class RecallReport(Frozen):
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


class Canary(Frozen):
    """A document's text and its vector (float32, little-endian, base64)."""

    text: str
    vector: str


class Component(BaseModel):
    """An optional part of a version: full text, token vectors, terms.

    A reader that does not know a component ignores it, so that versions with new components are
    served by older programs.

    Attributes:
        format: Version of the component's format.
        files: Its files, by name.
        settings: What it was built with.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: int
    files: dict[str, FileRecord] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class IndexManifest(Frozen):
    """Description of one immutable index version; written last, as `manifest.json`.

    Attributes:
        parent: The version that was active when this one was built, or None.
        encoder: The document encoder.
        backend: What ran the document encoder: onnx, transformers, vllm or openai.
        dtype: The type that it computed in, as it was asked for: `auto` is bfloat16 on GPUs and
            float32 on processors; of ONNX files it is that of the graph.
        factory: The index type.
        search_parameters: Parameters of a search, chosen by measured recall.
        count: The number of rows: of documents or, with `chunking`, of chunks.
        filter_fields: The number of distinct values of each metadata field.
        files: Size and checksum of each file but those of components.
        components: Optional parts by name.
        thresholds: Scores below which a hit is not an answer, by name of the method; may be empty.
        fusion: Weights of search channels in a hybrid search, by channel; may be empty.
        canaries: Texts whose vectors a query encoder must be able to find.
    """

    schema_version: int
    name: str
    version: str
    parent: str | None
    encoder: EncoderSpec
    backend: str
    dtype: str
    metric: Literal["cosine"]
    store: Literal["faiss", "milvus"]
    factory: str
    search_parameters: dict[str, int]
    count: int = Field(gt=0)
    filter_fields: dict[str, int]
    files: dict[str, FileRecord]
    components: dict[str, Component] = Field(default_factory=dict)
    thresholds: dict[str, float] = Field(default_factory=dict)
    fusion: dict[str, float] = Field(default_factory=dict)
    corpus: CorpusRecord
    recall: RecallReport
    canaries: list[Canary] = Field(min_length=1)
    created_at: datetime
    build_seconds: float
    libraries: dict[str, str]
    chunking: Chunking | None = None


def upgrade_manifest(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a manifest of schema 1 as one of schema 2.

    What schema 1 does not record is filled in: the store follows from the files, the parent of an
    update from its record; of other versions the parent is unknown, as are backend and dtype of
    encoders that are not ONNX files.

    Raises:
        KeyError, TypeError: If it is not a manifest of schema 1.
    """
    update = content["corpus"].get("update")
    is_onnx = content["encoder"].get("format", "onnx") == "onnx"
    return content | {
        "schema_version": SCHEMA_VERSION,
        "parent": update["base"] if update else None,
        "backend": "onnx" if is_onnx else UNKNOWN,
        "dtype": "auto" if is_onnx else UNKNOWN,
        "store": "faiss" if VECTORS_FILE in content["files"] else "milvus",
    }
