"""Interface of all stores of indexes: build, open, search, read, activate, drop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from pyroaring import BitMap

from core import documents, filters
from core.canaries import MIN_INDEX_RECALL, canary_vectors
from core.choices import StoreName as StoreName
from core.documents import DocumentReader
from core.encoders import TokenVectorSpec
from core.errors import IndexVersionError
from core.filters import FilterReader, Selection
from core.manifest import FULL_TEXT, TOKENS, Component, IndexManifest
from core.shards import ShardedTokens, ShardedVectors
from core.types import Check, FloatArray, RowArray, no_check
from core.types import ScoredRows as ScoredRows
from core.versions import IndexFolder
from stores.lexical import LexicalIndex, open_full_text, write_full_text
from stores.lexical import Part as TextPart
from stores.token_vectors import TokenVectors, open_token_vectors, write_token_vectors

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
class NewVersion:
    """What a store writes of a new version."""

    index: str
    version: str
    folder: Path  # hidden folder of the version, which has the files of documents and filters
    documents: DocumentReader
    filters: FilterReader
    vectors: ShardedVectors
    full_text: bool  # whether the version has full text
    tokens: ShardedTokens | None  # token vectors of each row, if the version has some
    token_spec: TokenVectorSpec | None
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


class Contents(NamedTuple):
    """What a segment has besides its vectors."""

    documents: DocumentReader
    filters: FilterReader
    full_text: LexicalIndex | None
    tokens: TokenVectors | None


class SegmentText(NamedTuple):
    """What the full text of one of several segments is opened from."""

    folder: Path  # of its files
    manifest: IndexManifest
    documents: DocumentReader
    opened: LexicalIndex | None  # if it is open already


class VectorStore(ABC):
    """Where versions are kept; one instance per command or service.

    The default implementations are those of a store with its files in the folders of versions.
    """

    @abstractmethod
    def build(self, new: NewVersion) -> SearchChoice:
        """Writes the vectors of a new version and chooses its search parameters.

        Raises:
            CareError: If the vectors cannot be written.
        """

    def write_contents(self, new: NewVersion) -> dict[str, Component]:
        """Writes full text and token vectors of a version whose vectors are written.

        Documents and filter values stay in the folder, or are moved out of it.

        Returns:
            The components of the version, by name.

        Raises:
            CareError: If they cannot be written.
        """
        found = {}
        if new.full_text:
            found[FULL_TEXT] = write_full_text(
                new.folder, new.documents, new.filters, progress=new.progress
            )
        if new.tokens is not None and new.token_spec:
            rows = map(new.tokens.row, range(len(new.tokens)))
            found[TOKENS] = write_token_vectors(new.folder, rows, new.token_spec)
        return found

    @abstractmethod
    def open(self, folder: Path, manifest: IndexManifest) -> Vectors:
        """Opens the vectors of a segment.

        Raises:
            IndexVersionError: If the vectors are missing or do not match the manifest.
        """

    def open_contents(
        self, folder: Path, manifest: IndexManifest, *, full_text: bool = True
    ) -> Contents:
        """Opens what a segment has besides its vectors.

        Args:
            full_text: Whether to open the full text too, if it is in files.

        Raises:
            IndexVersionError: If something is missing, or does not match the manifest.
        """
        if manifest.store != "faiss":
            message = f"{folder} is in Milvus: set CARE_STORE=milvus and CARE_MILVUS_URI"
            raise IndexVersionError(message, code="wrong_store", path=folder)
        reader = DocumentReader(folder / documents.FILE_NAME)
        if len(reader) != manifest.count:
            found = f"contains {len(reader)} documents; the manifest counts {manifest.count}"
            counts = {"documents": len(reader), "expected": manifest.count}
            raise IndexVersionError.at(
                folder, f"{found}: build the index again", "wrong_document_count", **counts
            )
        values = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields, manifest.count)
        values.frequent_values()  # counted here, in a thread that may take its time
        text = open_full_text(folder, manifest) if full_text else None
        tokens = open_token_vectors(folder, manifest.components.get(TOKENS), manifest.count)
        return Contents(reader, values, text, tokens)

    def join_full_text(
        self, folder: Path, segments: Sequence[SegmentText], deleted: BitMap
    ) -> LexicalIndex | None:
        """Opens the full text of several segments as one.

        Args:
            folder: Of the base, with its term list.
            segments: The segments, the base first; each has full text.
            deleted: Rows that no search returns.
        """
        parts = [
            TextPart(one.folder, one.manifest.components[FULL_TEXT], one.manifest.count)
            for one in segments
        ]
        return open_full_text(folder, segments[0].manifest, parts, deleted)

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
        """Deletes what is stored elsewhere of the version in `folder`."""

    def delete(self, index: str) -> None:  # noqa: B027
        """Deletes what is stored elsewhere of all versions of an index, and its entry there."""
