"""A segment: the files of some documents, opened together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core import documents, filters
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.types import CountedValue
from stores.base import Vectors, VectorStore
from stores.lexical import LexicalIndex, open_full_text
from stores.token_vectors import TokenVectors, open_token_vectors


@dataclass(frozen=True, slots=True)
class Segment:
    """The open, immutable files of some documents; row i is the same document in all of them."""

    documents: DocumentReader
    filters: FilterReader
    # The first filter fields by name, each with its most frequent values; bounded in number and
    # size.
    filter_values: Mapping[str, Sequence[CountedValue]]
    vectors: Vectors
    full_text: LexicalIndex | None
    tokens: TokenVectors | None

    @property
    def count(self) -> int:
        return len(self.documents)


def open_segment(folder: Path, manifest: IndexManifest, store: VectorStore) -> Segment:
    """Opens the files in the folder of a version.

    Raises:
        IndexVersionError: If a file cannot be read, or the files do not match the manifest.
    """
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        found = f"contains {len(reader)} documents; the manifest counts {manifest.count}"
        counts = {"documents": len(reader), "expected": manifest.count}
        raise IndexVersionError.at(
            folder, f"{found}: build the index again", "wrong_document_count", **counts
        )
    values = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields, manifest.count)
    frequent = values.frequent_values()
    full_text = open_full_text(folder, manifest)
    tokens = open_token_vectors(folder, manifest)
    # Last, because a GPU may have to give up the vectors of the version that is served.
    vectors = store.open(folder, manifest)
    return Segment(reader, values, frequent, vectors, full_text, tokens)
