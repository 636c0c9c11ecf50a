"""What `CARE_OVERFLOW_PAIR` changes: the queries that a full queue has no room for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import care
from core.encoders import Encoding
from core.errors import EmbeddingSpaceError, IndexVersionError
from service.app import create_app
from service.settings import Settings
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.service.conftest import BLOCKED, BlockingEncoder, Serve, post_search, sample, wait_until
from tests.service.test_pipeline import blocked, queued

pytestmark = pytest.mark.usefixtures("manifest")

# Room for the blocked query (4 tokens) and none of 12.
FULL = {"queue_tokens": 8}
QUERY = {"query": "高血压患者的护理"}
OTHER = {"query": "糖尿病患者的饮食"}
search = partial(post_search, **QUERY)


def test_another_encoder_answers_instead_of_429(serve: Serve) -> None:
    encoder, overflow = BlockingEncoder(), BigramEncoder()
    client = serve(encoder, overflow, **FULL)
    with blocked(client, encoder) as pending:
        seen = overflow.texts_seen
        busy = search(client)
        assert (busy["overflow"], busy["cached"]) == (True, False)
        assert overflow.texts_seen == seen + 1
        both = client.post("/search/batch", json={"queries": [OTHER]}).json()["results"]
        assert [answer["overflow"] for answer in both] == [True]
        assert sample(client, "care_overflow_queries_total") == 2
        assert queued(client) == 1
    assert pending.result().json()["overflow"] is False
    # The answer of the other encoder was not cached.
    idle = search(client)
    assert (idle["overflow"], idle["cached"]) == (False, False)
    assert idle["hits"] == busy["hits"]
    assert search(client)["cached"]


def test_vectors_are_never_those_of_the_other_encoder(serve: Serve) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, BigramEncoder(), **FULL)
    with blocked(client, encoder):
        response = client.post("/v1/embeddings", json={"input": QUERY["query"]})
    assert response.status_code == 429


class SlowEncoder(BlockingEncoder):
    """The encoder for a full queue, which can be blocked as well once it has passed its checks."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = False

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if self.checked:
            self.entered.set()
            assert self.release.wait(30)
        return super().encode_tokens(tokens)


def test_the_queue_of_the_other_encoder_is_limited_too(serve: Serve) -> None:
    encoder, overflow = BlockingEncoder(), SlowEncoder()
    client = serve(encoder, overflow, queue_tokens=12)
    overflow.checked = True
    with blocked(client, encoder), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(search, client)
        assert overflow.entered.wait(30)
        assert client.post("/search", json=OTHER).status_code == 429
        overflow.release.set()
        assert waiting.result()["overflow"]
        wait_until(lambda: search(client, **OTHER)["overflow"])


def test_the_queue_is_short_while_the_other_encoder_has_work(serve: Serve) -> None:
    encoder, overflow = BlockingEncoder(), SlowEncoder()
    # Room for the blocked query (4 tokens) and three of 12; a quarter is not enough for one.
    client = serve(encoder, overflow, queue_tokens=40)
    overflow.checked = True
    two = {"queries": [QUERY, OTHER]}
    with blocked(client, encoder), ThreadPoolExecutor(5) as pool:
        first = [pool.submit(search, client, query=f"儿童发热的护理{i}") for i in range(2)]
        wait_until(lambda: queued(client) == 3)
        pool.submit(client.post, "/search/batch", json=two)
        assert overflow.entered.wait(30)
        third = pool.submit(search, client, query="骨折患者的护理")
        wait_until(lambda: sample(client, "care_overflow_queries_total") == 3)
        embedded = pool.submit(client.post, "/v1/embeddings", json={"input": "失眠患者"})
        wait_until(lambda: queued(client) == 4)
        overflow.release.set()
        assert third.result()["overflow"]
        encoder.release.set()
        assert not any(answer.result()["overflow"] for answer in first)
        assert embedded.result().status_code == 200


def test_the_other_encoder_must_find_the_canaries(settings: Settings) -> None:
    class Wrong(BigramEncoder):
        def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
            return super().encode_tokens([BLOCKED] * len(tokens))

    with raises(IndexVersionError, "canaries_not_found"):
        create_app(settings, BigramEncoder(), Wrong())


def test_the_other_pair_must_have_the_space_of_the_index(settings: Settings) -> None:
    changed = settings.model_copy(update={"overflow_pair": "care-mini-lookup"})
    with pytest.raises(EmbeddingSpaceError, match="CARE_OVERFLOW_PAIR"):
        create_app(changed, BigramEncoder())


def test_the_shipped_lookup_encoder_takes_the_overflow_of_care_mini(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(20))
    care.build_index("test", corpus, indexes=tmp_path / "indexes", builds=tmp_path / "builds")
    settings = Settings(
        indexes=tmp_path / "indexes",
        index="test",
        pair="care-mini",
        overflow_pair="care-mini-lookup",
        queue_tokens=40,
        encode_threads=1,
        threads=1,
        cache_entries=0,
    )
    texts = [f"高血压患者的护理{i}" for i in range(32)]
    # Three queries of 12 tokens fit into each of the two queues.
    with TestClient(create_app(settings)) as client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda text: search(client, query=text), texts))
    by_lookup = [answer["overflow"] for answer in answers]
    assert any(by_lookup)
    assert not all(by_lookup)
