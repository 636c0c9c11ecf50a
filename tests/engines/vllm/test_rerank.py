"""Searches with `rerank` by vLLM's server (service/pipeline/rerank_server.py)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from pydantic import SecretStr
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from core.text import document_text
from service.app import create_app
from service.settings import Settings
from tests.checkpoints import write_reranker
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.engines.vllm.server import KEY, Server, vllm_server

MODEL = "tiny-reranker"
MAX_LENGTH = 128
RECORDS = make_records(20)
QUERY = RECORDS[7]["title"]
LONG = RECORDS[0] | {"_id": "long", "text": "高血压患者的护理要点。" * MAX_LENGTH}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [record[name] for record in RECORDS for name in ("title", "text")]
    return write_reranker(tmp_path_factory.mktemp("reranker"), texts, MAX_LENGTH)


@pytest.fixture(scope="module")
def server(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with vllm_server(reranker, MODEL, MAX_LENGTH, log) as running:
        yield running


@contextmanager
def service(settings: Settings, server: Server, **changes: Any) -> Iterator[TestClient]:
    """The real application, whose hits the server ranks again."""
    given = {
        "rerank_url": SecretStr(f"{server.url}/v1"),
        "rerank_model": MODEL,
        "rerank_key": SecretStr(KEY),
        "rerank_timeout_ms": 60_000,
    }
    app = create_app(settings.model_copy(update=given | changes), BigramEncoder())
    with TestClient(app) as client:
        yield client


def search(client: TestClient, **fields: Any) -> dict[str, Any]:
    headers = {"X-Request-Timeout-Ms": "60000"}
    body = {"query": QUERY, "top_k": 10, **fields}
    response = client.post("/search", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def scores(answer: dict[str, Any]) -> dict[str, float]:
    return {hit["id"]: hit["score"] for hit in answer["hits"]}


def own_scores(folder: Path, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The scores of records by transformers, one pair per batch, truncated like vLLM's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for record in records:
        text = document_text(record["title"], record["text"])
        pair = tokenizer(QUERY, text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.inference_mode():
            found[record["_id"]] = float(torch.sigmoid(model(**pair).logits[0, 0]))
    return found


def test_hits_have_the_scores_and_the_order_of_the_model(
    reranker: Path, server: Server, build_version: Builder, settings: Settings
) -> None:
    build_version(RECORDS)
    expected = own_scores(reranker, RECORDS)
    best = sorted(expected, key=lambda id_: -expected[id_])[:10]
    with service(settings, server) as client:
        assert client.get("/index").json()["reranker"] == "server"
        plain = search(client)
        assert (plain["reranked"], plain["failed_channels"]) == (False, [])
        answer = search(client, rerank=len(RECORDS), explain=True)
    assert (answer["reranked"], answer["failed_channels"]) == (True, [])
    assert list(scores(answer)) == best != list(scores(plain))
    assert scores(answer) == pytest.approx({id_: expected[id_] for id_ in best}, abs=1e-4)
    parts = [hit["explain"]["rerank"] for hit in answer["hits"]]
    assert [part["rank"] for part in parts] == list(range(1, 11))
    assert [part["score"] for part in parts] == list(scores(answer).values())


def test_a_long_passage_needs_truncation(
    reranker: Path,
    server: Server,
    build_version: Builder,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [*RECORDS[:9], LONG]
    build_version(records)
    with service(settings, server) as client:
        plain = search(client)
        refused = search(client, rerank=True)
    assert (refused["reranked"], refused["failed_channels"]) == (False, ["rerank"])
    assert scores(refused) == scores(plain)
    (failure,) = [each for each in caplog.records if "reason" in getattr(each, "fields", {})]
    assert failure.__dict__["fields"] == {"reason": "status 400"}
    with service(settings, server, rerank_truncate_tokens=MAX_LENGTH) as client:
        answer = search(client, rerank=True)
    assert (answer["reranked"], answer["failed_channels"]) == (True, [])
    assert scores(answer) == pytest.approx(own_scores(reranker, records), abs=1e-4)


def test_a_stopped_server_leaves_hits_as_they_are(
    server: Server, build_version: Builder, settings: Settings
) -> None:
    """The last test of this module: it stops the server of all."""
    build_version(RECORDS)
    with service(settings, server) as client:
        assert search(client, rerank=True)["reranked"] is True
        server.stop()
        answer = search(client, rerank=True, top_k=9)
        assert (answer["reranked"], answer["failed_channels"]) == (False, ["rerank"])
        assert scores(answer) == scores(search(client, top_k=9))
