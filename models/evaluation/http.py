"""Runs over HTTP: a service started for the purpose, or one that is there."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx2
from tqdm import tqdm

from core.errors import CareError
from models.evaluation.beir import Run

_BATCH = 32
_TIMEOUT = 120.0


@contextmanager
def running_service(indexes: str, index: str, pair: str) -> Iterator[str]:
    """Starts the service on a free port and yields its address once it answers.

    Raises:
        CareError: If it does not start; it has said why.
    """
    settings = {"INDEXES": indexes, "INDEX": index, "PAIR": pair, "PORT": "0"}
    environment = os.environ | {f"CARE_{key}": value for key, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "service"],
        env=environment | {"CARE_LOG_LEVEL": "warning"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise CareError("the service did not start")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()


def search_run(url: str, queries: Mapping[str, str], top_k: int) -> Run:
    """Asks the service each query and returns scores by document id, by query id.

    A document of an index of chunks has the score of its best chunk.

    Raises:
        CareError: If a request fails.
    """
    run: Run = {}
    ids = list(queries)
    with httpx2.Client(base_url=url, timeout=_TIMEOUT) as client:
        count = client.get("/index").json()["count"]
        for start in tqdm(range(0, len(ids), _BATCH), desc="search", unit=" batches"):
            part = ids[start : start + _BATCH]
            fields = {"top_k": min(top_k, count), "collapse": True, "include": []}
            body = [{"query": queries[id_]} | fields for id_ in part]
            response = client.post("/search/batch", json={"queries": body})
            if response.status_code != 200:
                raise CareError(f"{url} answered {response.status_code}: {response.text}")
            for id_, result in zip(part, response.json()["results"], strict=True):
                run[id_] = {hit.get("parent", hit["id"]): hit["score"] for hit in result["hits"]}
    return run
