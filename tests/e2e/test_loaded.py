"""A query has the same hits under load as in an idle service, in any batch."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from core.service_process import running_service
from tests.conftest import SAMPLE

pytestmark = pytest.mark.e2e

QUERIES = [json.loads(line)["text"] for line in (SAMPLE / "queries.jsonl").open(encoding="utf-8")]
# Short and long queries, so that they are padded and batched with each other.
TEXTS = [*QUERIES, *("。".join(QUERIES[i : i + 5]) for i in range(0, len(QUERIES), 9))]

# A score varies in its last digits, so that it may be rounded to the next multiple of 1e-6.
SAME = 1.5e-6


def ask(client: httpx2.Client, text: str) -> list[dict[str, Any]]:
    response = client.post("/search", json={"query": text}, timeout=60)
    assert response.status_code == 200
    hits: list[dict[str, Any]] = response.json()["hits"]
    return hits


def counter(metrics: str, name: str) -> float:
    return next(
        float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"{name} ")
    )


def test_a_query_gets_the_same_hits_alone_and_in_any_batch(indexes: Path) -> None:
    with (
        running_service(indexes, "sample", CACHE_ENTRIES="0") as service,
        httpx2.Client(base_url=service.url) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        alone = [ask(client, text) for text in TEXTS]
        loaded = list(pool.map(lambda text: ask(client, text), TEXTS))
        queries = [{"query": text} for text in TEXTS[:64]]
        batch = client.post("/search/batch", json={"queries": queries}, timeout=60).json()
        metrics = client.get("/metrics").text
    queries_encoded, batches = (
        counter(metrics, f"care_batch_queries_{n}") for n in ("sum", "count")
    )
    assert queries_encoded > 1.2 * batches, "no batches were formed"
    for answers in (loaded, [result["hits"] for result in batch["results"]]):
        for one, other in zip(alone, answers, strict=False):
            scores = {hit["id"]: hit["score"] for hit in one}
            assert {hit["id"]: hit["score"] for hit in other} == pytest.approx(scores, abs=SAME)
            # Hits whose scores differ by less may change places.
            ordered = [scores[hit["id"]] for hit in other]
            assert all(better > worse - SAME for better, worse in pairwise(ordered))
