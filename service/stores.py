"""Where the service finds an index's vectors, and which version is the active one there."""

from pathlib import Path
from typing import Protocol

from core.canaries import canary_vectors
from core.errors import IndexVersionError, ProviderError
from core.filters import FilterReader
from core.milvus import read_collection
from core.types import Filter, FloatArray, IndexManifest, RowArray
from core.versions import VECTORS, current_version
from service.settings import Settings
from service.vector_search import Found, VectorIndex


class VectorSearch(Protocol):
    """The vectors of one version; shared by threads."""

    def search(
        self, query: FloatArray, k: int, rows: RowArray | None = None, filter_: Filter | None = None
    ) -> Found:
        """Finds the nearest documents; k come back whenever k rows match.

        Args:
            query: float32 [dimension], of unit norm.
            k: Hits wanted, at most the number of documents.
            rows: The rows that may be found, ascending, or None for all.
            filter_: The filter that these rows pass, for what does not search by rows.

        Returns:
            Cosine similarities, float32 [m], descending, and rows, int64 [m]; m is k, or
            the number of matching rows if that is less.

        Raises:
            UnavailableError: If the vectors cannot be searched now.
        """
        ...


class VectorStore(Protocol):
    """Opens the versions of indexes."""

    def active_version(self, root: Path, name: str) -> str:
        """Returns the id of the active version.

        Raises:
            IndexVersionError: If there is none.
        """
        ...

    def open(self, folder: Path, manifest: IndexManifest, filters: FilterReader) -> VectorSearch:
        """Opens the vectors of a version.

        Raises:
            IndexVersionError: If they cannot be read or are not what the manifest says.
        """
        ...


class FaissFiles:
    """Vectors beside the documents; `CURRENT` names the active version."""

    def active_version(self, root: Path, name: str) -> str:
        """Returns what `CURRENT` names."""
        return current_version(root, name)

    def open(self, folder: Path, manifest: IndexManifest, filters: FilterReader) -> VectorIndex:
        """Maps the version's file."""
        if read_collection(folder):
            raise IndexVersionError(
                f"the vectors of {folder} are in Milvus: set CARE_STORE=milvus and CARE_MILVUS_URI"
            )
        index = VectorIndex(folder / VECTORS, manifest)
        for canary in canary_vectors(manifest.canaries):  # brings in the pages of first searches
            index.search(canary, 1)
        return index


def open_store(settings: Settings) -> VectorStore:
    """Returns the store that the settings name.

    Raises:
        IndexVersionError: If it does not answer.
        ProviderError: If its client is not installed.
    """
    if settings.store == "faiss" or settings.milvus_uri is None:
        return FaissFiles()
    try:
        from service.milvus_search import MilvusVectors
    except ModuleNotFoundError as error:
        raise ProviderError(
            "CARE_STORE=milvus needs pymilvus: pip install 'care-retrieval[distributed]'"
        ) from error
    token = settings.milvus_token.get_secret_value() if settings.milvus_token else ""
    return MilvusVectors(
        settings.milvus_uri.get_secret_value(), token, settings.milvus_timeout_ms / 1000
    )
