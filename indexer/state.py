"""The version of an index that a change starts from, with its documents and vectors open."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from core.canaries import canary_vectors
from core.encoders import EncoderSpec
from core.errors import CareError, EmbeddingSpaceError, IndexVersionError
from core.manifest import FULL_TEXT, IndexManifest, SegmentEntry
from core.text import document_text
from core.types import Document, FloatArray, RowArray
from core.versions import IndexFolder, Part, opening, read_manifest, read_parts
from stores.faiss.store import FaissStore
from stores.lexical import is_current
from stores.registry import FAISS_ONLY, VectorStores
from stores.segment import Segment, open_segment, parts_of, read_deleted
from stores.segments import JoinedDocuments, JoinedFilters, JoinedVectors, RowMap

# Index types that store the vectors themselves, by row.
BY_ROW = re.compile(r"Flat|HNSW\d+(,Flat)?")
# Hits among which the text of a canary is looked for, and the share of canaries that is found.
_CANARY_DEPTH, _CANARIES_FOUND = 10, 0.5


@dataclass(frozen=True)
class IndexState:
    """A version with the files of its segments open; without their full text."""

    manifest: IndexManifest
    parts: Sequence[Part]  # what is known of each segment
    opened: Mapping[str, Segment]  # by `Part.key`
    deleted: BitMap  # rows of all segments that the version has no more

    @classmethod
    def open(
        cls,
        index: IndexFolder,
        version: str,
        known: Mapping[str, Segment] | None = None,
        stores: VectorStores = FAISS_ONLY,
    ) -> Self:
        """Opens a version; segments that are `known` are open."""
        known, folder = known or {}, index.version(version)
        with opening(folder):
            manifest = read_manifest(folder)
            parts = read_parts(folder, manifest, parts_of(known))
            store = stores.for_version(parts[0].folder)
            files = FaissStore()
            opened = {
                part.key: known.get(part.key)
                or open_segment(part, files if at else store, full_text=False)
                for at, part in enumerate(parts)
            }
            return cls(manifest, parts, opened, read_deleted(folder, manifest))

    @property
    def entries(self) -> list[SegmentEntry]:
        """The segments as a manifest names them."""
        if self.manifest.segments:
            return list(self.manifest.segments)
        folder, checksum = self.parts[0].key.split()
        return [SegmentEntry(folder=folder, sha256=checksum, count=self.manifest.count)]

    @cached_property
    def rows(self) -> RowMap:
        """Where the rows of each segment start."""
        return RowMap([one.count for one in self._segments], self.deleted)

    @cached_property
    def documents(self) -> JoinedDocuments:
        """The documents of all segments; iteration yields those that are not deleted."""
        return JoinedDocuments([one.documents for one in self._segments], self.rows)

    @cached_property
    def filters(self) -> JoinedFilters:
        """The filter values of all segments."""
        parts = [one.filters for one in self._segments]
        return JoinedFilters(parts, self.manifest.filter_fields, self.rows)

    @property
    def _segments(self) -> list[Segment]:
        return [self.opened[part.key] for part in self.parts]

    def find(self, ids: Collection[str]) -> dict[str, range]:
        """Returns the rows of the documents with some of the ids, by id."""
        wanted = [id_ for id_ in ids if _is_text(id_)]
        found = {}
        for segment, (first, _) in zip(self._segments, self.rows.spans(), strict=True):
            for id_, rows in segment.documents.find_documents(wanted).items():
                if first + rows.start not in self.deleted:
                    found[id_] = range(first + rows.start, first + rows.stop)
        return found

    def taken_ids(self, documents: Iterable[Sequence[Document]]) -> dict[str, str]:
        """Returns by id those of new documents that are taken as, or take, the id of a chunk.

        The values are the ids of the documents that have the other id.
        """
        if not self.documents.chunked:
            return {}
        names = {chunk.id: chunks[0].parent or "" for chunks in documents for chunk in chunks}
        own = {parent: parent for parent in names.values()}
        taken = {}
        for segment, (first, _) in zip(self._segments, self.rows.spans(), strict=True):
            reader = segment.documents
            for id_, row in reader.find_rows(list(names | own)).items():
                parent = reader[row].parent or ""
                if first + row not in self.deleted and parent not in own and parent != id_:
                    taken[(names | own)[id_]] = parent
            chunks = [id_ for id_, parent in names.items() if id_ != parent]
            for id_, rows in reader.find_documents(chunks).items():
                if first + rows.start not in self.deleted and id_ not in own:
                    taken[names[id_]] = id_
        return taken

    def chunks(self, rows: range) -> list[Document]:
        """Returns the document in some rows: its chunks or, without chunking, itself."""
        return [stored.document() for stored in self.documents.read(rows)]

    def stores_vectors(self, segment: int) -> bool:
        """Returns whether a segment, given by its place, stores the vectors themselves."""
        return bool(BY_ROW.fullmatch(self.parts[segment].manifest.factory))

    def take(self, rows: RowArray) -> FloatArray:
        """Returns the vectors of rows, float32 [n, dimension], whose segments store them."""
        return JoinedVectors([one.vectors for one in self._segments], self.rows).take(rows)

    @property
    def has_tokens(self) -> bool:
        """Whether the version has token vectors."""
        return all(one.tokens for one in self._segments)

    def tokens(self, row: int) -> NDArray[np.uint8]:
        """Returns the token vectors of a row, uint8 [tokens, bytes], of a version that has them."""
        segment, own = self.rows.locate(row)
        tokens = self._segments[segment].tokens
        assert tokens
        return tokens.row(own)

    def check(self) -> None:
        """Raises a CareError if segments cannot be added to the version.

        Its full text is of an older release, or texts are normalised in another way now.
        """
        name = self.manifest.name
        full_text = self.manifest.components.get(FULL_TEXT)
        if full_text and not is_current(full_text):
            message = f"the full text of index '{name}' is of an older release: "
            message += "run care update --full-text"
            raise CareError(message, code="old_full_text")
        self._check_texts()

    def _check_texts(self) -> None:
        """Checks with the canaries that texts are normalised as they were when they were encoded.

        A canary is looked for among the nearest documents, so that not all have to be read.
        """
        base = self._segments[0]
        found = 0
        canaries = self.manifest.canaries
        for canary, vector in zip(canaries, canary_vectors(canaries), strict=True):
            rows = base.vectors.search(vector, _CANARY_DEPTH)[1]
            texts = base.documents.read(rows.tolist())
            found += any(document_text(one.title, one.text) == canary.text for one in texts)
        if found < _CANARIES_FOUND * len(canaries):
            version = self.parts[0].folder.name
            raise IndexVersionError(
                f"the vectors of version {version} do not match its texts, because the text "
                "normalisation has changed: encode all documents again (--encode-all)",
                code="text_rules_changed",
                version=version,
            )


def check_encoder(base: IndexManifest, spec: EncoderSpec) -> None:
    """Raises EmbeddingSpaceError if a version was encoded by another encoder.

    Files with equal checksums are the same, wherever they are.
    """
    expected, found = base.encoder.model_dump(), spec.model_dump()
    for name in ("weights", "tokenizer"):
        checksum = f"{name}_sha256"
        if expected[checksum] and expected[checksum] == found[checksum]:
            del expected[name]
    if differ := [field for field in expected if expected[field] != found[field]]:
        raise EmbeddingSpaceError(
            f"index '{base.name}' was encoded by {base.encoder.model} (embedding space "
            f"'{base.encoder.embedding_space}'), the document encoder of the pair is {spec.model} "
            f"(embedding space '{spec.embedding_space}'); different fields: {', '.join(differ)}. "
            "Use the pair that built the index, or build the index again",
            code="other_encoder",
            differ=differ,
        )


def contents(chunks: Iterable[Document]) -> list[tuple[str, str, str]]:
    """Returns what makes two documents equal: title, text and metadata of each chunk."""
    # Compared as JSON, because 1 == 1.0 == True in Python; the order of fields does not count.
    return [(each.title, each.text, json.dumps(each.metadata, sort_keys=True)) for each in chunks]


def own_id(document: Document) -> str:
    """Returns the id of a document, or of the document of a chunk."""
    return document.parent or document.id


def _is_text(id_: str) -> bool:
    try:
        id_.encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which no file can contain
        return False
    return True
