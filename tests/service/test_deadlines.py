"""A search that has begun stops when no request waits for it any more."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from core.filter_rows import MatchingRows
from core.types import Check
from search.snapshot import Snapshot
from search.task import AbandonedError
from tests.service.conftest import Serve

QUERY = "高血压患者的护理"


class LongSearch:
    """Replaces searches by one that only its check ends."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.stopped = threading.Event()
        self.released = threading.Event()

    def __call__(self, *arguments: Any, check: Check | None = None, **more: Any) -> Any:
        self.started.set()
        check = check or arguments[-1]
        while not self.released.wait(0.001):
            try:
                check()
            except AbandonedError:
                self.stopped.set()
                raise
        return np.empty(0, np.float32), np.empty(0, np.int64)


@pytest.fixture
def long_search() -> Iterator[LongSearch]:
    search = LongSearch()
    yield search
    search.released.set()


@pytest.mark.parametrize("collapse", [False, True])
def test_a_search_ends_after_its_deadline(
    serve: Serve, long_search: LongSearch, collapse: bool
) -> None:
    client = serve()
    index: Snapshot = client.app.state.service.catalog.served.index
    index.segment.vectors.search = long_search
    body = {"query": QUERY, "collapse": collapse}
    answer = client.post("/search", json=body, headers={"X-Request-Timeout-Ms": "1000"})
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert long_search.started.is_set()
    assert long_search.stopped.wait(30)


def test_the_rows_of_a_filter_are_searched_within_the_deadline(
    serve: Serve, long_search: LongSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    monkeypatch.setattr(MatchingRows, "find", long_search)
    body = {"query": QUERY, "filter": {"department": "儿科"}}
    batch = {"queries": [body | {"query": f"{QUERY}{i}"} for i in range(8)]}
    answer = client.post("/search/batch", json=batch, headers={"X-Request-Timeout-Ms": "1000"})
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert long_search.stopped.wait(30)
    monkeypatch.undo()
    assert client.post("/search", json=body).status_code == 200


def test_equal_filters_of_a_batch_are_evaluated_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, evaluated = serve(), []
    find = MatchingRows.find

    def spy(*arguments: Any) -> Any:
        evaluated.append(1)
        return find(*arguments)

    monkeypatch.setattr(MatchingRows, "find", spy)
    orders = [["儿科", "骨科"], ["骨科", "儿科", "骨科"]]
    queries = [
        {"query": f"{QUERY}{i}", "filter": {"department": orders[i % 2], "rare": [False, True]}}
        for i in range(20)
    ]
    answer = client.post("/search/batch", json={"queries": queries})
    assert answer.status_code == 200
    assert {len(result["hits"]) for result in answer.json()["results"]} == {10}
    # Threads that start at the same time may each evaluate it.
    assert 1 <= len(evaluated) <= client.app.state.service.settings.threads
