"""Options of builds and updates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.choices import DEFAULT_BUILDS, DEFAULT_INDEXES
from core.encoders import TokenVectorSpec
from core.manifest import Chunking
from core.terms import TermList
from indexer.encoding import Executor
from indexer.publication import IndexWriter
from stores.base import StoreName
from stores.registry import FAISS_ONLY, VectorStores

DEFAULT_RECALL = 0.99


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build: those of `care index`, with the values that they stand for."""

    corpus: str  # a JSONL (also .jsonl.gz) or Parquet file, a folder, or a glob
    name: str
    indexes: Path = DEFAULT_INDEXES
    builds: Path = DEFAULT_BUILDS
    factory: str | None = None
    # Required recall@10 of the search parameters. With None the target is 0.99, and if no
    # parameters reach it, the best ones are used with a warning.
    recall: float | None = None
    queries: Path | None = None
    max_reject_rate: float = 0.01
    shard_size: int = 4096
    batch_size: int = 32
    threads: int = 1
    memory_gib: float = 4.0
    progress: bool = True
    # How to split long documents, or None to index them as a whole.
    chunking: Chunking | None = None
    store: StoreName = "faiss"
    stores: VectorStores = FAISS_ONLY  # all stores that versions of the index may use
    executor: Executor | None = None  # runs the document encoder; None runs it in this process
    backend: str = "onnx"  # of the document encoder, for the manifest
    dtype: str = "auto"  # requested of the document encoder, for the manifest
    full_text: bool = True
    # How a hybrid search fuses vectors and full text, for the manifest.
    fusion: Mapping[str, float] = field(default_factory=dict)
    # Words of patients and their clinical terms, for searches in full text; None for none.
    terms: TermList | None = None
    # The token vectors that the document encoder computes; None for none.
    token_vectors: TokenVectorSpec | None = None

    @property
    def index(self) -> IndexWriter:
        return IndexWriter(self.indexes, self.name, self.stores)
