"""Runs of a search service, over HTTP."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx2

from core.errors import CareError
from core.progress import progress_bar
from evaluation.beir import Run
from models.servers import TooLongError, http_client, post

_BATCH = 32
# Longest wait for a response, and the longest response [s, bytes].
_SECONDS, _BYTES = 120.0, 64 * 1024 * 1024
# Bytes of an error response that a message quotes.
_QUOTED = 2000


def search_run(url: str, queries: Mapping[str, str], top_k: int) -> Run:
    """Searches all queries in batches and returns scores by document id, by query id.

    The default mode of the index is searched. In an index of chunks, the score of a document is
    that of its best chunk.
    """
    ids = list(queries)
    run: Run = {}
    with _Service(url) as service:
        for start in progress_bar("search", range(0, len(ids), _BATCH), unit="batches"):
            part = ids[start : start + _BATCH]
            shared = {"include": [], "top_k": top_k, "collapse": True}
            results = service.search([{"query": queries[id_], **shared} for id_ in part])
            for id_, result in zip(part, results, strict=True):
                if failed := result.get("failed_channels"):
                    message = f"query '{id_}': the channel {failed[0]} of the search failed or was "
                    message += "late: see the log of the service"
                    raise CareError(message, code="search_failed", id=id_, failed=failed)
                run[id_] = {
                    str(hit.get("parent", hit["id"])): hit["score"] for hit in result["hits"]
                }
    return run


class _Service:
    """The connections to a service; not for use in a running event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = http_client(httpx2.AsyncClient, url)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner as runner:
            runner.run(self._client.aclose())

    def search(self, queries: Sequence[Mapping[str, Any]]) -> Any:
        """Returns the results of queries."""
        url = self._url.rstrip("/") + "/search/batch"
        body = {"queries": queries}
        call = post(self._client, url, body, seconds=_SECONDS, limit=_BYTES, errors=True)
        try:
            response = self._runner.run(call)
        except TooLongError as error:
            message = f"{self._url} returned {error}: is it a search service?"
            raise CareError(message, code="search_failed", limit=_BYTES) from error
        except (TimeoutError, httpx2.TransportError, httpx2.InvalidURL) as error:
            message = f"{self._url} cannot be reached ({type(error).__name__}): start the service"
            raise CareError(message, code="service_unreachable", url=self._url) from error
        if response.status_code != 200:
            text = response.content[:_QUOTED].decode(errors="replace")
            message = f"{url} returned status {response.status_code}: {text}"
            raise CareError(message, code="search_failed", status=response.status_code)
        try:
            return json.loads(response.content)["results"]
        except (ValueError, LookupError, TypeError) as error:
            message = f"{url} returned no results in JSON: is it a search service?"
            raise CareError(message, code="search_failed") from error
