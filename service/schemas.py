"""The HTTP contract: fields of requests and responses.

Requests are validated with the settings of the service as context.
"""

from datetime import datetime
from itertools import islice
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from core.errors import QueryError
from core.manifest import Chunking, RecallReport
from core.types import HitLimit, Mode, Query
from search.fusion import Channel
from search.rerank import RerankerName
from service.filter_schema import FilterField, FilterItem
from service.observe.metrics import Timings

Include = Literal["text", "metadata"]

_QUESTION = "高血压患者饮食上要注意什么？"


# Unknown fields of a request that are named in its error.
_MAX_UNKNOWN = 16
# What an OpenAPI document says of a field besides its values.
_ABOUT = {"title", "description", "default", "examples"}
_NULL = {"type": "null"}
# The reference to the schema of a model.
SCHEMA = "#/components/schemas/{model}"


class StrictRequest(BaseModel):
    """A request body; lists and objects in it fail at their first fault, so that faults are few.

    Null stands for the default of a field that has one.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, body: object) -> object:
        """Drops fields that are null and have a default."""
        if not isinstance(body, dict) or None not in body.values():
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {n: value for n, value in body.items() if value is not None or n not in optional}

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, body: object) -> object:
        """Drops all unknown fields but the first, where there are many: each is an error."""
        if not isinstance(body, dict) or len(body) <= _MAX_UNKNOWN:
            return body
        known = cls.model_fields
        unknown = islice((name for name in body if name not in known), _MAX_UNKNOWN)
        return {name: body[name] for name in (*filter(body.__contains__, known), *unknown)}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Documents that fields with a default can be null."""
        document = handler(schema)
        found = handler.resolve_ref_schema(document)
        for name in found["properties"].keys() - found.get("required", ()):
            field = found["properties"][name]
            values = {key: field.pop(key) for key in list(field) if key not in _ABOUT}
            choices = values.get("anyOf", [values])
            field["anyOf"] = choices + ([] if _NULL in choices else [_NULL])
        return document


class LimitPer(StrictRequest):
    """At most this many hits of each document or metadata value."""

    field: str = Field(
        description="A metadata field that filters accept, or _document for the documents of an "
        "index of chunks (no effect on other indexes)."
    )
    hits: int = Field(ge=1, description="Most hits of each document or value.")


def _check_rerank(value: object) -> object:
    """Reports one error of the field, where a union reports one for each of its types."""
    if isinstance(value, bool) or (isinstance(value, int) and value >= 1):
        return value
    raise PydanticCustomError("rerank", "is neither true, false nor a number of hits, 1 or more")


class SearchRequest(StrictRequest):
    """One query."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": _QUESTION, "top_k": 5}]})

    query: str = Field(description="The question, in the user's words.")
    top_k: int = Field(10, ge=1, description="Number of hits to return, at most CARE_MAX_TOP_K.")
    filter: FilterField = Field(default_factory=dict)
    min_score: float | None = Field(
        None,
        ge=-100,
        le=100,
        description="Lowest score of a hit, in the scale of the mode. Scores up to 0.000001 below "
        "it pass, because a score varies by about 0.0000001 with the batch of its query.",
    )
    collapse: bool = Field(
        False,
        description="Whether each document is returned once, by its best chunk. No effect on an "
        "index without chunks.",
    )
    include: Annotated[list[Include], FailFast()] = Field(
        default_factory=lambda: list(get_args(Include)),
        max_length=16,
        description="Optional fields of hits: text, metadata or both (the default). Hits always "
        "have id, score, rank and title.",
    )
    mode: Mode | None = Field(
        None,
        description="How documents are found: by vectors (dense), by full text (lexical) or by "
        "both (hybrid). The default is the first of the modes that GET /index lists.",
    )
    explain: bool = Field(
        False,
        description="Whether each hit says what rank, score and weight it has in each channel of "
        "a hybrid search, and in reranking. Such searches are not cached.",
    )
    evidence: bool = Field(
        False, description="Whether each hit has the sentence that answers best."
    )
    limit_per: LimitPer | None = Field(
        None,
        description="Limits the hits of each document or metadata value; further hits follow until "
        "there are `top_k`. A hit with several values counts for each of them, and one without a "
        "value is not limited.",
    )

    rerank: Annotated[bool | int, BeforeValidator(_check_rerank)] = Field(
        False,
        description="Whether the first hits are ranked again by late interaction or a server "
        "(`reranker` of GET /index): true for CARE_RERANK_HITS of them, or their number, at most "
        "CARE_MAX_RERANK and at least `top_k`. `min_score` is compared with the new scores.",
    )

    def as_query(self) -> Query:
        """Returns the query of the request."""
        limit = HitLimit(self.limit_per.field, self.limit_per.hits) if self.limit_per else None
        how = self.min_score, self.collapse, self.mode, self.explain, self.evidence, limit
        rerank = None if self.rerank is True else int(self.rerank)
        return Query(self.query, self.top_k, self.filter, *how, rerank)


def _check_queries(queries: object, info: ValidationInfo) -> object:
    """Checks the number of queries before they are validated."""
    if not isinstance(queries, list) or not info.context:
        return queries
    limit = info.context.max_batch
    if len(queries) > limit:
        message = f"contains {len(queries)} queries; the limit is {limit} (CARE_MAX_BATCH)"
        raise QueryError("queries", message, code="batch_too_large", limit=limit)
    return queries


class BatchRequest(StrictRequest):
    """Several queries; results are in the same order."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"queries": [{"query": _QUESTION}]}]})

    queries: Annotated[list[SearchRequest], FailFast(), BeforeValidator(_check_queries)] = Field(
        min_length=1, description="At most CARE_MAX_BATCH queries."
    )


class Contribution(BaseModel):
    """The contribution of a channel to the score of a hit."""

    rank: int | None = Field(description="Rank in the channel, from 1; null if it is not found.")
    score: float | None = Field(description="Score in the channel; null if it is not found.")
    weight: float = Field(description="Weight of the channel.")


class EvidenceResponse(BaseModel):
    """The sentence of a hit that answers the query best."""

    start: int = Field(description="Where it starts in `text` [characters: Unicode code points].")
    end: int = Field(description="Where it ends in `text`.")
    text: str = Field(description="The sentence.")
    certain: bool = Field(
        False, description="Whether it is certain enough to be pointed out to a reader."
    )


class HitResponse(BaseModel):
    """A document, or a chunk of one."""

    id: str = Field(description="Id of the document or chunk.")
    score: float = Field(
        description="In mode dense the cosine similarity of query and document, in mode lexical "
        "the share of the highest BM25 score that a document could have (0 to 1), in mode hybrid "
        "the cosine similarity plus the weighted lexical score, or weighted reciprocal ranks. "
        "Late interaction adds its weighted score; the score of a server takes its place."
    )
    rank: int = Field(description="Position in the hits, from 1.")
    title: str
    text: str | None = Field(None, description="Omitted unless `include` names it.")
    metadata: dict[str, Any] | None = Field(None, description="Omitted unless `include` names it.")
    parent: str | None = Field(
        None, description="Id of the chunk's document, in an index of chunks."
    )
    chunk: int | None = Field(None, description="Number of the chunk in its document, from 0.")
    chunks: int | None = Field(None, description="Number of chunks of the document.")
    explain: dict[Channel, Contribution] | None = Field(
        None,
        description="What each channel of a hybrid search, and reranking, contribute, if asked "
        "for. The score of a server is the whole score.",
    )
    evidence: EvidenceResponse | None = Field(
        None,
        description="The sentence of the text that answers the query best, if asked for; null if "
        "the text has no letter or digit.",
    )


class IndexReference(BaseModel):
    """The index version that a response comes from."""

    name: str
    version: str


class SearchResponse(BaseModel):
    """The hits for one query, best first."""

    hits: list[HitResponse]
    index: IndexReference
    timings_ms: Timings
    mode: Mode = Field(description="The mode of the search.")
    cached: bool = Field(description="Whether the hits come from a cache.")
    overflow: bool = Field(
        description="Whether CARE_OVERFLOW_PAIR encoded the query, because the queue was full."
    )
    failed_channels: list[Channel] = Field(
        description="Channels of a hybrid search that failed or were late; the hits are those of "
        "the other one. With rerank, the hits could not be ranked again."
    )
    reranked: bool = Field(description="Whether the hits were ranked again.")
    answerable: float | None = Field(
        description="Whether the index seems to answer the query, from 0 to 1: below the threshold "
        "that GET /index has for the mode, the hits are likely to be about something else. Null if "
        "the pair has no calibration for the mode and for an index of this size, the overflow "
        "pair encoded the query, a channel failed, or no document matches the filter."
    )


class BatchResponse(BaseModel):
    """One response for each query, in order."""

    results: list[SearchResponse]


def _check_input(value: object) -> object:
    """Reports one error of the field, where a union reports one for each of its types."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("text_list", "is not a text or a non-empty list of texts")
    if isinstance(value[0], int | list):
        raise PydanticCustomError(
            "token_ids",
            "contains token ids, which belong to the vocabulary of another model: send texts "
            "(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))",
        )
    if not all(isinstance(text, str) for text in value):
        raise PydanticCustomError("text_list", "contains a value that is not a text")
    return value


class EmbeddingsRequest(StrictRequest):
    """Texts to encode with the query encoder; the fields are OpenAI's, and `input_type`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": [_QUESTION]}]})

    input: Annotated[
        str | Annotated[list[str], Field(min_length=1)], BeforeValidator(_check_input)
    ] = Field(
        description="A text, or a list of at most CARE_MAX_EMBEDDINGS texts. Arrays of token ids "
        "are rejected with the code token_ids: they belong to the vocabulary of another model. In "
        "LangChain set OpenAIEmbeddings(check_embedding_ctx_length=False)."
    )
    input_type: Literal["query", "document"] = Field(
        "query",
        description="The side of the pair that encodes the texts. The service loads the query "
        "encoder only; document is rejected with the code document_encoder_not_loaded.",
    )
    model: str | None = Field(None, max_length=256, description="Name of the pair; may be omitted.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Number of leading dimensions to keep. The shortened vector is normalised to "
        "unit norm.",
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="List of numbers, or base64 of little-endian float32."
    )
    user: str | None = Field(None, max_length=256, description="Ignored.")


class EmbeddingResponse(BaseModel):
    """The vector of one text, of unit norm."""

    object: Literal["embedding"]
    index: int = Field(description="Position in the request, from 0.")
    embedding: list[float] | str = Field(description="As `encoding_format` says.")


class Usage(BaseModel):
    """Number of tokens that were encoded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One vector for each text, in order."""

    object: Literal["list"]
    data: list[EmbeddingResponse]
    model: str
    usage: Usage


class ModelResponse(BaseModel):
    """A model in OpenAI's format: the pair whose query encoder is loaded."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When the active index version was built [s since 1970].")
    owned_by: str


class ModelsResponse(BaseModel):
    """The models of this service; it has one."""

    object: Literal["list"]
    data: list[ModelResponse]


class IndexResponse(IndexReference):
    """The index version that is served."""

    active: bool = Field(
        description="Whether this is the active version; false if that one cannot be loaded."
    )
    pair: str = Field(description="Name of the pair whose query encoder is loaded.")
    embedding_space: str
    dimension: int = Field(description="Dimensions of the vectors.")
    count: int = Field(description="Number of vectors: of documents or, if they are split, chunks.")
    documents: int = Field(description="Number of documents.")
    chunking: Chunking | None = Field(
        description="How documents are split into chunks, if they are."
    )
    factory: str = Field(description="Index type as a FAISS factory.")
    search_parameters: dict[str, int] = Field(description="Parameters of the index type.")
    recall: RecallReport
    modes: list[Mode] = Field(description="Modes of search; the first one is the default.")
    fusion: dict[str, float] = Field(description="Weights of a hybrid search.")
    reranker: RerankerName | None = Field(
        description="What ranks the hits of a query with `rerank` again; null if nothing does."
    )
    answerable_thresholds: dict[Mode, float] = Field(
        description="By mode, the `answerable` score below which nothing in the index seems to "
        "answer a query. Empty if the pair has no calibration for an index of this size."
    )
    filters: dict[str, list[FilterItem]] = Field(
        description="Values of each filter field, most frequent first: of the first 100 fields by "
        "name at most 100 values each. Texts of more than 200 characters are left out."
    )
    filter_counts: dict[str, list[int]] = Field(
        description="How many documents or chunks have each value of `filters`, in its order."
    )
    filter_field_count: int = Field(description="Number of filter fields, listed or not.")
    created_at: datetime = Field(description="When the version was built.")


class ListedIndex(BaseModel):
    """An index that a service serves."""

    name: str
    aliases: list[str] = Field(description="Other names of it.")
    default: bool = Field(description="Whether paths without an index mean it.")


class IndexesResponse(BaseModel):
    """The indexes that the key may search, by name."""

    indexes: list[ListedIndex]


class ListedVersion(BaseModel):
    """A version of an index on disk."""

    version: str
    active: bool = Field(description="Whether it is the active one, which services load.")
    served: bool = Field(description="Whether the process that answers serves it.")
    created_at: datetime = Field(description="When it was built.")
    documents: int
    count: int = Field(description="Number of vectors: of documents or, if they are split, chunks.")
    bytes: int = Field(
        description="Size of all files that it needs. Versions that writes made share most of them."
    )


class VersionsResponse(BaseModel):
    """The versions of an index on disk, in the order of their publication."""

    name: str
    versions: list[ListedVersion]


class Health(BaseModel):
    """The state of the process."""

    status: Literal["live", "ready"]


class FieldError(BaseModel):
    """An invalid field of a request."""

    field: str = Field(description="Path of the field, such as query or filter.department.")
    code: str = Field(description="Stable identifier of the error.")
    message: str
    limit: int | None = Field(None, description="The limit that the field exceeds, if any.")


class Problem(BaseModel):
    """An error, as RFC 9457 `application/problem+json`."""

    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(description="Stable identifier of the error; messages may be reworded.")
    detail: str
    request_id: str
    errors: list[FieldError] = Field(default_factory=list)


class OpenAIError(BaseModel):
    """The error object that OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIProblem(Problem):
    """An error of a route under /v1, with the error object of OpenAI."""

    error: OpenAIError
