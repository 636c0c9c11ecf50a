"""Client of the CARE retrieval service."""

from care_client.async_client import AsyncClient
from care_client.client import Client
from care_client.errors import (
    AccessError,
    CareClientError,
    ConnectionFailedError,
    DeadlineError,
    InvalidRequestError,
    InvalidResponseError,
    ServerError,
    UnavailableError,
)
from care_client.models import (
    BatchResponse,
    DocumentResponse,
    EmbeddingsResponse,
    FieldError,
    Filter,
    Health,
    HitResponse,
    IndexesResponse,
    IndexResponse,
    ListedIndex,
    ListedVersion,
    ModelsResponse,
    SearchOptions,
    SearchResponse,
    VersionsResponse,
)

__all__ = [
    "AccessError",
    "AsyncClient",
    "BatchResponse",
    "CareClientError",
    "Client",
    "ConnectionFailedError",
    "DeadlineError",
    "DocumentResponse",
    "EmbeddingsResponse",
    "FieldError",
    "Filter",
    "Health",
    "HitResponse",
    "IndexResponse",
    "IndexesResponse",
    "InvalidRequestError",
    "InvalidResponseError",
    "ListedIndex",
    "ListedVersion",
    "ModelsResponse",
    "SearchOptions",
    "SearchResponse",
    "ServerError",
    "UnavailableError",
    "VersionsResponse",
]
