"""Where the vectors of a version are kept: in a file of FAISS beside it, or in Milvus."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from core.errors import CareError, ProviderError
from core.milvus import alias_name, read_collection
from core.shards import ShardedVectors
from core.types import FloatArray, IndexManifest, RowArray
from core.versions import VECTORS
from indexer import faiss_factory, milvus_factory
from indexer.faiss_index import build_index, read_index
from indexer.faiss_search import best_scores, choose_search
from indexer.recall import SearchChoice

if TYPE_CHECKING:
    from indexer.milvus_store import MilvusStore

Store = Literal["faiss", "milvus"]
STORES: tuple[Store, ...] = ("faiss", "milvus")


@dataclass(frozen=True, slots=True)
class MilvusAddress:
    """Where Milvus is: http://host:19530, with /database where it is not the default one."""

    uri: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What the vectors of a new version are written from.

    Attributes:
        name: The index.
        version: The version's id.
        folder: Its hidden folder, where documents and filters lie already.
        vectors: All document vectors.
        filter_fields: The number of values of each metadata field.
        factory: The index to build.
        queries: float32 [q, dimension], held-out query vectors.
        recall: The recall@10 that search parameters must reach.
        threads: Threads to use.
        memory: What inverted lists in work, or a sample to train on, may take [bytes].
        progress: Whether to show bars.
    """

    name: str
    version: str
    folder: Path
    vectors: ShardedVectors
    filter_fields: dict[str, int]
    factory: str
    queries: FloatArray
    recall: float
    threads: int
    memory: int
    progress: bool


class StoredVectors(Protocol):
    """The vectors of a version, where a search finds them."""

    @property
    def count(self) -> int:
        """The number of vectors."""
        ...

    @property
    def dimension(self) -> int:
        """Their dimensions."""
        ...

    def best_scores(self, queries: FloatArray) -> FloatArray:
        """Returns float32 [q], the score of each query's best hit, searched for widely."""
        ...

    def take(self, rows: RowArray) -> FloatArray:
        """Returns float32 [rows, dimension], as they are kept."""
        ...


def store_of(manifest: IndexManifest) -> Store:
    """Returns where the vectors of a version are kept."""
    return "faiss" if VECTORS in manifest.files else "milvus"


def choose_factory(store: Store, count: int, dimension: int) -> str:
    """Returns the factory string for `count` vectors."""
    if store == "milvus":
        return milvus_factory.choose_factory(count)
    return faiss_factory.choose_factory(count, dimension)


def check_factory(store: Store, factory: str, dimension: int, count: int | None = None) -> None:
    """Refuses a factory string before any work is done; `count` is None while not known.

    Raises:
        CareError: If the store does not build such an index, or not of these vectors.
    """
    if store == "milvus":
        milvus_factory.check_factory(factory)
    else:
        faiss_factory.check_factory(factory, dimension, count)


def check_store(store: Store, milvus: MilvusAddress | None) -> None:
    """Finds out whether vectors can be kept there, before any work is done.

    Raises:
        CareError: If Milvus does not answer, or its address is not known.
        ProviderError: If its client is not installed.
    """
    if store == "milvus":
        open_milvus(milvus)


def write_vectors(store: Store, new: NewVersion, milvus: MilvusAddress | None) -> SearchChoice:
    """Writes the vectors of a new version, and chooses how they are searched.

    Raises:
        CareError: If they cannot be written whole.
        IndexVersionError: If no search reaches the recall asked for.
    """
    if store == "milvus":
        return open_milvus(milvus).write(new)
    path = new.folder / VECTORS
    build_index(
        new.vectors,
        new.factory,
        path,
        threads=new.threads,
        memory=new.memory,
        progress=new.progress,
    )
    return choose_search(read_index(path), new.vectors, new.queries, new.recall)


def open_vectors(folder: Path, milvus: MilvusAddress | None) -> StoredVectors:
    """Opens the vectors of a version.

    Raises:
        CareError: If they are in Milvus, which cannot be asked.
        IndexVersionError: If they are gone or cannot be read.
    """
    collection = read_collection(folder)
    if collection is None:
        return _FaissVectors(folder / VECTORS)
    return open_milvus(milvus).open(collection)


def lead_alias(name: str, folder: Path, milvus: MilvusAddress | None) -> None:
    """Lets the alias of an index lead to a version whose vectors are in Milvus, in one step.

    Raises:
        CareError: If Milvus cannot be asked; the alias stays where it was.
    """
    if collection := read_collection(folder):
        open_milvus(milvus).lead(alias_name(name), collection)


def has_alias(folder: Path, milvus: MilvusAddress | None) -> bool:
    """Returns whether services find a version by an alias in Milvus.

    Raises:
        CareError: If its vectors are in Milvus, which cannot be asked.
    """
    collection = read_collection(folder)
    return collection is not None and open_milvus(milvus).has_alias(collection)


def drop_vectors(folder: Path, milvus: MilvusAddress | None) -> None:
    """Drops what a folder has outside of it: the collection, if there is one.

    Raises:
        CareError: If Milvus cannot be asked.
    """
    if collection := read_collection(folder):
        open_milvus(milvus).drop(collection)


def open_milvus(milvus: MilvusAddress | None) -> "MilvusStore":
    """Connects to Milvus.

    Raises:
        CareError: If it does not answer, or its address is not known.
        ProviderError: If its client is not installed.
    """
    if milvus is None:
        raise CareError("vectors in Milvus need its address: --milvus-uri, or CARE_MILVUS_URI")
    try:
        from indexer.milvus_store import MilvusStore
    except ModuleNotFoundError as error:
        raise ProviderError(
            "vectors in Milvus need pymilvus: pip install 'care-retrieval[distributed]'"
        ) from error
    return MilvusStore(milvus.uri, milvus.token)


class _FaissVectors:
    def __init__(self, path: Path) -> None:
        self._index = read_index(path)
        self.count: int = self._index.ntotal
        self.dimension: int = self._index.d

    def best_scores(self, queries: FloatArray) -> FloatArray:
        return best_scores(self._index, queries)

    def take(self, rows: RowArray) -> FloatArray:
        vectors: FloatArray = self._index.reconstruct_batch(rows)
        return vectors
