"""Builds a version anew from the active one and changes; texts with known vectors are not encoded.

This is also how the segments of a version are merged into one.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoder
from core.errors import CorpusError
from core.files import sha256_file
from core.manifest import IndexManifest, UpdateRecord
from core.types import Document
from indexer.build import BuildOptions, EncodedCorpus, Source, build
from indexer.corpus import Location
from indexer.staging import REJECTS, StagedCorpus, stage, write_staged
from indexer.state import IndexState, contents, own_id
from indexer.vector_cache import version_vectors
from stores.token_vectors import token_vector_spec


@dataclass(frozen=True, slots=True)
class StagedAdditions:
    """The corpus of added documents, staged in a separate folder."""

    folder: Path
    staged: StagedCorpus

    @property
    def documents(self) -> DocumentReader:
        return DocumentReader(self.folder / documents.FILE_NAME)


def rewrite(
    options: BuildOptions,
    state: IndexState,
    added: StagedAdditions | None,
    deleted: Sequence[str],
    encoders: tuple[Encoder, Encoder],
    *,
    encode_all: bool = False,
) -> tuple[IndexManifest, EncodedCorpus]:
    """Builds a version of all documents after changes, which has one segment, and activates it.

    Documents keep their order; a replaced document keeps its position, and new documents follow in
    the order of their files. The result equals a build from a corpus in this order. With
    `encode_all` no vector of the active version, `state`, is used.
    """
    base = state.manifest
    merged = MergedDocuments(state, added.documents if added else (), deleted)
    facts = [base.version, added.staged.checksum if added else None, sorted(deleted)]
    facts += ["encode all"] * encode_all  # shards with known vectors are not resumed
    source = Source(
        checksum=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        stage=lambda target: stage_documents(target, options, base, merged, added, merged.record),
        vector_cache=None
        if encode_all or not has_token_vectors(base, options)
        else version_vectors(state, options.builds),
        state=state,
    )
    return build(options, *encoders, source)


def has_token_vectors(base: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the token vectors that the options ask for, if any."""
    return options.token_vectors in (None, token_vector_spec(base))


class MergedDocuments:
    """The documents of a version after changes, in order; iteration yields each one's chunks.

    `new` documents are added or replace others.
    """

    def __init__(
        self, state: IndexState, new: DocumentReader | tuple[()], deleted: Sequence[str]
    ) -> None:
        self._old, self._new = state.documents, new
        self._row_of = {own_id(d): row for row, d in enumerate(new) if d.chunk == 0}
        self._deleted = dict.fromkeys(deleted)
        found = set()
        self._matched = set()
        replaced = unchanged = 0
        for id_, chunks in groupby(self._old, own_id):
            if id_ in self._deleted:
                found.add(id_)
            elif id_ in self._row_of:
                self._matched.add(id_)
                same = contents(chunks) == contents(self._chunks(self._row_of[id_]))
                unchanged += same
                replaced += not same
            else:
                unchanged += 1
        added = len(self._row_of) - len(self._matched)
        if not added + replaced + unchanged:
            raise CorpusError(
                "a build needs a document, and none would be left", code="empty_corpus"
            )
        self.record = UpdateRecord(
            base=state.manifest.version,
            added=added,
            replaced=replaced,
            deleted=len(found),
            unchanged=unchanged,
        )

    def __iter__(self) -> Iterator[list[Document]]:
        for id_, chunks in groupby(self._old, own_id):
            row = self._row_of.get(id_)
            if id_ not in self._deleted:
                yield list(chunks) if row is None else self._chunks(row)
        for id_, row in self._row_of.items():
            if id_ not in self._matched:
                yield self._chunks(row)

    def _chunks(self, row: int) -> list[Document]:
        return [self._new[row + chunk] for chunk in range(self._new[row].chunks)]


def stage_documents(
    folder: Path,
    options: BuildOptions,
    base: IndexManifest,
    chunks: Iterable[list[Document]],
    added: StagedAdditions | None,
    record: UpdateRecord,
) -> StagedCorpus:
    """Stages documents that were checked before, each given as its chunks, for an update."""
    new_files = added.staged.files if added else []
    staged = stage(
        ((Location(documents.FILE_NAME, n), each) for n, each in enumerate(chunks, start=1)),
        folder,
        files=list(dict.fromkeys([*base.corpus.files, *new_files])),
        checksum="",
        chunked=base.chunking is not None,
        max_reject_rate=options.max_reject_rate,
        progress=options.progress,
    )
    if added:
        shutil.copyfile(added.folder / REJECTS, folder / REJECTS)
    facts = {
        "checksum": sha256_file(folder / documents.FILE_NAME),
        "rejected": added.staged.rejected if added else 0,
        "update": record,
    }
    staged = staged.model_copy(update=facts)
    write_staged(folder, staged)
    return staged
