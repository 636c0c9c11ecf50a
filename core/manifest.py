"""The manifest of an index version, stored as `manifest.json`."""

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from core.encoders import EncoderSpec, FrozenModel

SCHEMA_VERSION = 3
# The oldest schema that can be read; it has the same fields.
OLDEST_SCHEMA_VERSION = 2

VECTORS_FILE = "vectors.faiss"
# Facts of a segment that was written into an index, and the rows that a version has no more.
SEGMENT_FILE, DELETED_FILE = "segment.json", "deleted.roaring"
# The components that this release reads.
FULL_TEXT, TERMS, TOKENS = "lexical", "terms", "tokens"
COMPONENTS = (FULL_TEXT, TERMS, TOKENS)
# A component without files, of a version in Milvus: its documents, filter values, full text and
# token vectors, which are tables there.
TABLES = "tables"

# Names of indexes, versions and their files: one folder or file, never a path.
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
# Above what a build measures: a wider search would compare every vector.
MAX_SEARCH_PARAMETER = 1 << 20


class FileRecord(FrozenModel):
    """Size [bytes] and SHA-256 of one file of an index version."""

    bytes: int = Field(ge=0)
    sha256: str  # empty in a pack, which is verified as a whole


class UpdateRecord(FrozenModel):
    """Result of an update of the version `base`, in numbers of documents."""

    base: Name
    added: int = Field(ge=0)
    replaced: int = Field(ge=0)  # documents whose text, title or metadata changed under the same id
    deleted: int = Field(ge=0)
    unchanged: int = Field(ge=0)


# These models are part of the HTTP contract, which shows the description of each field.
_DOCUMENTED = ConfigDict(use_attribute_docstrings=True)


class Chunking(FrozenModel):
    """How long documents are split into chunks."""

    model_config = _DOCUMENTED

    tokens: int = Field(gt=0)
    """Maximum tokens of a chunk, including prompt, title and special tokens."""
    overlap: int = Field(0, ge=0)
    """Maximum tokens that consecutive chunks share."""


class CorpusRecord(FrozenModel):
    """The corpus of an index version."""

    checksum: str  # SHA-256 of the corpus files or, after an update, of the resulting documents
    files: list[str]  # names of the corpus files; after an update also those of the added files
    documents: int = Field(ge=0)
    unique_texts: int = Field(ge=0)  # distinct texts
    rejected: int = Field(ge=0)  # records that are not in the index
    truncated: int = Field(ge=0)  # encoded texts that exceeded the encoder's maximum length
    tokens: int = Field(ge=0)  # encoded tokens; texts with reused vectors are not counted
    reused_texts: int = Field(0, ge=0)  # texts whose vectors were copied from the base version
    update: UpdateRecord | None = None  # None if the version was built from files
    chunks: int | None = Field(None, ge=0)  # of all documents; None without chunking


class RecallReport(FrozenModel):
    """The measurement by which search parameters were chosen."""

    model_config = _DOCUMENTED

    k: int
    """Depth of the measured recall."""
    queries: int
    """Number of held-out queries."""
    source: str
    """Origin of these queries."""
    target: float
    """The requested recall@k."""
    recall: float
    """Mean recall@k against exact search with the chosen parameters."""
    tried: dict[str, float]
    """Mean recall@k of each parameter combination that was measured."""


class Canary(FrozenModel):
    """The text of a document and its vector (base64 of little-endian float32)."""

    text: str
    vector: str


class Component(BaseModel):
    """An optional part of a version: full-text index, token vectors, terms.

    Readers ignore components that they do not know, so older programs can serve versions with
    new components.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: int  # version of the component's file format
    files: dict[str, FileRecord] = Field(default_factory=dict)
    # Settings that the component was built with.
    settings: dict[str, Any] = Field(default_factory=dict)


def _with_own_files(components: dict[str, Component]) -> dict[str, Component]:
    for component, part in components.items():
        folder = f"{component}/" if component in COMPONENTS else f"({NAME}/)*"
        if wrong := [name for name in part.files if not re.fullmatch(folder + NAME, name)]:
            raise ValueError(f"components: '{wrong[0][:64]}' is not a file of {component[:64]}")
    return components


def _files(components: Mapping[str, Component]) -> dict[str, FileRecord]:
    """Returns the files of the components that this release reads."""
    known = (part.files for name, part in components.items() if name in COMPONENTS)
    return {name: record for files in known for name, record in files.items()}


# The files of a component that this release reads are in the folder of its name.
Components = Annotated[dict[str, Component], AfterValidator(_with_own_files)]


class SegmentFacts(FrozenModel):
    """Facts of the files of some documents, `segment.json`; all others are those of the base."""

    factory: str
    search_parameters: dict[str, Annotated[int, Field(gt=0, le=MAX_SEARCH_PARAMETER)]]
    count: int = Field(gt=0)  # rows
    filter_fields: dict[str, Annotated[int, Field(ge=0)]]
    files: dict[Name, FileRecord]
    components: Components = Field(default_factory=dict)

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """Size and checksum of each file, by its path."""
        return dict(self.files) | _files(self.components)


class SegmentEntry(FrozenModel):
    """A segment of a version; its rows follow those of the segments before it."""

    folder: Name  # that of the version that wrote it, beside the folder of this version
    # Of its `segment.pack` or `segment.json` or, in the folder of a build, of `manifest.json`.
    sha256: str
    count: int = Field(gt=0)  # rows
    deleted: int = Field(0, ge=0)  # those of them that the version has no more


class IndexManifest(FrozenModel):
    """Manifest of one immutable index version; `manifest.json` is the last file written.

    A build writes all fields but `segments`; its folder has the only segment. A write names the
    segments of the version, and leaves out what is that of the first one, its base.
    """

    schema_version: int
    name: Name
    version: Name
    parent: Name | None  # the version that was active when this one was published, or None
    # Place in the order of publication, larger than those of all versions that existed at that time
    # and were not deleted; None until then.
    number: int | None = None
    encoder: EncoderSpec  # specification of the document encoder
    backend: str  # backend of the document encoder: onnx, openvino, transformers, vllm or openai
    # Requested dtype of the document encoder; `auto` is bfloat16 on GPUs and float32 on processors,
    # and in ONNX Runtime the dtype of the graph. For OpenVINO it is never `auto`.
    dtype: str
    metric: Literal["cosine"]
    store: Literal["faiss", "milvus"]  # of the base; segments that were written are files
    factory: str  # index type, as a FAISS factory string
    # Search parameters that were chosen by measured recall.
    search_parameters: dict[str, Annotated[int, Field(gt=0, le=MAX_SEARCH_PARAMETER)]]
    # Number of rows: documents or, with `chunking`, chunks; without those deleted.
    count: int = Field(ge=0)
    # Number of distinct values of each metadata field.
    filter_fields: dict[str, Annotated[int, Field(ge=0)]]
    files: dict[Name, FileRecord]  # size and checksum of each file, except those of components
    components: Components = Field(default_factory=dict)  # optional parts, by name
    # Minimum scores of relevant hits, by retrieval method; may be empty.
    thresholds: dict[str, float] = Field(default_factory=dict)
    # How a hybrid search fuses its channels (search/fusion.py). If it is not empty and the version
    # has full text, hybrid is the default mode of a search.
    fusion: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    corpus: CorpusRecord
    recall: RecallReport  # how the search parameters were chosen
    # Texts whose vectors a query encoder must retrieve.
    canaries: list[Canary] = Field(min_length=1)
    created_at: datetime
    build_seconds: float  # duration of the build [s]
    libraries: dict[str, str]  # versions of the libraries that were loaded
    chunking: Chunking | None = None  # how documents were split, or None
    # The segments of a version that was written; none if it was built.
    segments: tuple[SegmentEntry, ...] = ()

    @property
    def identity(self) -> str:
        """Checksum of all fields except those that `care versions migrate` changes."""
        facts = self.model_dump_json(exclude={"schema_version", "parent", "number"})
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def base(self) -> str:
        """Name of the folder that has the first or only segment, and the term list."""
        return self.segments[0].folder if self.segments else self.version

    @property
    def rows(self) -> int:
        """Number of rows of all segments, with those deleted."""
        return sum(one.count for one in self.segments) or self.count

    @property
    def all_files(self) -> dict[str, FileRecord]:
        """Size and checksum of each file, by its path; without those of unknown components.

        If the version was written, these are its own files without those of its segments.
        """
        return dict(self.files) | ({} if self.segments else _files(self.components))


# Fields of a manifest that a version that was written has of its own.
OF_VERSION = {
    *("schema_version", "name", "version", "parent", "number", "count", "filter_fields", "files"),
    *("thresholds", "fusion", "corpus", "created_at", "build_seconds", "segments"),
}
