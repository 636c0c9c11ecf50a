"""Adds and deletes documents of an index by a segment, as `care update` does."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoder
from core.errors import CorpusError
from core.locks import exclusive
from core.manifest import IndexManifest, SegmentFacts, UpdateRecord
from core.shards import ShardedTokens, ShardedVectors
from core.types import Document
from indexer.build import BuildOptions, EncodedCorpus, Source, build_folder, encode_locked
from indexer.encoding import VectorCache
from indexer.live.joining import join, segments_to_join
from indexer.live.segment import NewSegment, write_segment
from indexer.live.version import Changed, compose, publish
from indexer.publication import BUILD_WAIT, IndexWriter
from indexer.rewriting import StagedAdditions, stage_documents
from indexer.staging import vector_of_row
from indexer.state import IndexState, contents, own_id
from indexer.vector_cache import rows_vectors

# Vectors that are added to the new file at a time.
_CHUNK_ROWS = 4096


class Additions:
    """Documents to add and ids to delete, compared with a version, all at once."""

    def __init__(
        self, state: IndexState, staged: DocumentReader | tuple[()], deleted: Sequence[str]
    ) -> None:
        row_of = {own_id(one): row for row, one in enumerate(staged) if one.chunk == 0}
        deleted = list(dict.fromkeys(deleted))
        if both := [id_ for id_ in deleted if id_ in row_of]:
            message = (
                f"_id '{both[0]}' is both added and deleted; {len(both)} such ids in total: list "
                "them only in --add or only in --delete"
            )
            raise CorpusError(message, code="added_and_deleted", id=both[0], count=len(both))
        self._state, self._staged = state, staged
        found = state.find([*row_of, *deleted])
        same = {
            id_
            for id_, row in row_of.items()
            if id_ in found and contents(state.chunks(found[id_])) == contents(self.chunks(row))
        }
        # Rows of the staged documents that are new or differ, by id: the first of each; and rows of
        # the version that have documents with these ids or those to delete.
        self.new = {id_: row for id_, row in row_of.items() if id_ not in same}
        self.found = {id_: rows for id_, rows in found.items() if id_ not in same}
        self.deleted = [id_ for id_ in deleted if id_ in found]
        self.missing = [id_ for id_ in deleted if id_ not in found]

    def __bool__(self) -> bool:
        return bool(self.new or self.deleted)

    def chunks(self, row: int) -> list[Document]:
        """Returns the staged document whose first chunk is in a row."""
        return [self._staged[row + chunk] for chunk in range(self._staged[row].chunks)]

    def documents(self) -> Iterator[list[Document]]:
        """Yields the chunks of each document that is new or differs."""
        return map(self.chunks, self.new.values())

    def leave_out(self, ids: Sequence[str]) -> None:
        """Leaves documents out that cannot be encoded."""
        for id_ in ids:
            self.new.pop(id_, None)
            self.found.pop(id_, None)

    @property
    def record(self) -> UpdateRecord:
        """Numbers of changes."""
        replaced = len(self.found) - len(self.deleted)
        return UpdateRecord(
            base=self._state.manifest.version,
            added=len(self.new) - replaced,
            replaced=replaced,
            deleted=len(self.deleted),
            unchanged=self._state.manifest.corpus.documents - len(self.found),
        )

    @property
    def removed(self) -> BitMap:
        """Rows of the version that it will have no more."""
        return BitMap(row for rows in self.found.values() for row in rows)

    def check_ids(self) -> None:
        """Raises CorpusError if a document and a chunk of another one would have the same id."""
        if taken := self._state.taken_ids(self.documents()):
            id_, other = next(iter(taken.items()))
            message = (
                f"_id '{id_}' or the id of one of its chunks is that of document '{other}' or of "
                "one of its chunks: rename one of the documents"
            )
            raise CorpusError(message, code="id_is_a_chunk", id=id_)


def add_segment(
    options: BuildOptions,
    state: IndexState,
    added: StagedAdditions | None,
    deleted: Sequence[str],
    additions: Additions,
    encoders: tuple[Encoder, Encoder],
) -> tuple[IndexManifest, EncodedCorpus | None]:
    """Adds a segment of the new documents to a version, and activates the version that has it.

    If the index has many small segments, some are joined. Writes that are published meanwhile stay.
    `additions` is what `added` and `deleted` change in the version. The encoded corpus is None if
    there are no new documents. If the update fails, the active version does not change.
    """
    started = time.perf_counter()
    index = options.index
    additions.check_ids()
    facts = [state.manifest.version, added.staged.checksum if added else None, sorted(deleted)]
    source = Source(
        checksum=hashlib.sha256(json.dumps(["segment", *facts]).encode()).hexdigest(),
        stage=lambda target: stage_documents(
            target,
            options,
            state.manifest,
            additions.documents(),
            added,
            additions.record.model_copy(update={"unchanged": 0}),
        ),
        vector_cache=known_vectors(state, additions.removed),
        state=state,
    )
    folder = build_folder(options, encoders[0], source)
    with index.building("update"), exclusive(folder, "update", wait=BUILD_WAIT):
        encoded = None
        if additions.new:
            encoded = encode_locked(folder, options, *encoders, source)
            additions.leave_out(list(encoded.reasons))
        places = segments_to_join(state.entries)
        joined = join(index, state, places) if places else None
        with index.new_version(folder.name) as (version, target):
            segment = None
            if encoded:
                written = _write(target, options, state.manifest, encoded)
                segment = NewSegment.of(target, version, written, state.manifest)
            with index.changing("update"):
                state, additions = _now(index, state, additions, added, deleted)
                changed = Changed(
                    removed=additions.removed,
                    record=additions.record,
                    segment=segment,
                    joined=joined if joined and joined.is_of(state) else None,
                    corpus=_corpus(encoded),
                    encoded=encoded.summary.new_texts if encoded else 0,
                    fusion=options.fusion if options.full_text else None,
                )
                manifest, dead = compose(state, version, changed)
                seconds = round(time.perf_counter() - started, 3)
                manifest = manifest.model_copy(update={"build_seconds": seconds})
                manifest = publish(index, target, manifest, dead, index.next_number())
    return manifest, encoded


def known_vectors(state: IndexState, removed: BitMap) -> VectorCache | None:
    """Returns a lookup of the vectors of rows, as far as their segments store them."""
    rows = np.array(removed, np.int64)
    kept = [
        own + state.rows.first[segment]
        for segment, own, _ in state.rows.split(rows)
        if state.stores_vectors(segment)
    ]
    return rows_vectors(state, np.concatenate(kept)) if kept else None


def _now(
    index: IndexWriter,
    state: IndexState,
    additions: Additions,
    added: StagedAdditions | None,
    deleted: Sequence[str],
) -> tuple[IndexState, Additions]:
    """Returns the active version and what the update changes in it; locked for changes.

    `base_not_active` if another version is active and the documents that were encoded are not all
    that differ from it.
    """
    if (version := index.active()) == state.manifest.version:
        return state, additions
    now = IndexState.open(index, version, state.opened, index.stores)
    again = Additions(now, added.documents if added else (), deleted)
    same_base = now.parts[0].key == state.parts[0].key
    if not same_base or not again.new.keys() <= additions.new.keys():
        index.check_base(state.manifest.version)
    again.new = additions.new
    again.found = now.find([*additions.new, *again.deleted])
    return now, again


def _write(
    target: Path, options: BuildOptions, base: IndexManifest, encoded: EncodedCorpus
) -> tuple[SegmentFacts, str]:
    reader = DocumentReader(encoded.folder / documents.FILE_NAME)
    vector_of = vector_of_row(encoded.folder)
    rows: Iterator[Document] = iter(reader)
    if encoded.keep is not None:
        rows, vector_of = compress(reader, encoded.keep), vector_of[encoded.keep]
    vectors = ShardedVectors(encoded.folder, options.shard_size, vector_of)
    tokens = None
    if options.token_vectors:
        sharded = ShardedTokens(encoded.folder, options.shard_size, vector_of)
        tokens = map(sharded.row, range(len(sharded)))
    parts = (part for _, part in vectors.chunks(_CHUNK_ROWS))
    return write_segment(target, base, rows, parts, tokens, progress=options.progress)


def _corpus(encoded: EncodedCorpus | None) -> dict[str, object]:
    """Returns what the record of a corpus says of the documents that an update has added."""
    if encoded is None:
        return {}
    return {
        "files": encoded.staged.files,
        "rejected": encoded.staged.rejected + len(encoded.reasons),
        "truncated": encoded.summary.truncated,
        "tokens": encoded.summary.tokens,
    }
