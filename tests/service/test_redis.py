"""The service with a real Redis: searches succeed whatever Redis does."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.encoders import BigramEncoder
from tests.redis_server import RedisServer, run_redis
from tests.service.conftest import Serve, post_search, sample

pytestmark = pytest.mark.e2e

MARKER = "绝密病历"
# Long enough for Redis on a loaded machine, short enough for a test.
PATIENCE = {"redis_timeout_ms": 500, "cache_entries": 0}
OPEN = 2
ask = partial(post_search, query=MARKER)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path) as server:
        yield server


def shared(url: str, **changes: Any) -> dict[str, Any]:
    secrets = {"redis_url": SecretStr(url), "cache_secret": SecretStr("shared")}
    return PATIENCE | secrets | changes


def stored(redis: RedisServer, count: int) -> list[bytes]:
    """Waits until Redis has this many keys: they are written after the response."""
    with redis.client() as client:
        end = time.monotonic() + 60
        while len(keys := client.keys("care:query:*")) < count:  # type: ignore[arg-type]
            assert time.monotonic() < end
            time.sleep(0.01)
    return list(keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [False, True])
def test_a_search_that_explains_does_not_ask_redis(
    serve: Serve, redis: RedisServer, batch: bool
) -> None:
    client = serve(**shared(redis.url))
    plain, explained = {"query": MARKER}, {"query": MARKER, "explain": True}
    if batch:
        body = {"queries": [explained, plain, explained]}
        assert client.post("/search/batch", json=body).status_code == 200
    else:
        ask(client, explain=True)
    for tier in ("memory", "redis"):
        misses = sample(client, "care_cache_lookups_total", tier=tier, result="miss")
        assert misses == int(batch)
    with redis.client() as connection:
        assert connection.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"] == int(
            batch
        )


@pytest.mark.parametrize(
    ("stop", "kind"), [(RedisServer.kill, "connection"), (RedisServer.hang, "timeout")]
)
def test_searches_succeed_without_redis_and_the_log_has_one_line(
    serve: Serve,
    redis: RedisServer,
    caplog: pytest.LogCaptureFixture,
    stop: Callable[[RedisServer], None],
    kind: str,
) -> None:
    caplog.set_level("INFO", "care")
    client = serve(**shared(redis.url, redis_timeout_ms=50 if kind == "timeout" else 500))
    ask(client)
    stop(redis)
    for i in range(20):
        assert ask(client, query=f"{MARKER}{i}")["hits"]
    lines = [record for record in caplog.records if "circuit breaker" in record.message]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert MARKER not in caplog.text
    assert client.get("/health/ready").status_code == 200
    assert sample(client, "care_redis_breaker_state") == OPEN
    # The breaker has opened: some calls were not attempted.
    assert 3 <= sample(client, "care_redis_errors_total", kind=kind) < 20


def test_replicas_share_results(serve: Serve, redis: RedisServer) -> None:
    one, encoder = serve(**shared(redis.url)), BigramEncoder()
    other = serve(encoder, **shared(redis.url))
    first = ask(one)
    stored(redis, 1)
    seen = encoder.texts_seen
    second = ask(other)
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["hits"] == second["hits"]
    assert encoder.texts_seen == seen
    assert sample(other, "care_cache_lookups_total", tier="redis", result="hit") == 1
    assert sample(one, "care_cache_lookups_total", tier="redis", result="miss") == 1
    assert sample(other, "care_redis_breaker_state") == 0


def test_a_batch_reads_cached_queries_from_redis(serve: Serve, redis: RedisServer) -> None:
    client = serve(**shared(redis.url))
    known = ask(client)
    stored(redis, 1)
    queries = [{"query": "发热"}, {"query": MARKER}, {"query": "骨折"}]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    assert [result["cached"] for result in results] == [False, True, False]
    assert results[1]["hits"] == known["hits"]


def test_results_from_redis_are_cached_in_memory(serve: Serve, redis: RedisServer) -> None:
    ask(serve(**shared(redis.url)))
    stored(redis, 1)
    client = serve(**shared(redis.url, cache_entries=10))
    assert [ask(client)["cached"] for _ in range(2)] == [True, True]
    assert sample(client, "care_cache_lookups_total", tier="memory", result="hit") == 1


def test_another_secret_or_encoder_misses(serve: Serve, redis: RedisServer) -> None:
    ask(serve(**shared(redis.url)))
    stored(redis, 1)
    assert not ask(serve(**shared(redis.url, cache_secret=SecretStr("other"))))["cached"]
    encoder = BigramEncoder()
    encoder.spec = encoder.spec.model_copy(update={"weights_sha256": "1" * 64})
    assert not ask(serve(encoder, **shared(redis.url)))["cached"]


def test_no_query_reaches_redis(serve: Serve, redis: RedisServer) -> None:
    ask(serve(**shared(redis.url, rate_limit=0.1)), filter={"department": ["儿科"]})
    stored(redis, 1)
    with redis.client() as client:
        keys: Any = client.keys("*")
        values = [client.get(key) for key in keys]
    assert len(keys) == 2
    for text in (MARKER, "儿科"):
        assert not any(text.encode() in content for content in (*keys, *values))


def test_a_redis_that_refuses_writes_fails_no_request(serve: Serve, redis: RedisServer) -> None:
    client = serve(**shared(redis.url, rate_limit=1000))
    with redis.client() as direct:
        direct.config_set("maxmemory", 1)
    for i in range(20):
        assert ask(client, query=f"第{i}个问题")["hits"]
    assert sample(client, "care_redis_write_breaker_state") == OPEN
    assert sample(client, "care_redis_breaker_state") == 0
    assert 3 <= sample(client, "care_redis_errors_total", kind="response") < 10
    assert sample(client, "care_cache_lookups_total", tier="redis", result="miss") == 20


def test_rate_limits_are_shared_and_survive_a_redis_failure(
    serve: Serve, redis: RedisServer
) -> None:
    limits = {"rate_limit": 0.1, "rate_burst": 2}
    one, other = (serve(**shared(redis.url, **limits)) for _ in range(2))
    body = {"query": MARKER}
    assert [c.post("/search", json=body).status_code for c in (one, other, one)] == [200, 200, 429]
    redis.kill()
    # Without Redis each process has a local bucket.
    assert [one.post("/search", json=body).status_code for _ in range(3)] == [200, 200, 429]
