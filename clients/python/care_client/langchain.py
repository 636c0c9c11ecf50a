"""LangChain: a retriever, a vector store, and the vectors of queries (extra `langchain`)."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, PrivateAttr, SecretStr

from care_client.adapters import Clients, metadata
from care_client.errors import InvalidRequestError, invalid
from care_client.exchange import URL
from care_client.models import (
    DocumentResponse,
    EmbeddingsResponse,
    FieldError,
    HitResponse,
    SearchResponse,
    WriteResponse,
)


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


class CareVectorStore(VectorStore):
    """Documents of an index, which the service encodes; it needs a key with the role `write`.

    The metadata of a document are those of the index and, as `title`, its title. A chunk also has
    the id of its document, as `parent`. All methods raise `CareClientError`.

    Args:
        url: As of `Client`, like `index`, `api_key`, `timeout` and `retries`.
        options: Options of all searches, such as `filter` and `mode`.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        index: str | None = None,
        api_key: str | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        **options: Any,
    ) -> None:
        how = {"api_key": api_key, "timeout": timeout, "retries": retries}
        self._clients = Clients(url, index=index, **how)
        self._options = options

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **settings: Any,
    ) -> Self:
        """Adds texts to an index, which exists.

        Args:
            texts: The texts.
            embedding: None or `CareEmbeddings`, because the service encodes.
            metadatas: Metadata of each.
            ids: Their ids; by default new ones.
            settings: Arguments of the store.

        Raises:
            InvalidRequestError: For other embeddings, or if a document is rejected.
        """
        if not isinstance(embedding, CareEmbeddings | None):
            raise invalid("embedding", "must be None, because the service encodes documents")
        store = cls(**settings)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **options: Any
    ) -> list[str]:
        """Adds documents, and replaces those with the same ids.

        Args:
            documents: The documents. One without an id gets a new one.
            ids: Ids in place of theirs.
            options: `batch`, `progress` and `timeout`, as of `Client.put_documents`.

        Returns:
            The ids.

        Raises:
            InvalidRequestError: If documents are rejected; the others are written.
        """
        records = _records(documents, ids)
        _check(self._clients.sync.put_documents(records, **options))
        return [record["_id"] for record in records]

    async def aadd_documents(
        self, documents: list[Document], *, ids: list[str] | None = None, **options: Any
    ) -> list[str]:
        """As `add_documents`."""
        records = _records(documents, ids)
        _check(await self._clients.loops.put_documents(records, **options))
        return [record["_id"] for record in records]

    def delete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """Deletes documents.

        Args:
            ids: Their ids; those of chunks delete nothing.
            options: `filter`, in place of ids, and `timeout`, as of `Client.delete_documents`.

        Returns:
            Whether all were there.
        """
        return not self._clients.sync.delete_documents(ids, **options).missing

    async def adelete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """As `delete`."""
        return not (await self._clients.loops.delete_documents(ids, **options)).missing

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Returns those of these documents and chunks that exist; of a split one, its chunks."""

        def get(id_: str) -> list[Document]:
            try:
                return _stored(self._clients.sync.document(id_))
            except InvalidRequestError as error:
                return _none(error)

        return [document for id_ in ids for document in get(id_)]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """As `get_by_ids`."""

        async def get(id_: str) -> list[Document]:
            try:
                return _stored(await self._clients.loops.document(id_))
            except InvalidRequestError as error:
                return _none(error)

        return [document for id_ in ids for document in await get(id_)]

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        """Returns the `k` best hits; options replace those of the store."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **options)]

    async def asimilarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        """As `similarity_search`."""
        found = await self.asimilarity_search_with_score(query, k, **options)
        return [document for document, _ in found]

    def similarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        """Returns the `k` best hits with their scores: higher is better."""
        options = {**self._options, "top_k": k, **options}
        return _scored(self._clients.sync.search(query, **options))

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        """As `similarity_search_with_score`."""
        options = {**self._options, "top_k": k, **options}
        return _scored(await self._clients.loops.search(query, **options))

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: score


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


def _records(documents: Sequence[Document], ids: Sequence[str] | None) -> list[dict[str, Any]]:
    if ids is not None and len(ids) != len(documents):
        raise invalid("ids", f"are {len(ids)} for {len(documents)} documents")
    given = [document.id for document in documents] if ids is None else ids
    return [
        {"_id": id_ or str(uuid.uuid4()), "text": document.page_content, **_titled(document)}
        for document, id_ in zip(documents, given, strict=True)
    ]


def _titled(document: Document) -> dict[str, Any]:
    own = dict(document.metadata)
    titled = isinstance(own.get("title"), str)
    return {"title": own.pop("title"), "metadata": own} if titled else {"metadata": own}


def _check(response: WriteResponse) -> None:
    errors = [
        FieldError(field=f"documents.{one.position}", code=one.code, message=one.reason)
        for one in response.rejected
    ]
    if errors:
        message = f"{errors[0].field}: {errors[0].message}; {len(errors)} documents are rejected, "
        raise InvalidRequestError(
            f"{message}the others are written", code=errors[0].code, errors=errors
        )


def _stored(found: DocumentResponse | HitResponse) -> list[Document]:
    own = {name: value for name in ("title", "parent") if (value := getattr(found, name))}
    known = {**(found.metadata or {}), **own}
    if isinstance(found, DocumentResponse) and found.passages:
        known["parent"] = found.id
        return [Document(id=p.id, page_content=p.text, metadata=known) for p in found.passages]
    return [Document(id=found.id, page_content=found.text or "", metadata=known)]


def _none(error: InvalidRequestError) -> list[Document]:
    """Returns no document for an unknown id; raises another error."""
    if error.code != "unknown_document":
        raise error
    return []


def _scored(response: SearchResponse) -> list[tuple[Document, float]]:
    return [(_stored(hit)[0], hit.score) for hit in response.hits]


def _vectors(response: EmbeddingsResponse) -> list[list[float]]:
    return [item.embedding for item in response.data if not isinstance(item.embedding, str)]
