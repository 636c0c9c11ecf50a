from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from core.cpus import available_cpus
from service.settings import Settings

TWO_ORIGINS = ("https://a.example", "https://b.example")
VALUES = [
    ("HOST", "::1", "::1"),
    ("PORT", "0", 0),
    ("INDEXES", "elsewhere", Path("elsewhere")),
    ("INDEX", "mine", "mine"),
    ("PAIR", "pair.toml", "pair.toml"),
    ("THREADS", "3", 3),
    ("MAX_QUERY_CHARS", "5", 5),
    ("MAX_TOP_K", "6", 6),
    ("MAX_BATCH", "7", 7),
    ("MAX_BODY_BYTES", "8", 8),
    ("STORE", "milvus", "milvus"),
    ("MILVUS_TOKEN", "root:Milvus", SecretStr("root:Milvus")),
    ("MILVUS_TIMEOUT_MS", "16", 16),
    ("MILVUS_URI", "http://m:19530", SecretStr("http://m:19530")),
    ("PROVIDER", "cuda", "cuda"),
    ("TENSORRT_CACHE", "engines", Path("engines")),
    ("ENCODE_THREADS", "4", 4),
    ("BATCH_TOKENS", "9", 9),
    ("BATCH_PADDING", "2", 2),
    ("QUEUE_TOKENS", "10", 10),
    ("TIMEOUT_MS", "11", 11),
    ("MAX_REQUESTS", "12", 12),
    ("REDIS_TIMEOUT_MS", "13", 13),
    ("CACHE_TTL_SECONDS", "14", 14),
    ("CACHE_SECRET", "long", SecretStr("long")),
    ("API_KEYS", "app:search:00", SecretStr("app:search:00")),
    ("RATE_LIMIT", "0.5", 0.5),
    ("RATE_BURST", "15", 15),
    ("CORS_ORIGINS", "https://a.example, https://b.example", TWO_ORIGINS),
    ("DRAIN_SECONDS", "1.5", 1.5),
    ("CACHE_ENTRIES", "0", 0),
    ("REDIS_URL", "redis://:pass@cache", SecretStr("redis://:pass@cache")),
    ("LOG_LEVEL", "debug", "debug"),
]


@pytest.mark.parametrize(("variable", "value", "expected"), VALUES)
def test_a_variable_sets_what_it_names(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: object
) -> None:
    assert getattr(Settings(), variable.lower()) != expected
    monkeypatch.setenv("CARE_CACHE_SECRET", "needed with Redis")
    monkeypatch.setenv("CARE_MILVUS_URI", "needed with the store")
    monkeypatch.setenv(f"CARE_{variable}", value)
    assert getattr(Settings(), variable.lower()) == expected


def test_every_setting_has_its_variable_here_and_a_description() -> None:
    assert {variable.lower() for variable, _, _ in VALUES} == set(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_threads_are_the_processors_that_the_process_may_use() -> None:
    assert Settings().threads == available_cpus()


@pytest.mark.parametrize(
    "name", ["api_keys", "cache_secret", "milvus_token", "milvus_uri", "redis_url"]
)
def test_secrets_are_not_shown(name: str) -> None:
    settings = Settings(**{"cache_secret": "c", name: SecretStr("hidden")})
    assert "hidden" not in repr(settings)


def test_redis_needs_a_secret() -> None:
    with pytest.raises(ValidationError, match="CARE_REDIS_URL needs CARE_CACHE_SECRET"):
        Settings(redis_url=SecretStr("redis://cache"))


def test_the_store_in_milvus_needs_its_address() -> None:
    with pytest.raises(ValidationError, match="CARE_STORE=milvus needs CARE_MILVUS_URI"):
        Settings(store="milvus")


def test_searches_that_wait_for_milvus_hold_up_no_encoder() -> None:
    assert Settings(threads=2).searchers == 0
    assert Settings(threads=2, encode_threads=2).searchers == 2
    assert Settings(threads=2, store="milvus", milvus_uri=SecretStr("http://m")).searchers == 16


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]
