"""LlamaIndex: a retriever (extra `llama-index`)."""

from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from care_client.adapters import Clients, metadata, search_fields
from care_client.exchange import URL
from care_client.models import SearchResponse


class CareRetriever(BaseRetriever):
    """Returns the hits of a search as nodes with scores.

    Args:
        url: As of `Client`, like `index`, `api_key`, `timeout` and `retries`.
        options: Options of the search, such as `top_k`, `filter` and `min_score`.
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
        super().__init__()
        how = {"api_key": api_key, "timeout": timeout, "retries": retries}
        self._clients = Clients(url, index=index, **how)
        self._options = options

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _nodes(self._clients.sync.search(query_bundle.query_str, **self._options))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _nodes(await self._clients.loops.search(query_bundle.query_str, **self._options))


def _nodes(response: SearchResponse) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(
                id_=hit.id,
                text=hit.text or "",
                metadata=metadata(hit, response.answerable),
                # A prompt has the document, whatever question found it.
                excluded_llm_metadata_keys=search_fields(hit, response.answerable),
                excluded_embed_metadata_keys=search_fields(hit, response.answerable),
            ),
            score=hit.score,
        )
        for hit in response.hits
    ]
