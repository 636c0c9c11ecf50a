"""What every store of vectors does: build, open, search, read, activate, drop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from core.canaries import MIN_FOUND, canary_vectors
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.shards import ShardedVectors
from core.types import Filter, FloatArray, RowArray
from core.versions import current_version

StoreName = Literal["faiss", "milvus"]

# Cosine similarities, float32 [m], descending, and rows, int64 [m].
ScoredRows = tuple[FloatArray, RowArray]

# SQ8 storage returns a canary with a cosine of about .9999 to itself.
_MIN_CANARY_SCORE = 0.99
# An approximate index may miss a vector that it holds: it is searched this deep, and so widely.
_CANARY_DEPTH = 100


class StoreError(IndexVersionError):
    """A store cannot be reached, or refuses what it is asked for."""

    default_code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """Search parameters and the recall that was measured.

    Attributes:
        recall: The mean recall@10.
        tried: Recall@10 of each combination that was tried.
        hint: What to choose for a higher recall, if the one asked for was not reached; or "".
    """

    parameters: dict[str, int]
    recall: float
    tried: dict[str, float]
    hint: str = ""


@dataclass(frozen=True, slots=True)
class NewVectors:
    """What the vectors of a new version of an index are built from.

    Attributes:
        folder: Its hidden folder, which holds its documents and filters already.
        factory: The index type, which `check_factory` accepts for these vectors.
        queries: float32 [q, dimension], held-out query vectors.
        recall: The recall@10 that search parameters should reach.
        memory: What inverted lists in work, or a sample to train on, may take [bytes].
    """

    index: str
    version: str
    folder: Path
    vectors: ShardedVectors
    filters: FilterReader
    factory: str
    queries: FloatArray
    recall: float
    threads: int
    memory: int
    progress: bool


class Vectors(Protocol):
    """The vectors of one version, opened; may be shared by threads."""

    count: int
    dimension: int

    def search(
        self, query: FloatArray, k: int, rows: RowArray | None = None, filter_: Filter | None = None
    ) -> ScoredRows:
        """Finds the nearest vectors; k come back whenever k rows match.

        Args:
            query: float32 [dimension], of unit norm.
            k: Hits wanted, at most the number of vectors.
            rows: The rows that may be found, ascending, or None for all.
            filter_: The filter that these rows pass, for what does not search by rows.

        Returns:
            Cosine similarities, float32 [m], descending, and rows, int64 [m]; m is k, or
            the number of matching rows if that is less.

        Raises:
            UnavailableError: If the vectors cannot be searched now.
        """
        ...

    def take(self, rows: RowArray) -> FloatArray:
        """Returns float32 [rows, dimension], as they are kept."""
        ...


def check_vectors(vectors: Vectors, manifest: IndexManifest, place: Path | str) -> None:
    """Checks that the vectors in a file or collection are those that a manifest describes.

    Raises:
        IndexVersionError: If their number, their dimensions or the canaries differ.
    """
    found = vectors.count, vectors.dimension
    expected = manifest.count, manifest.encoder.dimension
    if found != expected:
        sizes = f"{found[0]} × {found[1]} vectors; the manifest says {expected[0]} × {expected[1]}"
        raise IndexVersionError.at(place, f"holds {sizes}", "wrong_vectors")
    canaries = canary_vectors(manifest.canaries)
    if canaries.shape[1] != vectors.dimension:
        raise IndexVersionError(
            f"the canaries of {manifest.version} have {canaries.shape[1]} dimensions instead of "
            f"{vectors.dimension}",
            code="bad_canaries",
            path=place,
        )
    depth = min(_CANARY_DEPTH, vectors.count)
    best = np.array([vectors.search(canary, depth)[0][0] for canary in canaries])
    if float((best >= _MIN_CANARY_SCORE).mean()) < MIN_FOUND:
        message = f"the canaries of {manifest.version} are not among the vectors of {place}"
        raise IndexVersionError(message, code="foreign_vectors", path=place)


class VectorStore(ABC):
    """Where vectors are kept; one object for each command or service.

    What is not overridden is that of a store whose vectors lie in the folders of versions.
    """

    @abstractmethod
    def build(self, new: NewVectors) -> SearchChoice:
        """Writes the vectors of a new version, and chooses how they are searched.

        Raises:
            CareError: If they cannot be written whole.
        """

    @abstractmethod
    def open(self, folder: Path, manifest: IndexManifest, filters: FilterReader) -> Vectors:
        """Opens the vectors of a version.

        Raises:
            IndexVersionError: If they are missing, or not those that the manifest describes.
        """

    def active_version(self, root: Path, name: str) -> str:
        """Returns the id of the version that services shall search: that of `CURRENT`.

        Raises:
            IndexVersionError: If there is none.
        """
        return current_version(root, name)

    def activate(self, name: str, folder: Path) -> None:  # noqa: B027
        """Makes the version in `folder` the one that services of index `name` search.

        Raises:
            StoreError: If that fails; the active version stays what it was.
        """

    def is_active(self, folder: Path) -> bool:
        """Returns whether services may find the version in `folder` other than by `CURRENT`."""
        return False

    def drop(self, folder: Path) -> None:  # noqa: B027
        """Deletes the vectors that the version in `folder` keeps outside of it.

        Raises:
            StoreError: If that fails.
        """
