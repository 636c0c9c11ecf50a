import json
import re
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from core.errors import CareError
from core.machine import available_cpus
from service.settings import Settings, ignored_port, read_settings
from tests.errors import raises

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"
TWO_ORIGINS = ("https://a.example", "https://b.example")
VALUES = [
    ("HOST", "::1", "::1"),
    ("PORT", "0", 0),
    ("INDEXES", "elsewhere", Path("elsewhere")),
    ("INDEX", "mine", "mine"),
    ("PAIR", "pair.toml", "pair.toml"),
    ("PAIRS", "elsewhere", Path("elsewhere")),
    ("SERVE_INDEXES", "clinic-*, other", ("clinic-*", "other")),
    ("OTHER_PAIRS", "second,third", ("second", "third")),
    ("DOCUMENT_URL", "http://d:8001/v1", SecretStr("http://d:8001/v1")),
    ("DOCUMENT_MODEL", "encoder", "encoder"),
    ("MAX_HEADER_BYTES", "4096", 4096),
    ("CLIENT_TIMEOUT_SECONDS", "1.5", 1.5),
    ("KEEP_ALIVE_SECONDS", "2.5", 2.5),
    ("STORE", "milvus", "milvus"),
    ("MILVUS_TOKEN", "root:Milvus", SecretStr("root:Milvus")),
    ("MILVUS_URI", "http://m:19530", SecretStr("http://m:19530")),
    ("FAISS_DEVICE", "cuda-fp16", "cuda-fp16"),
    ("PROVIDER", "cuda", "cuda"),
    ("TENSORRT_CACHE", "engines", Path("engines")),
    ("OVERFLOW_PAIR", "care-mini-lookup", "care-mini-lookup"),
    ("RERANK_URL", "http://r:8080", SecretStr("http://r:8080")),
    ("RERANK_MODEL", "ranker", "ranker"),
    ("RERANK_KEY", "key", SecretStr("key")),
    ("MAX_RERANK", "60", 60),
    ("CHAT_URL", "http://c:8001/v1", SecretStr("http://c:8001/v1")),
    ("CHAT_MODEL", "writer", "writer"),
    ("CHAT_KEY", "key", SecretStr("key")),
    ("CACHE_SECRET", "long", SecretStr("long")),
    ("API_KEYS", "app:search:00", SecretStr("app:search:00")),
    ("API_KEYS_FILE", "keys", Path("keys")),
    ("TOKEN_ALGORITHMS", "EdDSA, RS256", ("EdDSA", "RS256")),
    ("TOKEN_KEYS", "jwks.json", Path("jwks.json")),
    ("TOKEN_AUDIENCE", "portal", "portal"),
    ("TOKEN_ISSUER", "https://portal.example", "https://portal.example"),
    ("AUDIT_FILE", "-", "-"),
    ("OPEN_METRICS", "false", False),
    ("RATE_LIMIT", "0.5", 0.5),
    ("INDEX_RATE_LIMIT", "0.5", 0.5),
    ("CORS_ORIGINS", "https://a.example, https://b.example", TWO_ORIGINS),
    ("ROOT_PATH", "/care/v2", "/care/v2"),
    ("WATCH_SECONDS", "2.5", 2.5),
    ("DRAIN_SECONDS", "1.5", 1.5),
    ("CACHE_ENTRIES", "0", 0),
    ("REDIS_URL", "redis://:pass@cache", SecretStr("redis://:pass@cache")),
    ("LOG_LEVEL", "debug", "debug"),
]
SET = {variable for variable, *_ in VALUES}
NUMBERS = [
    (name.upper(), "21", 21)
    for name, field in Settings.model_fields.items()
    if re.search(r"\bint\b", str(field.annotation)) and name.upper() not in SET
]


@pytest.mark.parametrize(("variable", "value", "expected"), VALUES + NUMBERS)
def test_each_variable_sets_its_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: object
) -> None:
    assert getattr(Settings(), variable.lower()) != expected
    monkeypatch.setenv("CARE_CACHE_SECRET", "needed with Redis")
    monkeypatch.setenv("CARE_MILVUS_URI", "needed with the store")
    monkeypatch.setenv("CARE_CHAT_MODEL", "needed with the server")
    monkeypatch.setenv("CARE_TOKEN_KEYS", "needed with algorithms")
    monkeypatch.setenv("CARE_TOKEN_ALGORITHMS", "HS256")
    monkeypatch.setenv(f"CARE_{variable}", value)
    assert getattr(Settings(), variable.lower()) == expected


def test_every_setting_is_tested_and_has_a_description() -> None:
    tested = {variable.lower() for variable, *_ in VALUES + NUMBERS}
    assert tested == set(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_threads_default_to_the_available_processors() -> None:
    assert Settings().threads == available_cpus()
    assert Settings(workers=2).threads == max(1, available_cpus() // 2)
    assert Settings(workers=1000).threads == 1
    assert Settings(workers=2, threads=7).threads == 7


@pytest.mark.parametrize(
    "name", ["api_keys", "cache_secret", "milvus_token", "milvus_uri", "redis_url"]
)
def test_secrets_are_not_shown(name: str) -> None:
    settings = Settings(**{"cache_secret": "c", name: SecretStr("hidden")})
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"CARE_REDIS_URL": "redis://cache"}, ("CARE_REDIS_URL", "CARE_CACHE_SECRET")),
        ({"CARE_STORE": "milvus"}, ("CARE_STORE=milvus", "CARE_MILVUS_URI")),
        (
            {"CARE_API_KEYS": "redis://", "CARE_API_KEYS_FILE": "redis://"},
            ("CARE_API_KEYS", "CARE_API_KEYS_FILE"),
        ),
        ({"CARE_PORT": "http"}, ("CARE_PORT",)),
        ({"CARE_RERANK_HITS": "201"}, ("CARE_RERANK_HITS", "CARE_MAX_RERANK")),
    ],
)
def test_an_error_names_the_variable_and_does_not_quote_its_value(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], names: tuple[str, ...]
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with raises(CareError, "invalid_setting") as caught:
        read_settings()
    assert all(name in str(caught.value) for name in names)
    assert "redis://" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CARE_QUEUE_TOKEN", "CARE_QUEUE_TOKENS"),
        ("CARE_APIKEYS", "CARE_API_KEYS"),
        ("CARE_API_KEY", "CARE_API_KEYS"),
        ("CARE_MILVUS_URL", "CARE_MILVUS_URI"),
        ("care_api_keys", "CARE_API_KEYS"),
        ("Care_Api_Key", "CARE_API_KEYS"),
        ("CARE_ADMIN_TOKEN", None),
        ("CARE_", None),
    ],
)
def test_an_unknown_variable_is_rejected_with_the_nearest_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str | None
) -> None:
    monkeypatch.setenv(name, "a secret")
    with raises(CareError, "unknown_setting", name=name) as caught:
        read_settings()
    assert nearest in (None, caught.value.fields["nearest"])
    assert name in str(caught.value)
    assert "a secret" not in str(caught.value)


def test_variables_of_other_programs_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of other commands, and those that Kubernetes sets for Services."""
    for name, value in {
        "CARE_LOAD_KEY": "care_x",
        "CARE_BUILDS": "builds",
        "CARE_SERVICE_HOST": "10.0.0.7",
        "CARE_SERVICE_PORT": "80",
        "CARE_SERVICE_PORT_HTTP": "80",
        "CARE_PORT_80_TCP_ADDR": "10.0.0.7",
        "CARE_REDIS_SERVICE_HOST": "10.0.0.8",
        "CARE_REDIS_PORT": "tcp://10.0.0.8:6379",
        "CARE_REDIS_PORT_6379_TCP": "tcp://10.0.0.8:6379",
        "CARE_PORT": "tcp://10.0.0.7:80",
        "CAREFUL": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert read_settings() == Settings()


@pytest.mark.parametrize("port", [None, "8001", "tcp://10.0.0.7:80", "tcp://[fd00::7]:80"])
def test_the_health_check_of_the_image_asks_the_port_of_the_service(
    monkeypatch: pytest.MonkeyPatch, port: str | None
) -> None:
    if port:
        monkeypatch.setenv("CARE_PORT", port)
    asked: list[int] = []

    def connect(_: str, port: int, timeout: float) -> None:
        asked.append(port)
        raise OSError

    monkeypatch.setattr("http.client.HTTPConnection", connect)
    found = re.search(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE.read_text(), re.M)
    assert found
    with pytest.raises(OSError):
        exec(json.loads(found[1])[-1], {})
    assert asked == [read_settings().port]
    assert bool(ignored_port()) == (port is not None and port.startswith("tcp:"))


def test_milvus_searches_have_separate_threads() -> None:
    assert Settings(threads=2).search_workers == 0
    assert Settings(threads=2, encode_threads=2).search_workers == 2
    assert (
        Settings(threads=2, store="milvus", milvus_uri=SecretStr("http://m")).search_workers == 16
    )


@pytest.mark.parametrize("name", ["CARE_API_KEYS", "CARE_API_KEYS_FILE"])
@pytest.mark.parametrize("value", ["", " "])
def test_keys_that_are_set_to_nothing_are_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with raises(CareError, "invalid_setting", name=name):
        read_settings()


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]
