"""Options of builds and updates, and their defaults."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from core.choices import DEFAULT_BUILDS, DEFAULT_INDEXES, DEFAULT_PAIR, Backend, Dtype, StoreName

if TYPE_CHECKING:
    from stores.registry import VectorStores

_Value = TypeVar("_Value")


def setting(variable: str, kind: Callable[[str], _Value], default: _Value) -> _Value:
    """Returns the value of an environment variable, or `default` if it is unset or empty."""
    text = os.environ.get(variable)
    return kind(text) if text else default


def _setting(variable: str, kind: Callable[[str], Any], default: Any) -> Any:
    return field(
        default_factory=lambda: setting(variable, kind, default), metadata={"default": default}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How an index is built; the names and meanings are those of the options of `care index`.

    Attributes:
        pair: Trained pair (`NAME/pair.toml` in the folder `CARE_PAIRS`, "pairs" by default),
            registered pair, or path of a pair's TOML file; by default `CARE_PAIR` or "care-mini".
        indexes: Folder of all indexes; by default `CARE_INDEXES` or "indexes".
        builds: Folder of resumable builds; by default `CARE_BUILDS` or "builds".
        factory: FAISS factory such as "Flat", "HNSW32" or "IVF1024,SQ8", or None to choose it by
            the number of vectors; in an update, None keeps that of the active version.
        store: Where vectors are stored: "faiss" or "milvus"; None is "faiss", and in an update
            the store of the active version.
        milvus_uri: Address of Milvus; by default `CARE_MILVUS_URI`. Its token is read from
            `CARE_MILVUS_TOKEN`.
        recall: The recall@10 that search parameters must reach. With None the target is 0.99, and
            a lower recall is a warning; in an update, None keeps the target of the active version.
        queries: JSONL file of held-out queries that recall is measured with, or None to use
            first sentences of documents.
        max_reject_rate: Largest share of records that may be rejected.
        chunk_tokens: Tokens of a chunk, or None to keep documents whole.
        chunk_overlap: Most tokens that consecutive chunks share.
        shard_size: Texts in a shard.
        threads: Threads of the encoder and of FAISS, or None for all available processors.
        memory_gib: Memory limit for building inverted lists [GiB]; larger lists are built in parts.
        backend: What runs the document encoder: "onnx", "openvino", "transformers", "vllm",
            "openai" or "auto"; None is "auto", and in an update the backend of the active version.
        dtype: Data type that a checkpoint or OpenVINO computes in: "float32", "bfloat16",
            "float16" (checkpoints), "int8" (OpenVINO) or "auto"; None is "auto", and in an update
            that of the active version.
        batch_size: Texts in a batch, or None for 1024 with vLLM and 32 otherwise.
        replicas: Replicas of vLLM that share the texts.
        tensor_parallel: GPUs that share the model of one replica.
        executor: Where document encoders run: "local" or "ray".
        ray_address: Address of the Ray cluster: "local", "auto" or "host:port".
        ray_actors: Number of encoders on the Ray cluster.
        base_url: Address of a server with `/v1/embeddings`.
        model: The server's name of the model, or None for that of the pair.
        concurrency: Requests sent to the server at once.
        truncate: Whether the server is asked to truncate long texts.
        full_text: Whether the index has full text beside vectors, for the modes lexical and hybrid
            of a search; None is true, and in an update as in the active version.
        terms: TSV file of words that patients write and the clinical terms that they mean, which
            searches in full text then find too; a file without rows removes the list. None is none,
            and in an update the list of the active version.
        lexical_weight: Weight of full text in a hybrid search, which then is the default mode; with
            0 the default mode is dense. None takes that of the pair, and in an update that of the
            active version.
        token_vectors: Whether the index has token vectors, with which a search can rerank its hits
            by late interaction; the pair must compute them. None is false, and in an update as in
            the active version.
    """

    pair: str = _setting("CARE_PAIR", str, DEFAULT_PAIR)
    indexes: Path = _setting("CARE_INDEXES", Path, DEFAULT_INDEXES)  # noqa: RUF009
    builds: Path = _setting("CARE_BUILDS", Path, DEFAULT_BUILDS)  # noqa: RUF009
    factory: str | None = None
    store: StoreName | None = None
    milvus_uri: str | None = _setting("CARE_MILVUS_URI", str, None)
    recall: float | None = None
    queries: Path | None = None
    max_reject_rate: float = 0.01
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    shard_size: int = 4096
    threads: int | None = None
    memory_gib: float = 4.0
    backend: Backend | None = None
    dtype: Dtype | None = None
    batch_size: int | None = None
    replicas: int = 1
    tensor_parallel: int = 1
    executor: Literal["local", "ray"] = "local"
    ray_address: str = "local"
    ray_actors: int = 1
    base_url: str | None = None
    model: str | None = None
    concurrency: int = 8
    truncate: bool = False
    full_text: bool | None = None
    terms: Path | None = None
    lexical_weight: float | None = None
    token_vectors: bool | None = None


def vector_stores(milvus_uri: str | None) -> "VectorStores":
    """Returns the stores of vectors, given the address of Milvus, if there is any."""
    from stores.registry import MilvusAddress, VectorStores

    token = os.environ.get("CARE_MILVUS_TOKEN", "")
    return VectorStores(MilvusAddress(milvus_uri, token) if milvus_uri else None)
