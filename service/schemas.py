"""The HTTP contract: what requests and responses hold."""

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

from core.manifest import Chunking, RecallReport
from service.metrics import Timings

Include = Literal["text", "metadata"]


def _check_filter_item(value: object) -> object:
    """Makes one error of a wrong value, where a union makes one for each of its types."""
    if not isinstance(value, str | int | bool):
        raise PydanticCustomError("filter_item", "is not text, a whole number or a boolean")
    return value


FilterItem = Annotated[str | int | bool, BeforeValidator(_check_filter_item)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SearchRequest(_Request):
    """One query."""

    query: str = Field(description="The question, in the user's words.")
    top_k: int = Field(10, ge=1, description="Hits wanted.")
    filter: dict[str, Annotated[list[FilterItem], Field(min_length=1, max_length=100)]] = Field(
        default_factory=dict,
        max_length=16,
        description="Accepted values by metadata field; every field must match.",
        examples=[{"department": ["心血管科"]}],
    )
    min_score: float | None = Field(
        None, ge=-1, le=1, description="Lowest cosine similarity of a hit."
    )
    collapse: bool = Field(
        False,
        description="Whether each document is found once, by its best chunk; without chunks "
        "every document is.",
    )
    include: list[Include] = Field(
        default_factory=lambda: list(get_args(Include)),
        description="What hits carry besides titles.",
    )


class BatchRequest(_Request):
    """Several queries, answered in order."""

    # One error is enough: a body of faults alone would cost seconds and megabytes.
    queries: Annotated[list[SearchRequest], FailFast()] = Field(min_length=1)


class HitResponse(BaseModel):
    """A document that was found, or a chunk of one."""

    id: str
    score: float = Field(description="Cosine similarity.")
    rank: int = Field(description="From 1.")
    title: str
    text: str | None = None
    metadata: dict[str, Any] | None = None
    parent: str | None = Field(
        None, description="In an index of chunks the id of the document that this is a chunk of."
    )
    chunk: int | None = Field(None, description="Number of the chunk in its document, from 0.")
    chunks: int | None = Field(None, description="Number of chunks of the document.")


class IndexReference(BaseModel):
    """The index version that answered."""

    name: str
    version: str


class SearchResponse(BaseModel):
    """The hits for one query, best first."""

    hits: list[HitResponse]
    index: IndexReference
    timings_ms: Timings
    cached: bool


class BatchResponse(BaseModel):
    """One response for each query, in order."""

    results: list[SearchResponse]


def _check_input(value: object) -> object:
    """Names the setting of a client that sends token ids, for which there is one error."""
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise PydanticCustomError(
            "token_ids",
            "holds no texts: token ids are those of another model; have the client send texts "
            "(LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)",
        )
    return value


class EmbeddingsRequest(_Request):
    """Texts to encode as queries, in the words of OpenAI's interface."""

    input: Annotated[
        str | Annotated[list[str], Field(min_length=1)], BeforeValidator(_check_input)
    ] = Field(description="A text or several.")
    model: str | None = Field(None, description="The pair's name, or nothing.")
    dimensions: int | None = Field(
        None, ge=1, description="First dimensions to keep; the rest is cut off, then normalized."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or base64 of little-endian float32."
    )
    user: str | None = Field(None, description="Ignored.")


class EmbeddingResponse(BaseModel):
    """The vector of one text, of unit norm."""

    object: Literal["embedding"]
    index: int = Field(description="Position in the request, from 0.")
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were encoded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One vector for each text, in order."""

    object: Literal["list"]
    data: list[EmbeddingResponse]
    model: str
    usage: Usage


class ModelResponse(BaseModel):
    """A model in the words of OpenAI's interface: the pair whose query side encodes texts."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When the active index version was built [s since 1970].")
    owned_by: str


class ModelsResponse(BaseModel):
    """The models of this service."""

    object: Literal["list"]
    data: list[ModelResponse]


class IndexResponse(IndexReference):
    """The active index version."""

    pair: str
    embedding_space: str
    dimension: int
    count: int = Field(description="Documents or, if long ones are cut, chunks.")
    documents: int
    chunking: Chunking | None = Field(description="How long documents are cut, if they are.")
    factory: str
    search_parameters: dict[str, int]
    recall: RecallReport
    filters: dict[str, list[FilterItem]] = Field(
        description="Values of each filter field, most frequent first, at most 100."
    )
    created_at: datetime


class Health(BaseModel):
    """The state of the service."""

    status: Literal["live", "ready"]


class FieldError(BaseModel):
    """What is wrong with one field of a request."""

    field: str
    code: str = Field(description="Stable identifier of the error.")
    message: str


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
    """The error again, in the words of OpenAI's interface, where its clients look for it."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIProblem(Problem):
    """An error of a route of OpenAI's interface."""

    error: OpenAIError
