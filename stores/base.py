"""Interface of all vector stores: build, open, search, read, activate, drop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from core.canaries import MIN_INDEX_RECALL, canary_vectors
from core.choices import StoreName as StoreName
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.filters import FilterReader, Selection
from core.manifest import Component, IndexManifest
from core.shards import ShardedVectors
from core.types import Check, FloatArray, RowArray, no_check
from core.types import ScoredRows as ScoredRows
from core.versions import IndexFolder
from stores.lexical import LexicalIndex
from stores.token_vectors import TokenVectors

# With SQ8 codes, the similarity of a canary to itself is about 0.9999.
_MIN_CANARY_SCORE = 0.99
# Hits to request, because an approximate index can miss the nearest vector in a narrow search.
_CANARY_DEPTH = 100


class StoreError(IndexVersionError):
    """A store cannot be reached, or a request to it fails."""

    default_code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """The chosen search parameters, their mean recall@10, and what else was measured."""

    parameters: dict[str, int]
    recall: float
    tried: dict[str, float]  # mean recall@10 of each combination of parameters
    hint: str = ""  # how to reach a higher recall, or "" if the target was reached


@dataclass(frozen=True, slots=True)
class NewVectors:
    """Input of the build of a new version's vectors."""

    index: str
    version: str
    folder: Path  # hidden folder of the version, which has its documents and filters
    vectors: ShardedVectors
    filters: FilterReader
    factory: str  # index type, accepted by `check_factory` for these vectors
    queries: FloatArray  # float32 [q, dimension], held-out query vectors
    recall: float  # target recall@10 of the search parameters
    threads: int
    memory: int  # limit for inverted lists and for the training sample [bytes]
    progress: bool  # whether to show progress bars


class Vectors(Protocol):
    """The opened vectors of one version; thread-safe."""

    count: int
    dimension: int

    def search(
        self,
        query: FloatArray,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
    ) -> ScoredRows:
        """Finds the nearest vectors.

        Args:
            query: float32 [dimension], unit norm.
            k: Number of hits, at least 1.
            selection: The rows that may be found; None for all.
            check: Called between the steps of the search; stops it by an exception.

        Returns:
            Cosine similarities, float32 [m], and rows, int64 [m], best first: the k nearest of the
            selected rows, or all of them, and those that are as near as the last one
            (`stores/order.py`).

        Raises:
            UnavailableError: If the store is temporarily unavailable.
        """
        ...

    def search_together(self, queries: FloatArray, k: int) -> list[ScoredRows] | None:
        """Finds the nearest of all vectors to several queries at once.

        Args:
            queries: float32 [n, dimension], unit norm.

        Returns:
            What `search` of all rows returns for each query, or None where a search for each is as
            fast.
        """
        ...

    def take(self, rows: RowArray) -> FloatArray:
        """Returns the stored vectors of rows, int64 [n], as float32 [n, dimension].

        Updates call it for index types that store float32 vectors by row: Flat and HNSW.
        """
        ...


def check_vectors(
    vectors: Vectors,
    manifest: IndexManifest,
    source: Path | str,
    search: Callable[[FloatArray, int], ScoredRows] | None = None,
) -> None:
    """Raises IndexVersionError if count, dimension or canaries of vectors differ from a manifest.

    `source` is the file or collection, for the message. `search` finds the nearest rows, by default
    that of the vectors, which also looks for all that are tied.
    """
    search = search or vectors.search
    found = vectors.count, vectors.dimension
    expected = manifest.count, manifest.encoder.dimension
    if found != expected:
        reason = (
            f"has {found[0]} vectors of {found[1]} dimensions instead of {expected[0]} of "
            f"{expected[1]}: build the index again"
        )
        raise IndexVersionError.at(source, reason, "wrong_vectors")
    if not manifest.canaries:  # of a segment besides the base
        return
    canaries = canary_vectors(manifest.canaries)
    if canaries.shape[1] != vectors.dimension:
        raise IndexVersionError(
            f"the canaries of version {manifest.version} have {canaries.shape[1]} dimensions "
            f"instead of {vectors.dimension}: build the index again",
            code="bad_canaries",
            path=source,
        )
    depth = min(_CANARY_DEPTH, vectors.count)
    best = np.array([search(canary, depth)[0][0] for canary in canaries])
    if float((best >= _MIN_CANARY_SCORE).mean()) < MIN_INDEX_RECALL:
        message = (
            f"the vectors of {source} do not include the canaries of version {manifest.version}, "
            "so they belong to another index: build the index again"
        )
        raise IndexVersionError(message, code="foreign_vectors", path=source)


class StoredRest(NamedTuple):
    """What else than vectors a store has of a version."""

    documents: DocumentReader
    filters: FilterReader
    full_text: LexicalIndex | None
    tokens: TokenVectors | None


class VectorStore(ABC):
    """A store of vectors; one instance per command or service.

    The default implementations are those of a store with its files in the folders of versions.
    """

    @abstractmethod
    def build(self, new: NewVectors) -> SearchChoice:
        """Writes the vectors of a new version and chooses its search parameters.

        Raises:
            CareError: If the vectors cannot be written.
        """

    @abstractmethod
    def open(self, folder: Path, manifest: IndexManifest) -> Vectors:
        """Opens the vectors of a version.

        Raises:
            IndexVersionError: If the vectors are missing or do not match the manifest.
        """

    def write_rest(
        self, new: NewVectors, documents: DocumentReader, components: Mapping[str, Component]
    ) -> Component:
        """Writes to the store what else a version has, so that services need none of its files.

        Args:
            new: Input of `build`, which has written the vectors.
            components: Those in files: full text, term list, token vectors.

        Returns:
            The component `WHOLE`.

        Raises:
            CareError: `not_whole`, if the store keeps vectors alone.
        """
        raise _not_whole()

    def open_rest(self, folder: Path, manifest: IndexManifest) -> StoredRest:
        """Opens what `write_rest` has written; IndexVersionError if it is not complete."""
        message = f"{folder} has no documents: they are in the store '{manifest.store}', which "
        message += "has to be set with CARE_STORE"
        raise IndexVersionError(message, code="wrong_store", path=folder)

    def join_text(
        self,
        base: LexicalIndex,
        documents: Sequence[DocumentReader],
        firsts: Sequence[int],
        deleted: NDArray[np.bool_],
    ) -> LexicalIndex:
        """Returns the full text of a base that `open_rest` opened and of further segments.

        Args:
            documents: Those of the further segments.
            firsts: The first row of each of these, and the number of all rows.
            deleted: bool [rows], rows that no search returns.

        Raises:
            CareError: `not_whole`, if the store keeps vectors alone.
        """
        raise _not_whole()

    def claim(self, index: IndexFolder) -> None:  # noqa: B027
        """Makes this process the one that writes to an index, where others could do so too."""

    def active_version(self, index: IndexFolder) -> str:
        """Returns the id of the version that services search; by default that in `CURRENT`."""
        return index.active()

    def fetch(self, root: Path) -> None:  # noqa: B027
        """Makes the folders of the active versions that only the store has, below `root`.

        Raises:
            CareError: If a request fails, or a folder cannot be written.
        """

    def activate(self, name: str, folder: Path) -> None:  # noqa: B027
        """Makes services of index `name` search the version in `folder`.

        Raises:
            StoreError: If the request fails; the active version does not change.
        """

    def is_active(self, folder: Path) -> bool:
        """Returns whether services use the version in `folder` regardless of `CURRENT`."""
        return False

    def drop(self, folder: Path) -> None:  # noqa: B027
        """Deletes the vectors of the version in `folder` that are stored elsewhere."""


def _not_whole() -> CareError:
    message = "only Milvus can hold a whole index: use --store milvus, or omit --whole"
    return CareError(message, code="not_whole")
