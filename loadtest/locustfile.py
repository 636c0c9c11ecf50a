"""Traffic of RAG applications: some questions asked often, single and in batches, filtered or not.

Questions come from the sample queries; `CARE_LOAD_QUERIES` names another JSONL file.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

from locust import FastHttpUser, constant, task

QUERIES = Path(os.environ.get("CARE_LOAD_QUERIES", "data/sample/queries.jsonl"))
BATCH = 8
TOP_K = 10

TEXTS = [json.loads(line)["text"] for line in QUERIES.read_text(encoding="utf-8").splitlines()]
# Zipf's law: the n-th most popular question is asked 1/n as often as the first.
WEIGHTS = [1 / rank for rank in range(1, len(TEXTS) + 1)]


def _body(**more: Any) -> dict[str, Any]:
    return {"query": random.choices(TEXTS, WEIGHTS)[0], "top_k": TOP_K, **more}


class RagApplication(FastHttpUser):
    """Asks the next question as soon as the last one is answered."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Learns the departments that searches can be filtered by."""
        filters = self.client.get("/index", name="/index").json()["filters"]
        self.departments = filters.get("department", [])

    @task(16)
    def search(self) -> None:
        """One question."""
        self.client.post("/search", json=_body(), name="/search")

    @task(3)
    def search_in_department(self) -> None:
        """One question to one department."""
        if self.departments:
            wanted = {"department": [random.choice(self.departments)]}
            self.client.post("/search", json=_body(filter=wanted), name="/search filtered")

    @task(1)
    def search_batch(self) -> None:
        """Several questions at once."""
        queries = [_body() for _ in range(BATCH)]
        self.client.post("/search/batch", json={"queries": queries}, name="/search/batch")
