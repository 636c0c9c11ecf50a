"""The settings of the service: one `CARE_*` variable each, read and checked once, at start."""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from core.cpus import available_cpus
from core.errors import CareError
from models.encoders.providers import ProviderName
from models.pairs import DEFAULT_PAIR

# Variables of the same prefix that are no settings: those that Kubernetes makes of Services named
# care and care-….
_OF_KUBERNETES = re.compile(
    r"CARE_(\w+_)?(SERVICE_(HOST|PORT\w*)=|PORT_\d+_(TCP|UDP)\w*=|PORT=(tcp|udp)://)"
)
_ORIGIN = re.compile(r"\*|https?://[^\s/?#@]+")

AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """What the service reads from its environment, once, at start."""

    model_config = SettingsConfigDict(
        env_prefix="CARE_", frozen=True, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    indexes: Path = Path("indexes")
    """Folder of the indexes."""
    index: str = "sample"
    """Name of the index to search."""
    pair: str = DEFAULT_PAIR
    """Pair whose query encoder is used: a registered name or a .toml."""
    store: Literal["faiss", "milvus"] = "faiss"
    """Where the vectors are: faiss, in files beside the documents, or milvus."""
    milvus_uri: SecretStr | None = None
    """Milvus, needed with CARE_STORE=milvus: http://host:19530/database."""
    milvus_token: SecretStr | None = None
    """What Milvus asks for: user:password, or an API key."""
    milvus_timeout_ms: AtLeast1 = 2000
    """Longest wait for one search in Milvus [ms]; past it comes 503."""
    provider: ProviderName = "cpu"
    """What ONNX Runtime encodes on: cpu, cuda or tensorrt."""
    tensorrt_cache: Path = Path("builds/tensorrt")
    """Folder where TensorRT keeps its engines."""
    threads: AtLeast1 = Field(default_factory=available_cpus)
    """Threads for encoding and searching; by default the processors that the affinity mask and the
    cgroup quota allow."""
    encode_threads: AtLeast1 = 1
    """Threads that encode one batch. With 1, the service encodes `CARE_THREADS` batches at once,
    which gives the highest throughput; more threads give lower latency to a single client."""
    batch_tokens: AtLeast1 = Field(
        default_factory=lambda known: 192 if known["provider"] == "cpu" else 16_384
    )
    """Tokens of a batch, padding included; by default 192 on processors, where larger batches gain
    nothing, and 16384 on GPUs."""
    batch_padding: AtLeast0 = Field(
        default_factory=lambda known: 4 if known["provider"] == "cpu" else known["batch_tokens"]
    )
    """Most padding that adding one more text may cost a batch [tokens]. A text that would cost
    more goes into another batch. By default 4 on processors; no limit on GPUs."""
    queue_tokens: AtLeast1 = 8192
    """Tokens (counted as characters) in work or waiting; a request that finds no room is answered
    with 429."""
    timeout_ms: int = Field(10_000, ge=1, le=60_000)
    """Deadline of a request without X-Request-Timeout-Ms [ms]; past it comes 504."""
    max_requests: AtLeast1 = 1024
    """Requests at once; one more is answered with 503."""
    max_query_chars: AtLeast1 = 2000
    """Longest query [characters]."""
    max_top_k: AtLeast1 = 1000
    """Largest top_k."""
    max_batch: AtLeast1 = 64
    """Most queries in one batch request."""
    max_body_bytes: AtLeast1 = 1_048_576
    """Largest request body [bytes]."""
    cache_entries: AtLeast0 = 10_000
    """Queries whose hits are kept in memory; 0 turns this cache off."""
    redis_url: SecretStr | None = None
    """Redis that replicas share as cache and for rate limits: redis://…"""
    redis_timeout_ms: AtLeast1 = 20
    """Longest wait for Redis [ms]; search goes on without it."""
    cache_ttl_seconds: AtLeast1 = 86_400
    """Life of an entry in Redis [s]."""
    cache_secret: SecretStr | None = None
    """Secret under which cache keys are hashed; needed with CARE_REDIS_URL, and the same for all
    replicas."""
    api_keys: SecretStr | None = None
    """Keys that may ask, comma-separated name:role:sha256, with role search or admin (python -m
    service key makes one). Without any, search is open, and POST /index/reload to this machine if
    CARE_HOST is loopback."""
    rate_limit: float = Field(0.0, ge=0)
    """Queries per second that one key may ask; 0 sets no limit."""
    rate_burst: AtLeast1 = 100
    """Queries that a key may ask at once."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins whose pages may call the service, comma-separated."""
    root_path: str = Field("", pattern=r"^(/[\w.~-]+)*$")
    """Path under which a proxy, which takes it away, serves: /care."""
    watch_seconds: float = Field(0.0, ge=0)
    """How often to look whether another version has become the active one, and load it [s]; 0
    leaves that to POST /index/reload."""
    drain_seconds: float = Field(0.0, ge=0)
    """How long the service goes on after SIGTERM, no longer ready, so that balancers see it [s]."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """debug, info, warning, error."""

    @property
    def encoders(self) -> int:
        """Batches that are encoded at once; a GPU is kept busy by two."""
        return max(1, self.threads // self.encode_threads) if self.provider == "cpu" else 2

    @property
    def searchers(self) -> int:
        """Threads that search beside those that encode.

        None where every thread encodes, which then searches for what it has encoded; many where
        they only wait for Milvus.
        """
        if self.store == "milvus":
            return max(16, self.threads)
        return self.threads if self.encoders < self.threads else 0

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        origins = tuple(part.strip() for part in value.split(",") if part.strip())
        if not all(map(_ORIGIN.fullmatch, origins)):
            raise ValueError("is not a list of origins such as https://host or http://host:8080")
        return origins

    @model_validator(mode="after")
    def _has_what_others_need(self) -> Self:
        if self.store == "milvus" and not self.milvus_uri:
            raise ValueError("CARE_STORE=milvus needs CARE_MILVUS_URI")
        if self.redis_url and not self.cache_secret:
            message = "a long random text, the same for all replicas"
            raise ValueError(f"CARE_REDIS_URL needs CARE_CACHE_SECRET: {message}")
        return self


def read_settings() -> Settings:
    """Reads the environment; the message of its `CareError` never quotes a value."""
    known = {f"CARE_{name}".upper() for name in Settings.model_fields}
    for name in sorted(os.environ.keys() - known - {"CARE_LOAD_KEY"}):  # the load test's
        if not name.startswith("CARE_") or _OF_KUBERNETES.match(f"{name}={os.environ[name]}"):
            continue
        (nearest,) = get_close_matches(name, known, n=1, cutoff=0)
        message = f"{name} is not a setting; the nearest is {nearest}"
        raise CareError(message, code="unknown_setting", name=name, nearest=nearest)
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "".join(f"CARE_{field}".upper() for field in first["loc"][:1])
        message = first["msg"].removeprefix("Value error, ")
        message = f"{name}: {message}" if name else message
        raise CareError(message, code="invalid_setting", name=name) from None
