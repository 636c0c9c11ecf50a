"""Runs and response times of a search service, over HTTP."""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import httpx2

from core.errors import CareError
from core.progress import progress_bar
from core.types import Mode
from evaluation.beir import Run
from models.servers import http_client

_BATCH = 32
# Longest wait for a response, and the longest response [s, bytes].
_SECONDS, _BYTES = 120.0, 64 * 1024 * 1024
# Bytes of an error response that a message quotes.
_QUOTED = 2000


class ChannelHit(NamedTuple):
    """A hit of a hybrid search, with its scores in both channels; 0 if full text lacks it."""

    document: str
    dense: float
    lexical: float


def search_run(
    url: str,
    queries: Mapping[str, str],
    top_k: int,
    mode: Mode | None = None,
    *,
    rerank: bool = False,
) -> Run:
    """Searches all queries in batches and returns scores by document id, by query id.

    In an index of chunks, the score of a document is that of its best chunk.

    Args:
        url: Address of the service.
        queries: Texts by id.
        top_k: Number of hits of each query.
        mode: Mode of the search; None for the default of the index.
        rerank: Whether the hits are ranked again.

    Raises:
        CareError: If the service cannot be reached, is late, or returns a status other than 200;
            with a mode, also if one channel of a search failed.
    """
    fields: dict[str, Any] = {"top_k": top_k, "collapse": True, "rerank": rerank}
    if mode:
        fields["mode"] = mode
    return {
        id_: {_document(hit): hit["score"] for hit in hits}
        for id_, hits in _search(url, queries, fields)
    }


def search_channels(
    url: str, queries: Mapping[str, str], top_k: int
) -> dict[str, list[ChannelHit]]:
    """Returns the hits of a hybrid search with the scores of the channels, by query id.

    Hits of an index of chunks are chunks, under the ids of their documents. Errors are those of
    `search_run`.
    """
    fields = {"top_k": top_k, "mode": "hybrid", "explain": True}
    return {
        id_: [
            ChannelHit(
                _document(hit),
                hit["explain"]["dense"]["score"],
                hit["explain"]["lexical"]["score"] or 0.0,
            )
            for hit in hits
        ]
        for id_, hits in _search(url, queries, fields)
    }


def search_times(
    url: str, queries: Sequence[str], systems: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Returns the response times of single requests by one client, by system [s].

    A system is given by the fields of its requests. Systems take turns: each query is searched by
    all of them before the next one. Errors are those of `search_run`.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    with _Service(url) as service:
        for query in progress_bar("response times", queries, unit="queries"):
            for name, taken in times.items():
                started = time.perf_counter()
                response = service.send("/search", {"query": query, **systems[name]})
                taken.append(time.perf_counter() - started)
                _content(*response)
    return times


def served_index(url: str) -> dict[str, Any]:
    """Returns what a service tells about the index version that it serves (`GET /index`)."""
    with _Service(url) as service:
        content: dict[str, Any] = _content(*service.send("/index"))
    return content


def _search(
    url: str, queries: Mapping[str, str], fields: Mapping[str, Any]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the hits of each query; `fields` are those of each request."""
    ids = list(queries)
    mode = fields.get("mode", "")
    with _Service(url) as service:
        starts = range(0, len(ids), _BATCH)
        for start in progress_bar(f"{mode} search", starts, unit="batches"):
            part = ids[start : start + _BATCH]
            shared = {"include": [], **fields}
            body = {"queries": [{"query": queries[id_], **shared} for id_ in part]}
            results = _content(*service.send("/search/batch", body))["results"]
            for id_, result in zip(part, results, strict=True):
                if mode and (failed := result["failed_channels"]):
                    message = f"query '{id_}': the channel {failed[0]} of the search failed or was "
                    message += "late: see the log of the service"
                    raise CareError(message, code="search_failed", id=id_, failed=failed)
                yield id_, result["hits"]


def _document(hit: Mapping[str, Any]) -> str:
    return str(hit.get("parent", hit["id"]))


class _Service:
    """The connections to a service; not for use in a running event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        # Compressed responses would have no bound in memory.
        headers = {"Accept-Encoding": "identity"}
        self._client = http_client(httpx2.AsyncClient, url, timeout=None, headers=headers)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner as runner:
            runner.run(self._client.aclose())

    def send(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[httpx2.Response, bytes]:
        """Sends a GET, or a POST of JSON; returns the response and its body."""
        try:
            return self._runner.run(self._exchange(path, body))
        except (TimeoutError, httpx2.TransportError, httpx2.InvalidURL) as error:
            message = f"{self._url} cannot be reached ({type(error).__name__}): start the service"
            raise CareError(message, code="service_unreachable", url=self._url) from error

    async def _exchange(
        self, path: str, body: Mapping[str, Any] | None
    ) -> tuple[httpx2.Response, bytes]:
        content = bytearray()
        method, address = "GET" if body is None else "POST", self._url.rstrip("/") + path
        # The head of a response can be as slow as its body.
        async with (
            asyncio.timeout(_SECONDS),
            self._client.stream(method, address, json=body) as response,
        ):
            async for piece in response.aiter_raw():
                content += piece
                if len(content) > _BYTES:
                    message = (
                        f"{self._url} returned more than {_BYTES} bytes: is it a search service?"
                    )
                    raise CareError(message, code="search_failed", limit=_BYTES)
        return response, bytes(content)


def _content(response: httpx2.Response, body: bytes) -> Any:
    if response.status_code != 200:
        text = body[:_QUOTED].decode(errors="replace")
        message = f"{response.url} returned status {response.status_code}: {text}"
        raise CareError(message, code="search_failed", status=response.status_code)
    try:
        return json.loads(body)
    except ValueError as error:
        message = f"{response.url} returned no JSON: is it a search service?"
        raise CareError(message, code="search_failed") from error
