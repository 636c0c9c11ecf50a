"""Settings of the service: one `CARE_*` environment variable each, read and checked at start."""

import logging
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from core.choices import (
    DEFAULT_INDEXES,
    DEFAULT_PAIR,
    DEFAULT_PAIRS,
    DEFAULT_QUERY_CHARS,
    SearchDevice,
)
from core.errors import CareError
from core.loopback import is_loopback
from core.machine import available_cpus
from models.encoders.providers import BATCH_TOKENS, ProviderName

_LOG = logging.getLogger("care.service")

# Variables with the same prefix that are not settings of the service: those of other commands and
# of load tests, and those that Kubernetes sets for Services named care and care-….
_OTHER_VARIABLES = {"CARE_BUILDS", "CARE_HUB", "CARE_LOAD_KEY"}
_OF_KUBERNETES = re.compile(
    r"CARE_(\w+_)?(SERVICE_(HOST|PORT\w*)=|PORT_\d+_(TCP|UDP|SCTP)\w*=|PORT=(tcp|udp|sctp)://)"
)
# In the form that browsers send: lower case, other letters in Punycode.
_ORIGIN = re.compile(r"\*|https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")

# Of signed tokens.
Algorithm = Literal["HS256", "EdDSA", "RS256"]

AtLeast0 = Annotated[int, Field(ge=0)]
AtLeast1 = Annotated[int, Field(ge=1)]


class Settings(BaseSettings):
    """Settings of the service, read once from environment variables."""

    model_config = SettingsConfigDict(
        env_prefix="CARE_", frozen=True, use_attribute_docstrings=True
    )

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    workers: AtLeast1 | None = None
    """Processes that serve together. They share the port, the files of the index and all limits.
    Default: the number of processors that the affinity mask and the cgroup quota allow, fewer if
    their memory would take more than half of what the cgroup allows; 1 if the encoder or FAISS runs
    on a GPU."""
    indexes: Path = DEFAULT_INDEXES
    """Folder of all indexes."""
    index: str = "sample"
    """Name of the index to search."""
    serve_indexes: Annotated[tuple[str, ...], NoDecode] = ("*",)
    """Names of the indexes to serve besides `CARE_INDEX`, comma-separated; `*` stands for any
    characters. Default: all of `CARE_INDEXES`. Each is opened when a request names it."""
    open_bytes: AtLeast1 | None = None
    """Most private memory that open indexes may take in one worker besides `CARE_INDEX`, estimated
    [bytes]; beyond it the one closes that has not been used for longest. Default: a quarter of what
    the cgroup allows, divided by the number of workers."""
    pair: str = DEFAULT_PAIR
    """Pair whose query encoder is loaded: the name of a trained or registered pair, or the path of
    a pair's .toml file."""
    other_pairs: Annotated[tuple[str, ...], NoDecode] = ()
    """Pairs whose query encoders are loaded too, comma-separated, for indexes of other embedding
    spaces. Each has threads and a queue of its own."""
    pairs: Path = DEFAULT_PAIRS
    """Folder of trained pairs: NAME/pair.toml, which `care export` writes."""
    store: Literal["faiss", "milvus"] = "faiss"
    """Where indexes are: faiss (files in CARE_INDEXES) or milvus."""
    milvus_uri: SecretStr | None = None
    """Address of Milvus, required with CARE_STORE=milvus: http://host:19530/database."""
    milvus_token: SecretStr | None = None
    """Credentials of Milvus: user:password, or an API key."""
    milvus_timeout_ms: AtLeast1 = 2000
    """Time-out of one search in Milvus [ms]; after it the response is 503."""
    faiss_device: SearchDevice = "cpu"
    """Where FAISS searches: cpu, cuda, or cuda-fp16, which halves the memory of exact search on the
    GPU and scores its hits again in full precision."""
    provider: ProviderName = "cpu"
    """Execution provider of ONNX Runtime: cpu, cuda or tensorrt."""
    tensorrt_cache: Path = Path("builds/tensorrt")
    """Folder of the engines that TensorRT builds."""
    threads: AtLeast1 = Field(
        default_factory=lambda known: max(1, available_cpus() // (known["workers"] or 1))
    )
    """Threads of one worker for encoding and searching. Default: the number of processors that the
    affinity mask and the cgroup quota allow, divided by the number of workers."""
    encode_threads: AtLeast1 = 1
    """Threads that encode one batch. With 1, the service encodes `CARE_THREADS` batches at once,
    which gives the highest throughput; more threads give lower latency to a single client."""
    batch_tokens: AtLeast1 = Field(
        default_factory=lambda known: 192 if known["provider"] == "cpu" else BATCH_TOKENS
    )
    """Largest batch [tokens], padding included. Default: 192 on processors, where larger batches do
    not raise throughput; 16384 on GPUs, where it bounds the memory of the encoder."""
    batch_padding: AtLeast0 = Field(
        default_factory=lambda known: 4 if known["provider"] == "cpu" else known["batch_tokens"]
    )
    """Most padding that one more text may add to a batch [tokens]; a text that would add more goes
    into another batch. Default: 4 on processors; no limit on GPUs."""
    queue_tokens: AtLeast1 = 8192
    """Most tokens, counted as characters, that are queued or being encoded. A request that exceeds
    it gets 429."""
    overflow_pair: str = ""
    """Pair whose query encoder takes searches that the full queue has no room for, instead of 429:
    one of the same embedding space that is much faster, such as care-mini-lookup. It has a queue of
    the same length. While it has work, it also takes searches beyond a quarter of the first queue,
    and the threads of the first encoder have the lowest priority (nice 19). Unset: 429."""
    timeout_ms: int = Field(10_000, ge=1, le=60_000)
    """Deadline of a request without the header X-Request-Timeout-Ms [ms]; after it the response is
    504. A request to /v1/embeddings has this time for each `CARE_MAX_BATCH` texts."""
    max_requests: AtLeast1 = 1024
    """Most requests at once, whose bodies have arrived; one more gets 503."""
    max_query_chars: AtLeast1 = DEFAULT_QUERY_CHARS
    """Longest query, or text to encode [characters]."""
    channel_timeout_ms: AtLeast1 = 200
    """Longest time that a hybrid search waits for full text once the vector of its query is ready
    [ms]; after it the vectors alone answer."""
    max_top_k: AtLeast1 = 1000
    """Largest top_k."""
    rerank_url: SecretStr | None = None
    """Address of a server with `/v1/rerank` (the form of Cohere and Jina), such as
    http://host:8080/v1, which ranks the hits of queries with `rerank` in place of late interaction.
    Queries and passages are sent to it. Needs the extra rerank."""
    rerank_model: str = ""
    """The server's name of its model, if it asks for one."""
    rerank_key: SecretStr | None = None
    """Key of the server, sent as a bearer token."""
    rerank_truncate_tokens: AtLeast1 | None = None
    """Most tokens of query and passage together, sent as `truncate_prompt_tokens`: vLLM truncates
    longer ones, which it refuses otherwise. At most the maximum length of the model. Unset: not
    sent, because other servers may reject the unknown field."""
    rerank_timeout_ms: AtLeast1 = 1000
    """Time-out of one call of the server [ms]; after it the hits stay as they are, marked."""
    rerank_hits: AtLeast1 = 50
    """Number of hits that a query with `"rerank": true` ranks again."""
    max_rerank: AtLeast1 = 200
    """Most hits that one query ranks again."""
    chat_url: SecretStr | None = None
    """Address of a server with `/v1/chat/completions` (OpenAI's form), such as http://host:8001/v1,
    which writes answers with citations for the search page. Questions and passages are sent to it.
    Needs CARE_CHAT_MODEL and the extra chat. Unset: no answers."""
    chat_model: str = ""
    """The server's name of its model."""
    chat_key: SecretStr | None = None
    """Key of the server, sent as a bearer token."""
    chat_timeout_ms: AtLeast1 = 60_000
    """Time-out of one answer of the server, to its end [ms]."""
    max_batch: AtLeast1 = 64
    """Most queries in one request to /search/batch."""
    max_embeddings: AtLeast1 = 2048
    """Most texts in one request to /v1/embeddings. The default is OpenAI's limit. Texts are encoded
    in parts of at most `CARE_MAX_BATCH` texts and a quarter of `CARE_QUEUE_TOKENS`."""
    max_documents: AtLeast1 = 1000
    """Most documents of one request that writes them, and most ids of one that deletes them."""
    write_queue_bytes: AtLeast1 = 67_108_864
    """Most bytes of writes that wait to be committed to one index. A request that exceeds it gets
    429."""
    max_indexes: AtLeast1 = 1000
    """Most indexes in `CARE_INDEXES`. A request that would create one more gets 507."""
    max_index_bytes: AtLeast1 | None = None
    """Most bytes of the files of one index, with those of all versions that are kept. Documents
    that are put beyond it get 507. It is measured every 5 s, so what is written meanwhile can
    exceed it. Unset: no limit."""
    max_indexes_bytes: AtLeast1 | None = None
    """Most bytes of the files of all indexes, likewise; no index can be created beyond it either.
    Unset: no limit."""
    document_url: SecretStr | None = None
    """Address of a server with `/v1/embeddings` (OpenAI's form), such as http://host:8001/v1, which
    encodes the documents that are written. It must run the document encoder of the index's pair.
    Needs the extra openai. Unset: the writer process encodes them with the backend that built the
    index."""
    document_model: str = ""
    """The server's name of its model; by default that of the pair."""
    max_body_bytes: AtLeast1 = 4_194_304
    """Largest request body, before and after it is decoded [bytes]. The default fits 1000 texts of
    1300 Chinese characters."""
    max_answer_bytes: AtLeast1 = 268_435_456
    """Most bytes of answers that are being made or sent, estimated before the search: `top_k` times
    the mean size of a document, for each query. A request that exceeds it gets 429. Answers below
    64 KiB are not counted, and one answer alone may be larger."""
    max_header_bytes: int = Field(16_384, ge=1024)
    """Longest head of a request: request line and headers [bytes]. The request line may have 8192
    bytes, and a request 128 headers."""
    max_connections: AtLeast1 = 4096
    """Most open connections, fewer if the limit of open files (`ulimit -n`) is lower. Beyond it the
    connection ends whose client the service has waited for longest."""
    max_unsent_bytes: AtLeast1 = 67_108_864
    """Most bytes of responses that clients have not yet taken. Beyond it the connection ends that
    has been sending for longest."""
    client_timeout_seconds: float = Field(10.0, gt=0)
    """Longest time that a client takes to send the head of a request, or to take the next 64 KiB of
    a response [s]; after it the connection ends."""
    keep_alive_seconds: float = Field(75.0, gt=0)
    """Longest time that a connection waits for its next request [s]."""
    cache_entries: AtLeast0 = 10_000
    """Queries whose results are cached in memory, fewer if their documents take more than 64 MiB,
    and as many vectors of queries; 0 disables both caches."""
    redis_url: SecretStr | None = None
    """Address of a Redis that replicas share as a cache and for rate limits: redis://…"""
    redis_timeout_ms: AtLeast1 = 20
    """Time-out of a Redis call [ms]; after it the search continues without Redis."""
    cache_ttl_seconds: AtLeast1 = 86_400
    """Time to live of a cache entry in Redis [s]."""
    cache_secret: SecretStr | None = None
    """Secret for the hashes of cache keys; required with CARE_REDIS_URL, and the same for all
    replicas."""
    api_keys: SecretStr | None = None
    """API keys as comma-separated name:role:sha256; the role, in the index of `CARE_INDEX`, is
    search, write or admin. `care key` makes one. With any key, every path needs one except health,
    the pages and their files, and /metrics (see `CARE_OPEN_METRICS`). Without keys, search is open
    to everyone, and what needs the role write or admin to clients on this machine if CARE_HOST is a
    loopback address."""
    api_keys_file: Path | None = None
    """File of such entries, one per line or separated by commas, or of tables in TOML that have
    grants (docs/secure.md); `#` begins a comment. A changed file takes effect within 2 s; if it is
    wrong, the last keys stay. Not with CARE_API_KEYS."""
    token_algorithms: Annotated[tuple[Algorithm, ...], NoDecode] = ()
    """Algorithms of the signed tokens (JWT) that are accepted beside API keys, comma-separated:
    HS256, EdDSA, RS256. Needs CARE_TOKEN_KEYS and the extra jwt. Unset: no tokens."""
    token_keys: Path | None = None
    """File of the keys that verify tokens: a JSON Web Key Set with secrets (HS256) or public keys,
    found by their `kid`. A changed file takes effect within 2 s; if it is wrong, the last keys
    stay."""
    token_audience: str = Field("care", min_length=1)
    """What the claim `aud` of a token has."""
    token_issuer: str = ""
    """What the claim `iss` of a token is. Unset: any, or none."""
    audit_file: str = ""
    """File to which each request for an index is appended as a line of JSON: time, request id, key,
    index, route, status, number of hits, and numbers of documents that were written; - for standard
    output. Unset: none."""
    open_metrics: bool = True
    """Whether GET /metrics needs no key. Set it to false if Prometheus sends one."""
    rate_limit: float = Field(0.0, ge=0)
    """Most queries per second of one API key; 0 disables the limit. Replicas with one Redis, one
    `CARE_CACHE_SECRET` and one `CARE_INDEX` share it."""
    rate_burst: AtLeast1 = 100
    """Most queries of one API key in a burst."""
    index_rate_limit: float = Field(0.0, ge=0)
    """Most queries per second to one index, of all keys together; 0 disables the limit. Shared like
    `CARE_RATE_LIMIT`."""
    index_rate_burst: AtLeast1 = 1000
    """Most queries to one index in a burst."""
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    """Origins whose pages may call the service (CORS), comma-separated."""
    root_path: str = Field("", pattern=r"^(/[\w.~-]+)*$")
    """Path prefix that a reverse proxy strips, such as /care."""
    watch_seconds: float = Field(10.0, ge=0)
    """Mean interval at which the service checks the files of its indexes [s]; it finds another
    active version within half a second. 0 disables both: call POST /index/reload instead."""
    drain_seconds: float = Field(0.0, ge=0)
    """Time that the service keeps accepting requests after SIGTERM, while GET /health/ready returns
    503 and load balancers remove it [s]."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the log: debug, info, warning or error."""

    @property
    def max_values(self) -> int:
        """Most JSON values of a request body: more than any valid request has."""
        return max(self.max_batch * 2048, self.max_embeddings * 16)

    @property
    def max_names(self) -> int:
        """Most names of JSON fields in a request body: more than any valid request has."""
        return self.max_batch * 128

    @property
    def encode_workers(self) -> int:
        """Number of batches that are encoded at once; two saturate a GPU."""
        return max(1, self.threads // self.encode_threads) if self.provider == "cpu" else 2

    @property
    def search_workers(self) -> int:
        """Number of threads that only search.

        0 if every thread encodes: each then searches for the batches that it has encoded. With
        Milvus at least 16, which mostly wait.
        """
        if self.store == "milvus":
            return max(16, self.threads)
        return self.threads if self.encode_workers < self.threads else 0

    @field_validator("port", mode="before")
    @classmethod
    def _ignore_address(cls, value: object) -> object:
        of_kubernetes = _OF_KUBERNETES.match(f"CARE_PORT={value}")
        return cls.model_fields["port"].default if of_kubernetes else value

    @field_validator("api_keys", "api_keys_file", mode="before")
    @classmethod
    def _check_not_empty(cls, value: object) -> object:
        # An empty value is often a failed substitution, and would open the service to everyone.
        if isinstance(value, str) and not value.strip():
            raise ValueError("is empty: set it, or unset it to serve without keys")
        return value

    @field_validator("serve_indexes", "other_pairs", "token_algorithms", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

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
    def _check_dependent_settings(self) -> Self:
        if self.store == "milvus" and not self.milvus_uri:
            raise ValueError("CARE_STORE=milvus requires CARE_MILVUS_URI")
        if self.api_keys and self.api_keys_file:
            raise ValueError("set either CARE_API_KEYS or CARE_API_KEYS_FILE, not both")
        if bool(self.token_keys) != bool(self.token_algorithms):
            raise ValueError("set both CARE_TOKEN_KEYS and CARE_TOKEN_ALGORITHMS, or neither")
        if self.rerank_hits > self.max_rerank:
            raise ValueError("CARE_RERANK_HITS exceeds CARE_MAX_RERANK")
        if self.chat_url and not self.chat_model:
            raise ValueError("CARE_CHAT_URL requires CARE_CHAT_MODEL")
        if self.redis_url and not self.cache_secret:
            message = "set it to a long random text, the same for all replicas"
            raise ValueError(f"CARE_REDIS_URL requires CARE_CACHE_SECRET: {message}")
        return self


def known_variables() -> set[str]:
    """Returns the names of all `CARE_*` variables that a command reads."""
    return {f"CARE_{name}".upper() for name in Settings.model_fields} | _OTHER_VARIABLES


def check_variables() -> None:
    """Checks the names of all `CARE_*` variables, in lower case too; errors name the nearest."""
    known = known_variables()
    for name in sorted(os.environ.keys() - known):
        upper = name.upper()
        if not upper.startswith("CARE_") or _OF_KUBERNETES.match(f"{name}={os.environ[name]}"):
            continue
        (nearest,) = get_close_matches(upper, known, n=1, cutoff=0)
        message = f"{name} is not a known variable; did you mean {nearest}? If not, unset it"
        raise CareError(message, code="unknown_setting", name=name, nearest=nearest)


def ignored_port() -> str:
    """Returns a warning if Kubernetes has set `CARE_PORT`, or ""."""
    if not _OF_KUBERNETES.match(f"CARE_PORT={os.environ.get('CARE_PORT', '')}"):
        return ""
    return (
        "CARE_PORT is the address of a Kubernetes Service named care, and is ignored: rename the "
        "Service, set enableServiceLinks: false in the pod, or set CARE_PORT there to a port"
    )


def warn_of_settings(settings: Settings) -> None:
    """Logs what is probably not what was meant."""
    if warning := ignored_port():
        _LOG.warning(warning, extra={"fields": {"port": settings.port}})
    keys = settings.api_keys or settings.api_keys_file or settings.token_keys
    if not (keys or is_loopback(settings.host)):
        _LOG.warning(
            "no API keys: everyone who reaches this address may search; set CARE_API_KEYS",
            extra={"fields": {"host": settings.host}},
        )


def read_settings() -> Settings:
    """Reads the settings from the environment.

    A CareError names the variable, and does not quote its value.
    """
    check_variables()
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "".join(f"CARE_{field}".upper() for field in first["loc"][:1])
        message = first["msg"].removeprefix("Value error, ")
        message = f"{name}: {message}" if name else message
        raise CareError(message, code="invalid_setting", name=name) from None


def plain(secret: SecretStr | None) -> str:
    """Returns the text of a secret setting, "" if it is not set."""
    return secret.get_secret_value() if secret else ""
