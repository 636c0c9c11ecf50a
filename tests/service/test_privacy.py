import json
import logging
from typing import Any

import pytest

from search.snapshot import ScoredRows
from service.pipeline.cache import MemoryCache
from tests.service.conftest import Serve

MARKER = "绝密病历"


def spread() -> list[tuple[str, str, int]]:
    """Paths, bodies and statuses of requests with the marker as query or filter value."""
    good = {"query": MARKER, "filter": {"department": [MARKER, "儿科"]}}
    bad: list[dict[str, Any]] = [
        {"query": MARKER * 1000},
        {"query": [MARKER]},
        {"query": MARKER, "top_k": MARKER},
        {"query": MARKER, "top_k": 1001},
        {"query": MARKER, "min_score": MARKER},
        {"query": MARKER, "include": [MARKER]},
        {"query": MARKER, "filter": MARKER},
        {"query": MARKER, "filter": {"department": {"gte": MARKER}}},
        {"query": MARKER, "filter": {"department": [[MARKER]]}},
        {"query": MARKER, "filter": {"ward": [MARKER]}},
        {"query": MARKER, "surprise": MARKER},
    ]
    return [
        ("/search", json.dumps(good), 200),
        ("/search/batch", json.dumps({"queries": [good, good]}), 200),
        (f"/search?q={MARKER}", json.dumps(good), 200),
        *(("/search", json.dumps(body), 422) for body in bad),
        *(("/search/batch", json.dumps({"queries": [good, body]}), 422) for body in bad),
        ("/search", f'{{"query": "{MARKER}', 400),
        ("/search", json.dumps({"query": f"{MARKER}\ud800"}), 400),
        ("/search", json.dumps({"query": MARKER * 10_000}), 413),
        (f"/{MARKER}", json.dumps(good), 404),
    ]


def test_no_query_reaches_logs_metrics_cache_keys_or_errors(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []
    put = MemoryCache.put

    def spy(self: MemoryCache, key: bytes, found: ScoredRows) -> None:
        keys.append(key)
        put(self, key, found)

    monkeypatch.setattr(MemoryCache, "put", spy)
    client = serve(max_body_bytes=100_000)
    caplog.set_level(logging.DEBUG)
    # The client's own log names the addresses that it asks for.
    caplog.set_level(logging.WARNING, logger="httpx2")
    for path, body, status in spread():
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == status
        if status != 200:
            assert MARKER not in response.text
    assert {len(key) for key in keys} == {32}
    assert not any(MARKER.encode() in key for key in keys)
    assert MARKER not in client.get("/metrics").text
    assert MARKER not in caplog.text
