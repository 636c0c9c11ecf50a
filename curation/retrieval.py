"""Candidate pools: the merged hits of several retrievers."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx2

from core.errors import CareError
from core.progress import progress_bar
from core.types import Document
from curation.config import (
    Bm25Retriever,
    PairRetriever,
    Retriever,
    RunRetriever,
    ServiceRetriever,
)
from evaluation.beir import Run
from evaluation.bm25 import bm25_run
from evaluation.dense import pair_run
from evaluation.metrics import ranked, read_run
from models.pairs import load_pair
from models.servers import TooLongError, http_client, post

# As in reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).
_RRF = 60

Pools = dict[str, list[str]]


def candidate_pools(
    retrievers: Sequence[Retriever],
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
    pool: Literal["fused", "union"] = "fused",
) -> Pools:
    """Returns for each query ids of documents in the top `depth` of any retriever.

    Ids are sorted by reciprocal rank fusion; a fused pool has the first `depth`, a union all.
    Vectors are cached in the folder `cache`.
    """
    size = depth if pool == "fused" else None
    runs = [_run(retriever, documents, queries, depth, cache) for retriever in retrievers]
    pools = {}
    for query in queries:
        fused: dict[str, float] = {}
        for run in runs:
            for rank, (id_, _) in enumerate(ranked(run.get(query, {}))[:depth], start=1):
                fused[id_] = fused.get(id_, 0.0) + 1 / (_RRF + rank)
        pools[query] = [id_ for id_, _ in ranked(fused)[:size]]
    return pools


def _run(
    retriever: Retriever,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
) -> Run:
    match retriever:
        case Bm25Retriever():
            return bm25_run(documents, queries, depth)
        case RunRetriever(path=path):
            return _of_corpus(read_run(path), documents, queries, path)
        case ServiceRetriever(url=url):
            return _of_corpus(search_run(url, queries, depth), documents, queries, url)
        case PairRetriever(pair=pair, batch_size=batch_size, threads=threads):
            options = {"batch_size": batch_size, "threads": threads}
            return pair_run(load_pair(pair), documents, queries, {}, depth, cache, **options)


def _of_corpus(
    run: Run, documents: Sequence[Document], queries: Mapping[str, str], source: Path | str
) -> Run:
    """Returns a run without other documents and queries: cleaning or the sample may omit some."""
    known = {document.id for document in documents}
    kept = {
        query: {id_: score for id_, score in scores.items() if id_ in known}
        for query, scores in run.items()
        if query in queries
    }
    if not any(kept.values()):
        reason = "contains no document of the corpus for any query: is it a run on other data?"
        raise CareError.at(source, reason, "run_of_other_data")
    return kept


_BATCH = 32
# Longest wait for a response, and the longest response [s, bytes].
_SECONDS, _BYTES = 120.0, 64 * 1024 * 1024
# Bytes of an error response that a message quotes.
_QUOTED = 2000


def search_run(url: str, queries: Mapping[str, str], top_k: int) -> Run:
    """Searches all queries in batches and returns scores by document id, by query id.

    The default mode of the index is searched. In an index of chunks, the score of a document is
    that of its best chunk. Not for use in a running event loop.
    """
    return asyncio.run(_search_all(url, queries, top_k))


async def _search_all(url: str, queries: Mapping[str, str], top_k: int) -> Run:
    ids, shared = list(queries), {"include": [], "top_k": top_k, "collapse": True}
    run: Run = {}
    async with http_client(httpx2.AsyncClient, url) as client:
        for start in progress_bar("search", range(0, len(ids), _BATCH), unit="batches"):
            part = ids[start : start + _BATCH]
            body = {"queries": [{"query": queries[id_], **shared} for id_ in part]}
            for id_, result in zip(part, await _search(client, url, body), strict=True):
                if failed := result.get("failed_channels"):
                    message = f"query '{id_}': the channel {failed[0]} of the search failed or was "
                    message += "late: see the log of the service"
                    raise CareError(message, code="search_failed", id=id_, failed=failed)
                run[id_] = {
                    str(hit.get("parent", hit["id"])): hit["score"] for hit in result["hits"]
                }
    return run


async def _search(client: httpx2.AsyncClient, service: str, body: Mapping[str, Any]) -> Any:
    """Returns the results of a batch of queries."""
    url = service.rstrip("/") + "/search/batch"
    try:
        response = await post(client, url, body, seconds=_SECONDS, limit=_BYTES, errors=True)
    except TooLongError as error:
        message = f"{service} returned {error}: is it a search service?"
        raise CareError(message, code="search_failed", limit=_BYTES) from error
    except (TimeoutError, httpx2.TransportError, httpx2.InvalidURL) as error:
        message = f"{service} cannot be reached ({type(error).__name__}): start the service"
        raise CareError(message, code="service_unreachable", url=service) from error
    if response.status_code != 200:
        text = response.content[:_QUOTED].decode(errors="replace")
        message = f"{url} returned status {response.status_code}: {text}"
        raise CareError(message, code="search_failed", status=response.status_code)
    try:
        return json.loads(response.content)["results"]
    except (ValueError, LookupError, TypeError) as error:
        message = f"{url} returned no results in JSON: is it a search service?"
        raise CareError(message, code="search_failed") from error
