import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.breaker import UnavailableError
from core.encoders import Encoding
from core.manifest import IndexManifest
from stores.lexical import LexicalIndex
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import (
    BLOCKED,
    BlockingEncoder,
    Serve,
    exact_scores,
    post_search,
    sample,
)

QUERY = make_records(60)[7]["title"]
WEIGHT = 0.5
search = partial(post_search, query=QUERY)


@pytest.fixture
def fused(build_version: Builder) -> IndexManifest:
    """An index whose default mode is hybrid."""
    return build_version(make_records(60), fusion={"lexical": WEIGHT})


@pytest.fixture
def folder(fused: IndexManifest, tmp_path: Path) -> Path:
    return tmp_path / "indexes" / "test" / fused.version


@pytest.fixture
def client(serve: Serve, fused: IndexManifest) -> TestClient:
    return serve()


def scores(answer: dict[str, Any]) -> dict[str, float]:
    return {hit["id"]: hit["score"] for hit in answer["hits"]}


class BrokenEncoder(BigramEncoder):
    """Fails at the queries of requests, but not at the canaries of the index."""

    broken = False

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if self.broken:
            raise RuntimeError("no memory")
        return super().encode_tokens(tokens)


@contextmanager
def broken_full_text(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
) -> Iterator[None]:
    def fail(*_: object, **__: object) -> None:
        raise error or ValueError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(LexicalIndex, "search", fail)
        yield


def test_a_hybrid_score_is_the_sum_of_both_channels(client: TestClient, folder: Path) -> None:
    answer = search(client, top_k=60)
    assert (answer["mode"], answer["failed_channels"]) == ("hybrid", [])
    dense = exact_scores(folder, QUERY)
    explained = search(client, top_k=60, explain=True)
    assert scores(explained) == scores(answer)
    for hit in explained["hits"]:
        parts = hit["explain"]
        lexical = parts["lexical"]["score"] or 0.0
        assert parts["dense"]["score"] == pytest.approx(dense[hit["id"]], abs=1e-6)
        assert hit["score"] == pytest.approx(dense[hit["id"]] + WEIGHT * lexical, abs=1e-6)
    assert any(hit["explain"]["lexical"]["rank"] for hit in explained["hits"])
    assert "explain" not in answer["hits"][0]


@pytest.mark.parametrize("mode", ["lexical", "hybrid"])
def test_spellings_of_a_name_find_each_other_and_the_same_one_first(
    serve: Serve, build_version: Builder, mode: str
) -> None:
    names = ["CA-125", "CA125", "CA.125", "CA 125"]
    texts = [f"卵巢检查。{name}偏高要复查。" for name in names]
    records = [{"_id": name, "text": text} for name, text in zip(names, texts, strict=True)]
    build_version(records + make_records(20), fusion={"lexical": WEIGHT})
    client = serve()
    for name in names:
        hits = search(client, query=name, mode=mode, top_k=4, explain=True, evidence=True)["hits"]
        assert hits[0]["id"] == name
        assert {hit["id"] for hit in hits} == set(names)
        assert mode == "lexical" or all(hit["explain"]["lexical"]["rank"] for hit in hits)
        assert [hit["evidence"]["text"] for hit in hits] == [f"{h['id']}偏高要复查。" for h in hits]


def test_each_mode_has_its_own_results_and_cache(client: TestClient) -> None:
    first = {mode: search(client, mode=mode) for mode in ("dense", "lexical", "hybrid")}
    again = {mode: search(client, mode=mode) for mode in first}
    assert [answer["cached"] for answer in again.values()] == [True] * 3
    for mode, answer in again.items():
        assert answer["mode"] == mode
        assert scores(answer) == scores(first[mode])
    assert len({tuple(scores(answer).values()) for answer in first.values()}) == 3
    assert search(client)["cached"] is True


def test_lexical_search_does_not_encode(serve: Serve, fused: IndexManifest) -> None:
    encoder = BigramEncoder()
    client = serve(encoder)
    before = encoder.texts_seen
    answer = search(client, mode="lexical")
    assert encoder.texts_seen == before
    assert all(0 < hit["score"] <= 1 for hit in answer["hits"])
    assert answer["hits"][0]["id"] == "d0007"


@pytest.mark.parametrize("error", [ValueError("damaged"), UnavailableError()])
def test_if_the_full_text_fails_the_vectors_answer(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with broken_full_text(monkeypatch, error):
        answer = search(client)
        assert answer["failed_channels"] == ["lexical"]
        assert list(scores(answer)) == list(scores(search(client, mode="dense")))
        assert search(client)["cached"] is False
    assert sample(client, "care_channel_failures_total", channel="lexical") == 2
    assert search(client)["failed_channels"] == []


def test_if_the_full_text_is_late_the_vectors_answer(
    serve: Serve, fused: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(channel_timeout_ms=1, threads=2)
    release = threading.Event()
    original = LexicalIndex.search

    def late(*arguments: Any, **options: Any) -> Any:
        assert release.wait(30)
        return original(*arguments, **options)

    monkeypatch.setattr(LexicalIndex, "search", late)
    try:
        assert search(client)["failed_channels"] == ["lexical"]
    finally:
        release.set()


def test_if_the_encoder_fails_the_full_text_answers(serve: Serve, fused: IndexManifest) -> None:
    encoder = BrokenEncoder()
    client = serve(encoder)
    encoder.broken = True
    answer = search(client)
    assert answer["failed_channels"] == ["dense"]
    assert answer["hits"][0]["id"] == "d0007"
    assert sample(client, "care_channel_failures_total", channel="dense") == 1
    assert search(client, status=500, mode="dense")["code"] == "internal_error"
    encoder.broken = False
    assert (search(client)["cached"], search(client)["cached"]) == (False, True)


def test_if_both_channels_fail_the_search_fails(
    serve: Serve, fused: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = BrokenEncoder()
    client = serve(encoder)
    encoder.broken = True
    with broken_full_text(monkeypatch):
        assert search(client, status=500)["code"] == "internal_error"


@pytest.mark.parametrize("mode", ["lexical", "hybrid"])
def test_an_index_without_full_text_has_one_mode(
    serve: Serve, build_version: Builder, mode: str
) -> None:
    build_version(make_records(20), full_text=False)
    client = serve()
    assert client.get("/index").json()["modes"] == ["dense"]
    answer = search(client, status=422, mode=mode)
    assert answer["errors"][0]["field"] == "mode"
    assert answer["errors"][0]["code"] == "mode_not_available"
    assert search(client)["mode"] == "dense"


def test_a_departed_client_stops_both_channels(serve: Serve, fused: IndexManifest) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder)
    headers = {"X-Request-Timeout-Ms": "50"}
    answer = client.post("/search", json={"query": BLOCKED}, headers=headers)
    encoder.release.set()
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert search(client)["failed_channels"] == []
