"""Runs and response times of a search service, over HTTP."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2
from tqdm import tqdm

from core.errors import CareError
from core.types import Mode
from evaluation.beir import Run

_BATCH = 32


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
        CareError: If a response has a status other than 200; with a mode, also if one channel of a
            search failed.
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
    all of them before the next one. A response with a status other than 200 is a CareError.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    with httpx2.Client(base_url=url, timeout=120.0) as client:
        for query in tqdm(queries, desc="response times", unit=" queries"):
            for name, taken in times.items():
                started = time.perf_counter()
                response = client.post("/search", json={"query": query, **systems[name]})
                taken.append(time.perf_counter() - started)
                _content(response)
    return times


def served_index(url: str) -> dict[str, Any]:
    """Returns what a service tells about the index version that it serves (`GET /index`)."""
    content: dict[str, Any] = _content(httpx2.get(f"{url}/index", timeout=120.0))
    return content


def _search(
    url: str, queries: Mapping[str, str], fields: Mapping[str, Any]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the hits of each query; `fields` are those of each request."""
    ids = list(queries)
    mode = fields.get("mode", "")
    with httpx2.Client(base_url=url, timeout=120.0) as client:
        for start in tqdm(range(0, len(ids), _BATCH), desc=f"{mode} search", unit=" batches"):
            part = ids[start : start + _BATCH]
            shared = {"include": [], **fields}
            body = {"queries": [{"query": queries[id_], **shared} for id_ in part]}
            results = _content(client.post("/search/batch", json=body))["results"]
            for id_, result in zip(part, results, strict=True):
                if mode and (failed := result["failed_channels"]):
                    message = f"query '{id_}': the channel {failed[0]} of the search failed or was "
                    message += "late: see the log of the service"
                    raise CareError(message, code="search_failed", id=id_, failed=failed)
                yield id_, result["hits"]


def _document(hit: Mapping[str, Any]) -> str:
    return str(hit.get("parent", hit["id"]))


def _content(response: httpx2.Response) -> Any:
    if response.status_code != 200:
        message = f"{response.url} returned status {response.status_code}: {response.text}"
        raise CareError(message, code="search_failed", status=response.status_code)
    return response.json()
