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

# Searches in Milvus at once.
_WAITING_THREADS = 16
# Variables of the same prefix that are no settings: the load test's, and those that Kubernetes
# makes of Services named care and care-….
_OTHERS = {"CARE_LOAD_KEY"}
_OF_KUBERNETES = re.compile(
    r"CARE_(\w+_)?(SERVICE_(HOST|PORT\w*)=|PORT_\d+_(TCP|UDP)\w*=|PORT=(tcp|udp)://)"
)
_ORIGIN = re.compile(r"\*|https?://[^\s/?#@]+")


class Settings(BaseSettings):
    """What the service reads from its environment, once, at start."""

    model_config = SettingsConfigDict(env_prefix="CARE_", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    indexes: Path = Field(Path("indexes"), description="Folder of the indexes.")
    index: str = Field("sample", description="Name of the index to search.")
    pair: str = Field(
        DEFAULT_PAIR, description="Pair whose query encoder is used: a registered name or a .toml."
    )
    store: Literal["faiss", "milvus"] = Field(
        "faiss",
        description="Where the vectors are: faiss, in files beside the documents, or milvus.",
    )
    milvus_uri: SecretStr | None = Field(
        None, description="Milvus, needed with CARE_STORE=milvus: http://host:19530/database."
    )
    milvus_token: SecretStr | None = Field(
        None, description="What Milvus asks for: user:password, or an API key."
    )
    milvus_timeout_ms: int = Field(
        2000, ge=1, description="Longest wait for one search in Milvus [ms]; past it comes 503."
    )
    provider: ProviderName = Field(
        "cpu", description="What ONNX Runtime encodes on: cpu, cuda or tensorrt."
    )
    tensorrt_cache: Path = Field(
        Path("builds/tensorrt"), description="Folder where TensorRT keeps its engines."
    )
    threads: int = Field(
        default_factory=available_cpus,
        ge=1,
        description="Threads for encoding and searching; by default the processors that the "
        "affinity mask and the cgroup quota allow.",
    )
    encode_threads: int = Field(
        1,
        ge=1,
        description="Threads that encode one batch. With 1, as many batches are encoded at once "
        "as there are threads, which wastes least; more shorten the answer of an idle service.",
    )
    batch_tokens: int = Field(
        default_factory=lambda known: 192 if known["provider"] == "cpu" else 16_384,
        ge=1,
        description="Tokens of a batch, padding included; by default 192 on processors, where "
        "larger batches gain nothing, and 16384 on GPUs.",
    )
    batch_padding: int = Field(
        default_factory=lambda known: 4 if known["provider"] == "cpu" else known["batch_tokens"],
        ge=0,
        description="Padding that one more text may add to a batch [tokens]; by default 4 on "
        "processors, below what a run of its own costs, and any on GPUs.",
    )
    queue_tokens: int = Field(
        8192,
        ge=1,
        description="Tokens (counted as characters) in work or waiting; a request that finds "
        "no room is answered with 429.",
    )
    timeout_ms: int = Field(
        10_000,
        ge=1,
        le=60_000,
        description="Deadline of a request without X-Request-Timeout-Ms [ms]; past it comes 504.",
    )
    max_requests: int = Field(
        1024, ge=1, description="Requests at once; one more is answered with 503."
    )
    max_query_chars: int = Field(2000, ge=1, description="Longest query [characters].")
    max_top_k: int = Field(1000, ge=1, description="Largest top_k.")
    max_batch: int = Field(64, ge=1, description="Most queries in one batch request.")
    max_body_bytes: int = Field(1_048_576, ge=1, description="Largest request body [bytes].")
    cache_entries: int = Field(
        10_000, ge=0, description="Queries whose hits are kept in memory; 0 turns this cache off."
    )
    redis_url: SecretStr | None = Field(
        None, description="Redis that replicas share as cache and for rate limits: redis://…"
    )
    redis_timeout_ms: int = Field(
        20, ge=1, description="Longest wait for Redis [ms]; search goes on without it."
    )
    cache_ttl_seconds: int = Field(86_400, ge=1, description="Life of an entry in Redis [s].")
    cache_secret: SecretStr | None = Field(
        None,
        description="Secret under which cache keys are hashed; needed with CARE_REDIS_URL, and "
        "the same for all replicas.",
    )
    api_keys: SecretStr | None = Field(
        None,
        description="Keys that may ask, comma-separated name:role:sha256, with role search or "
        "admin (python -m service key makes one). Without any, search is open, and POST "
        "/index/reload to this machine if CARE_HOST is loopback.",
    )
    rate_limit: float = Field(
        0.0, ge=0, description="Queries per second that one key may ask; 0 sets no limit."
    )
    rate_burst: int = Field(100, ge=1, description="Queries that a key may ask at once.")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose pages may call the service, comma-separated."
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[\w.~-]+)*$",
        description="Path under which a proxy, which takes it away, serves: /care.",
    )
    watch_seconds: float = Field(
        0.0,
        ge=0,
        description="How often to look whether another version has become the active one, and "
        "load it [s]; 0 leaves that to POST /index/reload.",
    )
    drain_seconds: float = Field(
        0.0,
        ge=0,
        description="How long the service goes on after SIGTERM, no longer ready, so that "
        "balancers see it [s].",
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning, error."
    )

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
            return max(_WAITING_THREADS, self.threads)
        return self.threads if self.encoders < self.threads else 0

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
            if not all(map(_ORIGIN.fullmatch, value)):
                raise ValueError(
                    "is not a list of origins such as https://host or http://host:8080"
                )
        return value

    @model_validator(mode="after")
    def _has_what_others_need(self) -> Self:
        if self.store == "milvus" and not self.milvus_uri:
            raise ValueError("CARE_STORE=milvus needs CARE_MILVUS_URI")
        if self.redis_url and not self.cache_secret:
            raise ValueError(
                "CARE_REDIS_URL needs CARE_CACHE_SECRET: a long random text, the same for all "
                "replicas"
            )
        return self


def read_settings() -> Settings:
    """Reads the environment.

    Raises:
        CareError: If a variable is unknown or has a wrong value, which the message does not quote.
    """
    known = {f"CARE_{name}".upper() for name in Settings.model_fields}
    for name in sorted(os.environ.keys() - known - _OTHERS):
        if not name.startswith("CARE_") or _OF_KUBERNETES.match(f"{name}={os.environ[name]}"):
            continue
        nearest = next(iter(get_close_matches(name, known, 1, 0)))
        raise CareError(
            f"{name} is not a setting; the nearest is {nearest}",
            code="unknown_setting",
            name=name,
            nearest=nearest,
        )
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "".join(f"CARE_{field}".upper() for field in first["loc"][:1])
        message = first["msg"].removeprefix("Value error, ")
        message = f"{name}: {message}" if name else message
        raise CareError(message, code="invalid_setting", name=name) from None
