"""Queries with `rerank`: late interaction, and a server with `/v1/rerank`."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

import care
from core import documents
from core.documents import DocumentReader
from core.encoders import LateInteraction
from core.errors import CareError, QueryError
from core.manifest import IndexManifest
from core.text import document_text
from indexer.build import build
from models.late_interaction import decode_tokens, encode_tokens, max_sim, pool_tokens
from models.pairs import write_pair
from service.app import create_app
from service.settings import Settings
from tests.conftest import make_records, write_jsonl
from tests.curation.endpoints import Body, scripted_server, send_json
from tests.encoders import (
    LATE_INTERACTION,
    BigramEncoder,
    TokenBigramEncoder,
    make_pair,
    token_vectors,
)
from tests.errors import raises
from tests.indexer.builds import build_options
from tests.service.conftest import Serve, sample
from tests.service.test_modes import BrokenEncoder, scores, search
from tests.service.test_overflow import FULL, OTHER
from tests.service.test_pipeline import blocked

QUERY = make_records(60)[7]["title"]
WEIGHT = 2.0
# Scores by the length of the text: nothing else ranks like this.
Respond = Callable[[Body, BaseHTTPRequestHandler], str | None]


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index with token vectors."""
    folder = tmp_path_factory.mktemp("tokens")
    corpus = write_jsonl(folder / "corpus.jsonl", make_records(60))
    how = {"fusion": {"lexical": 0.2}, "token_vectors": LATE_INTERACTION.stored}
    options = build_options(folder, corpus, **how)
    build(options, TokenBigramEncoder("document"), BigramEncoder())
    return options.indexes


@pytest.fixture
def late(with_tokens: Path, tmp_path: Path, settings: Settings) -> Settings:
    """Settings over a copy of this index, and a pair that has token vectors too."""
    shutil.copytree(with_tokens, settings.indexes)
    weighted = LATE_INTERACTION.model_copy(update={"weight": WEIGHT})
    return settings.model_copy(update={"pair": str(written_pair(tmp_path, weighted))})


def written_pair(folder: Path, how: LateInteraction | None) -> Path:
    path = folder / "tokens.toml"
    write_pair(make_pair(folder=folder, late_interaction=how), path)
    return path


@pytest.fixture
def start(late: Settings, serve: Serve) -> Serve:
    """Starts the application over the index with token vectors."""

    def run(*encoders: Any, **changes: Any) -> TestClient:
        return serve(*(encoders or (TokenBigramEncoder(),)), **{"pair": late.pair} | changes)

    return run


def late_scores(settings: Settings) -> dict[str, float]:
    """MaxSim of each document with the query, by the stored vectors."""
    folder = next(path for path in (settings.indexes / "test").iterdir() if path.is_dir())
    found = {}
    for document in DocumentReader(folder / documents.FILE_NAME):
        vectors = token_vectors(document_text(document.title, document.text))
        pooled = pool_tokens(vectors, LATE_INTERACTION.pooling)
        codec = LATE_INTERACTION.codec
        stored = decode_tokens(encode_tokens(pooled, codec), codec)
        found[document.id] = float(max_sim(token_vectors(QUERY), [stored])[0])
    return found


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_late_interaction_adds_its_weighted_score(start: Serve, late: Settings, mode: str) -> None:
    client = start()
    plain = search(client, mode=mode, top_k=30)
    assert plain["reranked"] is False
    answer = search(client, mode=mode, top_k=10, rerank=30)
    assert (answer["reranked"], answer["failed_channels"]) == (True, [])
    own = late_scores(late)
    expected = {id_: score + WEIGHT * own[id_] for id_, score in scores(plain).items()}
    assert scores(answer) == pytest.approx({id_: expected[id_] for id_ in scores(answer)}, abs=1e-5)
    # Several documents have the last score.
    best = sorted(expected.values(), reverse=True)[:10]
    assert list(scores(answer).values()) == pytest.approx(best, abs=1e-5)
    assert list(scores(answer)) != list(scores(plain))[:10]
    again = search(client, mode=mode, top_k=10, rerank=30)
    assert (again["cached"], again["reranked"]) == (True, True)
    assert again["hits"] == answer["hits"]


def test_at_least_top_k_hits_are_ranked_again(start: Serve) -> None:
    client = start(rerank_hits=5, max_rerank=50)
    by_number = search(client, top_k=20, rerank=1)
    assert scores(by_number) == scores(search(client, top_k=20, rerank=20))
    assert scores(search(client, top_k=3, rerank=True)) == scores(search(client, top_k=3, rerank=5))
    answer = client.post("/search", json={"query": QUERY, "top_k": 51, "rerank": True})
    assert answer.status_code == 422
    assert answer.json()["errors"][0] | {"message": ""} == {
        "field": "rerank",
        "code": "rerank_too_large",
        "message": "",
        "limit": 50,
    }


def test_explanations_have_what_late_interaction_contributes(start: Serve, late: Settings) -> None:
    own = late_scores(late)
    answer = search(start(), top_k=5, rerank=20, explain=True)
    for hit in answer["hits"]:
        parts = hit["explain"]
        assert parts["rerank"]["score"] == pytest.approx(own[hit["id"]], abs=1e-5)
        total = sum(part["weight"] * (part["score"] or 0.0) for part in parts.values())
        assert hit["score"] == pytest.approx(total, abs=1e-5)
    ranks = [hit["explain"]["rerank"]["rank"] for hit in answer["hits"]]
    assert set(ranks) <= set(range(1, 21))


def test_min_score_and_limits_hold(start: Serve) -> None:
    client = start()
    every = search(client, top_k=30, rerank=30)
    third = every["hits"][2]["score"]
    assert len(search(client, top_k=30, rerank=30, min_score=third)["hits"]) == 3
    limit = {"field": "department", "hits": 2}
    limited = search(client, top_k=6, rerank=6, limit_per=limit)["hits"]
    found = [hit["metadata"]["department"] for hit in limited]
    assert sorted(map(found.count, set(found))) == [2, 2, 2]


def test_queries_of_a_batch_choose_for_themselves(start: Serve) -> None:
    client = start()
    queries = [{"query": QUERY, "rerank": value} for value in (True, False, 15)]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    assert [result["reranked"] for result in results] == [True, False, True]
    for query, result in zip(queries, results, strict=True):
        assert scores(result) == pytest.approx(scores(search(client, **query)), abs=1e-6)


def test_without_token_vectors_rerank_is_an_error(
    start: Serve, serve: Serve, late: Settings, tmp_path: Path
) -> None:
    assert start().get("/index").json()["reranker"] == "late_interaction"
    other = LATE_INTERACTION.model_copy(update={"space": "characters-2"})
    for how in (None, other):
        client = serve(TokenBigramEncoder(), pair=str(written_pair(tmp_path, how)))
        assert client.get("/index").json()["reranker"] is None
        answer = search(client, status=422, rerank=True)
        assert answer["errors"][0]["code"] == "rerank_not_available"


def test_an_encoder_without_token_vectors_leaves_hits_as_they_are(start: Serve) -> None:
    client = start(BigramEncoder())
    answer = search(client, rerank=True)
    assert (answer["reranked"], answer["failed_channels"]) == (False, ["rerank"])
    assert scores(answer) == scores(search(client))
    assert sample(client, "care_channel_failures_total", channel="rerank") == 1
    # It is not cached: the next encoder may have them.
    assert search(client, rerank=True)["cached"] is False


def test_the_encoder_for_a_full_queue_reranks_nothing(start: Serve) -> None:
    class Blocking(TokenBigramEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.entered, self.release = threading.Event(), threading.Event()

        def encode_tokens(self, tokens: Any) -> Any:
            if "等待" in tokens:
                self.entered.set()
                assert self.release.wait(30)
            return super().encode_tokens(tokens)

    encoder: Any = Blocking()
    client = start(encoder, TokenBigramEncoder(), **FULL)
    with blocked(client, encoder):
        busy = search(client, rerank=True, **OTHER)
        assert busy["overflow"] is True
        assert (busy["reranked"], busy["failed_channels"]) == (False, ["rerank"])
    idle = search(client, rerank=True, **OTHER)
    assert (idle["overflow"], idle["reranked"]) == (False, True)


def test_a_failing_encoder_and_full_text_alone(start: Serve) -> None:
    encoder = BrokenEncoder()
    client = start(encoder)
    encoder.broken = True
    answer = search(client, mode="hybrid", rerank=True)
    assert answer["failed_channels"] == ["dense", "rerank"]
    assert answer["hits"]


def test_the_python_api_returns_the_same_hits(
    start: Serve, late: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.encoders.factory.OnnxEncoder", lambda *_: TokenBigramEncoder())
    answer = search(start(), top_k=7, rerank=20)
    with care.open_index("test", pair=late.pair, indexes=late.indexes) as index:
        hits = index.search(QUERY, top_k=7, rerank=20)
        assert {hit.id: hit.score for hit in hits} == pytest.approx(scores(answer), abs=1e-6)
        with raises(QueryError, "rerank_too_large", limit=200):
            index.search(QUERY, rerank=201)


# A server


def by_length(body: Body) -> dict[str, Any]:
    """The shortest document is the best; results are sent worst first."""
    order = sorted(range(len(body["documents"])), key=lambda i: -len(body["documents"][i]))
    results = [{"index": i, "relevance_score": 0.01 * i - len(body["documents"][i])} for i in order]
    return {"id": "1", "results": results, "usage": {"total_tokens": 7}}


@contextmanager
def reranker(
    respond: Callable[[Body, BaseHTTPRequestHandler], None] | None = None,
) -> Iterator[tuple[str, list[Body]]]:
    """A server, and the bodies that it gets."""
    bodies: list[Body] = []

    def handle(body: Body, handler: BaseHTTPRequestHandler) -> None:
        assert handler.path == "/v1/rerank"
        bodies.append({**body, "authorization": handler.headers["Authorization"]})
        if respond:
            respond(body, handler)
        else:
            send_json(handler, 200, by_length(body))

    with scripted_server(handle) as url:  # type: ignore[arg-type]
        yield url, bodies


def with_server(serve: Serve, url: str, **changes: Any) -> TestClient:
    # A busy machine takes longer than the default of a second.
    return serve(rerank_url=SecretStr(url), **{"rerank_timeout_ms": 10_000, **changes})


def texts(answer: dict[str, Any]) -> list[int]:
    return [len(document_text(hit["title"], hit["text"])) for hit in answer["hits"]]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_a_server_orders_the_hits(serve: Serve, mode: str) -> None:
    with reranker() as (url, bodies):
        client = with_server(
            serve, url, rerank_model="ranker", rerank_key=SecretStr("key"), rerank_hits=20
        )
        assert client.get("/index").json()["reranker"] == "server"
        plain = search(client, mode=mode, top_k=20)
        assert not bodies
        answer = search(client, mode=mode, top_k=5, rerank=True)
        assert (answer["reranked"], answer["failed_channels"]) == (True, [])
        (body,) = bodies
        assert body["query"] == QUERY
        assert (body["model"], body["authorization"]) == ("ranker", "Bearer key")
        assert body["top_n"] == len(body["documents"]) == len(plain["hits"])
        assert texts(answer) == sorted(texts(plain))[:5]
        assert set(scores(answer)) <= set(scores(plain))
        assert search(client, mode=mode, top_k=5, rerank=True)["cached"] is True
        assert len(bodies) == 1
        explained = search(client, mode=mode, top_k=5, rerank=True, explain=True)
        for hit in explained["hits"]:
            assert hit["explain"]["rerank"]["score"] == pytest.approx(hit["score"])


def test_a_limit_of_tokens_is_sent_if_it_is_set(serve: Serve) -> None:
    with reranker() as (url, bodies):
        assert search(with_server(serve, url), rerank=True)["reranked"] is True
        client = with_server(serve, url, rerank_truncate_tokens=512)
        assert search(client, rerank=True)["reranked"] is True
    assert [body.get("truncate_prompt_tokens") for body in bodies] == [None, 512]


def test_min_score_and_no_hits_with_a_server(serve: Serve) -> None:
    with reranker() as (url, bodies):
        client = with_server(serve, url)
        answer = search(client, top_k=20, rerank=True)
        third = answer["hits"][2]["score"]
        assert len(search(client, top_k=20, rerank=True, min_score=third)["hits"]) == 3
        count = len(bodies)
        empty = search(client, mode="lexical", query="zzz", rerank=True)
        assert (empty["hits"], empty["reranked"]) == ([], True)
        assert len(bodies) == count


def send(status: int, value: Any) -> Respond:
    return lambda _, handler: send_json(handler, status, value)


BAD: list[Respond] = [
    send(500, {"error": "out of memory"}),
    send(200, {"results": []}),
    send(200, {"results": [{"index": 0, "relevance_score": 1}] * 50}),
    send(200, {"results": [{"index": i, "relevance_score": float("nan")} for i in range(50)]}),
]


@pytest.mark.parametrize("respond", BAD)
def test_a_server_that_fails_leaves_hits_as_they_are(
    serve: Serve,
    respond: Callable[[Body, BaseHTTPRequestHandler], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with reranker(respond) as (url, bodies):
        client = with_server(serve, url)
        answer = search(client, rerank=True)
        assert len(bodies) == 1
    assert (answer["reranked"], answer["failed_channels"]) == (False, ["rerank"])
    assert scores(answer) == scores(search(client))
    assert sample(client, "care_channel_failures_total", channel="rerank") == 1
    assert QUERY not in caplog.text
    assert "out of memory" not in caplog.text


def test_a_slow_server_is_left_out_in_time(serve: Serve) -> None:
    release = threading.Event()

    def wait(*_: Any) -> None:
        assert release.wait(30)

    with reranker(wait) as (url, _):
        client = with_server(serve, url, rerank_timeout_ms=50)
        answer = search(client, rerank=True)
        release.set()
    assert (answer["reranked"], answer["failed_channels"]) == (False, ["rerank"])


def test_a_server_that_is_down_is_soon_not_asked(serve: Serve) -> None:
    client = with_server(serve, "http://127.0.0.1:1")
    for at in range(5):
        answer = search(client, rerank=True, query=f"{QUERY}{at}")
        assert answer["failed_channels"] == ["rerank"]
    assert sample(client, "care_rerank_breaker_state") == 2
    assert sample(client, "care_channel_failures_total", channel="rerank") == 5


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rerank_url": "host:8080"}, "CARE_RERANK_URL"),
        ({"rerank_url": "http://user:password@host"}, "CARE_RERANK_URL"),
        ({"rerank_url": "http://host", "rerank_key": "a b"}, "CARE_RERANK_KEY"),
    ],
)
def test_a_wrong_address_or_key_is_an_error(
    settings: Settings, manifest: IndexManifest, changes: dict[str, str], name: str
) -> None:
    secrets = {key: SecretStr(value) for key, value in changes.items()}
    with raises(CareError, "invalid_setting", name=name) as caught:
        create_app(settings.model_copy(update=secrets), BigramEncoder())
    assert "password" not in str(caught.value)


def test_equal_queries_share_one_call(serve: Serve) -> None:
    with reranker() as (url, bodies):
        client = with_server(serve, url)
        queries = [{"query": QUERY, "rerank": True}] * 3
        results = client.post("/search/batch", json={"queries": queries}).json()["results"]
        assert [result["reranked"] for result in results] == [True] * 3
        assert len(bodies) == 1
