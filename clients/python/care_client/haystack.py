"""Haystack: a retriever as a component (extra `haystack`)."""

from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.utils import Secret

from care_client.adapters import Clients, metadata
from care_client.exchange import URL
from care_client.models import SearchResponse


@component
class CareRetriever:
    """Returns the hits of a search as documents.

    Args:
        url: As of `Client`, like `index`, `timeout` and `retries`.
        api_key: Key of the service; only one from the environment can be serialised.
        options: Options of the search, such as `top_k`, `filter` and `min_score`. A filter is one
            of the service, not of Haystack.
    """

    def __init__(
        self,
        url: str = URL,
        *,
        index: str | None = None,
        api_key: Secret | None = None,
        timeout: float = 10.0,
        retries: int = 3,
        **options: Any,
    ) -> None:
        self._api_key = api_key
        how = {"timeout": timeout, "retries": retries}
        self._settings: dict[str, Any] = {"url": url, "index": index, **how}
        self._options = options
        key = api_key.resolve_value() if api_key else None
        self._clients = Clients(**self._settings, api_key=key)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments of the component, for a pipeline's file."""
        key = self._api_key.to_dict() if self._api_key else None
        return dict(default_to_dict(self, **self._settings, api_key=key, **self._options))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "CareRetriever":
        """Returns the component of a pipeline's file."""
        if key := data["init_parameters"].get("api_key"):
            data["init_parameters"]["api_key"] = Secret.from_dict(key)
        retriever: CareRetriever = default_from_dict(cls, data)
        return retriever

    @component.output_types(documents=list[Document])
    def run(self, query: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Searches; `options` replace those of the component."""
        found = self._clients.sync.search(query, **{**self._options, **(options or {})})
        return {"documents": _documents(found)}

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Searches; `options` replace those of the component."""
        found = await self._clients.loops.search(query, **{**self._options, **(options or {})})
        return {"documents": _documents(found)}


def _documents(response: SearchResponse) -> list[Document]:
    return [
        Document(
            id=hit.id, content=hit.text, meta=metadata(hit, response.answerable), score=hit.score
        )
        for hit in response.hits
    ]
