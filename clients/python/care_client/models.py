"""The HTTP contract: options of requests, and responses, with the names of docs/openapi.json.

Responses keep fields that this version does not know, and lack those that an older service does
not send.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

Scalar = str | int | float | bool

# Errors must not show the query.
_REQUEST = ConfigDict(extra="allow", hide_input_in_errors=True)

FilterConditions = TypedDict(
    "FilterConditions",
    {"gt": float, "gte": float, "lt": float, "lte": float, "not": Scalar | Sequence[Scalar]},
    total=False,
)
Filter = Mapping[str, Scalar | Sequence[Scalar] | FilterConditions]


class LimitPer(TypedDict, total=False):
    """A limit of the hits of each document or metadata value."""

    field: str
    hits: int


class SearchOptions(TypedDict, total=False):
    """What a search may be asked for besides its query; the service has the defaults.

    Attributes:
        top_k: Number of hits.
        filter: Conditions by metadata field; a document matches if all hold.
        min_score: Lowest score of a hit.
        collapse: Whether each document is returned once, by its best chunk.
        include: Optional fields of hits: `text`, `metadata`.
        mode: `dense`, `lexical` or `hybrid`.
        explain: Whether hits have `explain`.
        evidence: Whether hits have `evidence`, the sentence that answers best.
        limit_per: Limits the hits of each document or metadata value.
        rerank: Whether the first hits are ranked again, or how many of them.
    """

    top_k: int
    filter: Filter
    min_score: float
    collapse: bool
    include: Sequence[str]
    mode: str
    explain: bool
    evidence: bool
    limit_per: LimitPer
    rerank: bool | int


class SearchRequest(SearchOptions):
    """One query."""

    __pydantic_config__ = _REQUEST  # type: ignore[misc]

    query: str


class BatchRequest(TypedDict):
    """Several queries."""

    __pydantic_config__ = _REQUEST  # type: ignore[misc]

    queries: Sequence[SearchRequest]


class EmbeddingsOptions(TypedDict, total=False):
    """What an encoding may be asked for besides its texts.

    Attributes:
        input_type: `query`, or `document` where the service can encode documents.
        model: Name of the pair.
        dimensions: Number of leading dimensions to keep.
        encoding_format: `float` or `base64`.
        user: Ignored by the service.
    """

    input_type: str
    model: str
    dimensions: int
    encoding_format: str
    user: str


class EmbeddingsRequest(EmbeddingsOptions):
    """Texts to encode."""

    __pydantic_config__ = _REQUEST  # type: ignore[misc]

    input: str | Sequence[str]


class CreateRequest(TypedDict, total=False):
    """The settings of a new index: those of another one, and the first filter fields."""

    like: str
    filter_fields: Sequence[str]


class DeleteRequest(TypedDict, total=False):
    """Which documents to delete: these ids, or all that match a filter."""

    ids: Sequence[str]
    filter: Filter


class PatchRequest(TypedDict):
    """The metadata that take the place of those of a document."""

    metadata: Mapping[str, Any]


SEARCH_REQUEST = TypeAdapter(SearchRequest)
EMBEDDINGS_REQUEST = TypeAdapter(EmbeddingsRequest)
CREATE_REQUEST = TypeAdapter(CreateRequest)
DELETE_REQUEST = TypeAdapter(DeleteRequest)
PATCH_REQUEST = TypeAdapter(PatchRequest)


class _Response(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Contribution(_Response):
    """What a channel of a hybrid search contributes to the score of a hit."""

    rank: int | None = None
    score: float | None = None
    weight: float = 0.0


class EvidenceResponse(_Response):
    """A sentence of a text, from character `start` to `end`; `certain` ones may be pointed out."""

    start: int = 0
    end: int = 0
    text: str = ""
    certain: bool = False


class HitResponse(_Response):
    """A document, or a chunk of one.

    Attributes:
        score: In the scale of the mode; in mode `dense` the cosine similarity.
        rank: Position in the hits, from 1.
        parent: Id of the chunk's document, in an index of chunks.
        chunk: Number of the chunk in its document, from 0.
        chunks: Number of chunks of the document.
    """

    id: str
    score: float
    rank: int
    title: str = ""
    text: str | None = None
    metadata: dict[str, Any] | None = None
    parent: str | None = None
    chunk: int | None = None
    chunks: int | None = None
    explain: dict[str, Contribution] | None = None
    evidence: EvidenceResponse | None = None


class IndexReference(_Response):
    """An index version."""

    name: str = ""
    version: str = ""


class PassageResponse(_Response):
    """A chunk of a document; `chunk` is its number in the document, from 0."""

    id: str
    chunk: int = 0
    text: str = ""


class DocumentResponse(_Response):
    """A document, or a chunk of one.

    Attributes:
        text: The text; None for a document that is split.
        parent: Id of the chunk's document, in an index of chunks.
        chunk: Number of the chunk in its document, from 0.
        chunks: Number of chunks of the document.
        passages: The chunks of a document that is split, in order; neighbours can share sentences.
        index: The index version that the document comes from.
    """

    _etag: str | None = None
    id: str
    title: str = ""
    text: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    parent: str | None = None
    chunk: int | None = None
    chunks: int | None = None
    passages: list[PassageResponse] = Field(default_factory=list)
    index: IndexReference = Field(default_factory=IndexReference)

    @property
    def etag(self) -> str | None:
        """What `if_match` of a write has, so that it fails if the document has changed since."""
        return self._etag


class ListedDocument(_Response):
    """A document of a list; `chunks` is the number of its chunks, in an index of chunks."""

    id: str
    title: str = ""
    chunks: int | None = None


class DocumentsResponse(_Response):
    """Documents of an index version, in the order of its corpus.

    Attributes:
        next: What `after` has to be for those that follow; None for the last ones.
        total: Number of documents in the version.
        index: The index version that the documents come from.
    """

    documents: list[ListedDocument]
    next: str | None = None
    total: int = 0
    index: IndexReference = Field(default_factory=IndexReference)


class RejectedRecord(_Response):
    """A document that was not written; `position` is its place in those given, from 0."""

    position: int
    line: int | None = None
    id: str | None = None
    code: str = ""
    reason: str = ""


class WriteResponse(_Response):
    """What was changed, in numbers of documents.

    Attributes:
        index: The version that has the changes.
        missing: Ids that no document has.
        rejected: Documents that were not written, each with its reason.
    """

    index: IndexReference = Field(default_factory=IndexReference)
    added: int = 0
    replaced: int = 0
    deleted: int = 0
    unchanged: int = 0
    missing: list[str] = Field(default_factory=list)
    rejected: list[RejectedRecord] = Field(default_factory=list)
    more_rejected: int = 0


class AcceptedResponse(_Response):
    """The id of a request that waits for its turn."""

    id: str


class WriteStateResponse(_Response):
    """What became of such a request; `result` is None while `state` is `waiting`."""

    state: str
    result: WriteResponse | None = None


class Timings(_Response):
    """Time in each stage [ms]."""

    cache: float = 0.0
    queue: float = 0.0
    tokenize: float = 0.0
    encode: float = 0.0
    search: float = 0.0
    fetch: float = 0.0
    total: float = 0.0


class SearchResponse(_Response):
    """The hits for one query, best first.

    Attributes:
        index: The index version that was searched.
        cached: Whether the hits come from a cache.
        overflow: Whether the overflow pair encoded the query, because the queue was full.
        mode: The mode of the search.
        failed_channels: Channels of a hybrid search that failed or were late; `rerank` if the hits
            could not be ranked again.
        reranked: Whether the hits were ranked again.
        answerable: Whether the index seems to answer the query, from 0 to 1; None if unknown.
    """

    hits: list[HitResponse]
    index: IndexReference = Field(default_factory=IndexReference)
    timings_ms: Timings = Field(default_factory=Timings)
    cached: bool = False
    overflow: bool = False
    mode: str = "dense"
    failed_channels: list[str] = Field(default_factory=list)
    reranked: bool = False
    answerable: float | None = None


class BatchResponse(_Response):
    """One response for each query, in order."""

    results: list[SearchResponse]


class EmbeddingResponse(_Response):
    """The vector of one text, of unit norm; `embedding` is base64 if that was asked for."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class Usage(_Response):
    """Number of tokens that were encoded."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class EmbeddingsResponse(_Response):
    """One vector for each text, in order."""

    object: str = "list"
    data: list[EmbeddingResponse]
    model: str = ""
    usage: Usage = Field(default_factory=Usage)


class ModelResponse(_Response):
    """A model in OpenAI's format; `created` is in seconds since 1970."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""


class ModelsResponse(_Response):
    """The models of the service."""

    object: str = "list"
    data: list[ModelResponse]


class Chunking(_Response):
    """How documents are split into chunks."""

    tokens: int = 0
    overlap: int = 0


class RecallReport(_Response):
    """The measured recall@k of the index type against exact search."""

    k: int = 0
    queries: int = 0
    source: str = ""
    target: float = 0.0
    recall: float = 0.0
    tried: dict[str, float] = Field(default_factory=dict)


class ListedIndex(_Response):
    """An index that a service serves; paths without an index mean the default one."""

    name: str
    aliases: list[str] = Field(default_factory=list)
    default: bool = False


class ListedVersion(_Response):
    """A version of an index on disk; services load the active one."""

    version: str
    active: bool
    served: bool = False
    created_at: datetime
    documents: int
    count: int
    bytes: int


class VersionsResponse(_Response):
    """The versions of an index, in the order of their publication."""

    name: str
    versions: list[ListedVersion]


class DeletedIndexResponse(_Response):
    """An index that was deleted."""

    name: str
    documents: int | None = None


class IndexesResponse(_Response):
    """The indexes that the key may search."""

    indexes: list[ListedIndex]


class IndexResponse(IndexReference):
    """The index version that is served.

    Attributes:
        active: Whether this is the active version; false if that one cannot be loaded.
        count: Number of vectors.
        filters: Values of each filter field, most frequent first.
        filter_counts: How many documents or chunks have each of these values.
        filter_field_count: Number of filter fields, listed or not.
        modes: Modes of search; the first one is the default.
        fusion: Weights of a hybrid search.
        reranker: What ranks hits again: `late_interaction`, `server`, or None.
        answerable_thresholds: By mode, the score `answerable` below which nothing in the index
            seems to answer a query.
    """

    active: bool = True
    pair: str = ""
    embedding_space: str = ""
    dimension: int = 0
    count: int = 0
    documents: int = 0
    chunking: Chunking | None = None
    factory: str = ""
    search_parameters: dict[str, int] = Field(default_factory=dict)
    recall: RecallReport = Field(default_factory=RecallReport)
    filters: dict[str, list[Scalar]] = Field(default_factory=dict)
    filter_counts: dict[str, list[int]] = Field(default_factory=dict)
    filter_field_count: int = 0
    created_at: datetime | None = None
    modes: list[str] = Field(default_factory=lambda: ["dense"])
    fusion: dict[str, float] = Field(default_factory=dict)
    reranker: str | None = None
    answerable_thresholds: dict[str, float] = Field(default_factory=dict)


class Health(_Response):
    """The state of the service: `live` or `ready`."""

    status: str


class FieldError(_Response):
    """An invalid field of a request; `limit` is what it exceeds."""

    field: str
    code: str
    message: str = ""
    limit: int | None = None


class OpenAIError(_Response):
    """The error object of OpenAI."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: str = ""


class Problem(_Response):
    """An error, as RFC 9457 `application/problem+json`."""

    type: str = "about:blank"
    title: str = ""
    status: int
    code: str
    detail: str = ""
    request_id: str = ""
    errors: list[FieldError] = Field(default_factory=list)


class OpenAIProblem(Problem):
    """An error of a route under /v1."""

    error: OpenAIError = Field(default_factory=OpenAIError)
