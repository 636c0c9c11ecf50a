"""LangChain: a retriever, and the vectors of queries (extra `langchain`)."""

from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, PrivateAttr, SecretStr

from care_client.adapters import Clients, metadata
from care_client.exchange import URL
from care_client.models import EmbeddingsResponse, SearchResponse


class CareRetriever(BaseRetriever):
    """Returns the hits of a search as documents.

    Other arguments are options of the search, such as `top_k`, `filter` and `min_score`; those of
    `invoke` replace them. The metadata of a document also have `title`, `score` and `rank`.
    """

    model_config = ConfigDict(extra="allow")

    url: str = URL
    index: str | None = None
    api_key: SecretStr | None = None
    timeout: float = 10.0
    retries: int = 3
    _clients: Clients = PrivateAttr()

    def model_post_init(self, _: Any) -> None:
        """Makes the clients."""
        key = self.api_key.get_secret_value() if self.api_key else None
        how = {"timeout": self.timeout, "retries": self.retries}
        self._clients = Clients(self.url, index=self.index, api_key=key, **how)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**(self.model_extra or {}), **options}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return _documents(self._clients.sync.search(query, **self._options(options)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **options: Any
    ) -> list[Document]:
        return _documents(await self._clients.loops.search(query, **self._options(options)))


class CareEmbeddings(Embeddings):
    """Encodes queries; documents only if the service can, which is an error otherwise.

    Args:
        url: As of `Client`, like `api_key`, `timeout` and `retries`.
        dimensions: Number of leading dimensions to keep.
    """

    def __init__(self, url: str = URL, *, dimensions: int | None = None, **settings: Any) -> None:
        self._clients = Clients(url, **settings)
        self._options: Any = {"dimensions": dimensions}

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of a query."""
        return _vectors(self._clients.sync.embeddings(text, **self._options))[0]

    async def aembed_query(self, text: str) -> list[float]:
        """Returns the vector of a query."""
        return _vectors(await self._clients.loops.embeddings(text, **self._options))[0]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns the vectors of documents.

        Raises:
            InvalidRequestError: With the code `document_encoder_not_loaded`, from a service that
                encodes queries only.
        """
        options = {**self._options, "input_type": "document"}
        return _vectors(self._clients.sync.embeddings(texts, **options))

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """As `embed_documents`."""
        options = {**self._options, "input_type": "document"}
        return _vectors(await self._clients.loops.embeddings(texts, **options))


def _documents(response: SearchResponse) -> list[Document]:
    return [
        Document(
            id=hit.id, page_content=hit.text or "", metadata=metadata(hit, response.answerable)
        )
        for hit in response.hits
    ]


def _vectors(response: EmbeddingsResponse) -> list[list[float]]:
    return [item.embedding for item in response.data if not isinstance(item.embedding, str)]
