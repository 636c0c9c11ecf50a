"""Runs of a search service, over HTTP."""

from collections.abc import Mapping
from typing import Any

import httpx2
from tqdm import tqdm

from core.errors import CareError
from evaluation.beir import Run

_BATCH = 32


def search_run(url: str, queries: Mapping[str, str], top_k: int) -> Run:
    """Searches all queries in batches and returns scores by document id, by query id.

    Queries are texts by id. In an index of chunks, the score of a document is that of its best
    chunk. A response with a status other than 200 is a CareError.
    """
    run: Run = {}
    ids = list(queries)
    with httpx2.Client(base_url=url, timeout=120.0) as client:
        for start in tqdm(range(0, len(ids), _BATCH), desc="search", unit=" batches"):
            part = ids[start : start + _BATCH]
            fields = {"top_k": top_k, "collapse": True, "include": []}
            body = {"queries": [{"query": queries[id_]} | fields for id_ in part]}
            results = _content(client.post("/search/batch", json=body))["results"]
            for id_, result in zip(part, results, strict=True):
                run[id_] = {hit.get("parent", hit["id"]): hit["score"] for hit in result["hits"]}
    return run


def served_version(url: str) -> str:
    """Returns the id of the index version that a service serves."""
    return str(_content(httpx2.get(f"{url}/index", timeout=120.0))["version"])


def _content(response: httpx2.Response) -> Any:
    if response.status_code != 200:
        message = f"{response.url} returned status {response.status_code}: {response.text}"
        raise CareError(message, code="search_failed", status=response.status_code)
    return response.json()
