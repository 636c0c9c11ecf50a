"""Builds a new version from the active one and changes; only new texts are encoded."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from core import documents, filters
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec
from core.errors import CareError, CorpusError, EmbeddingSpaceError
from core.files import remove_folder, remove_temporary, sha256_file, writing_in
from core.filters import FilterReader
from core.locks import exclusive
from core.manifest import FULL_TEXT, TERMS, TOKENS, UNKNOWN, IndexManifest, UpdateRecord
from core.provenance import library_versions
from core.types import Document
from core.versions import with_version
from indexer.build import (
    BuildOptions,
    EncodedCorpus,
    Source,
    build,
    corpus_source,
    same_full_text,
    same_terms,
)
from indexer.corpus import Location
from indexer.publication import BUILD_WAIT, IndexWriter, hide, verify_version
from indexer.staging import REJECTS, StagedCorpus, stage, write_staged
from indexer.vector_cache import version_vectors
from stores.lexical import is_current, write_full_text
from stores.registry import default_factories
from stores.term_list import write_terms
from stores.token_vectors import token_vector_spec


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of an update."""

    # A corpus; documents with new ids are added, those with known ids are replaced.
    add: str | None = None
    delete: Path | Sequence[str] | None = None  # a file of ids of documents to delete, one per line
    missing_ok: bool = False  # whether to ignore ids in `delete` that are not in the index
    encode_all: bool = False  # whether to encode all documents instead of reusing known vectors


def active_manifest(index: IndexWriter) -> IndexManifest:
    """Verifies the active version and returns its manifest."""
    return with_version(
        index.active,
        lambda version: verify_version(index.version(version), index.stores),
    )


def requested_factory(manifest: IndexManifest) -> str | None:
    """Returns the index type of a version, or None if it is the default for its size."""
    count, different = manifest.count, manifest.corpus.unique_texts
    defaults = default_factories(manifest.store, count, manifest.encoder.dimension, different)
    return None if manifest.factory in defaults else manifest.factory


def update(
    options: BuildOptions,
    changes: Changes,
    base: IndexManifest,
    document_encoder: Encoder,
    query_encoder: Encoder,
) -> tuple[IndexManifest, EncodedCorpus] | None:
    """Builds a new version from the active one and changes, verifies it and activates it.

    Documents keep their order; a replaced document keeps its position, and new documents follow in
    the order of their files. The result equals a build from a corpus in this order.

    Args:
        options: Options of the build; `corpus` is ignored.
        document_encoder: Encodes new documents.
        query_encoder: Encodes the held-out queries and the canaries.

    Returns:
        The result of `build`, or None if neither documents nor components would change.

    Raises:
        CareError: If the update fails; the active version does not change.
    """
    other_components = not _same_components(base, options)
    if not changes.add and not changes.delete and not other_components:
        message = "the update has no changes: use --add, --delete, --terms, --lexical-weight, "
        message += "--full-text or --token-vectors"
        raise CorpusError(message, code="no_changes")
    _check_encoder(base, document_encoder.spec, options, changes)
    folder = options.index.version(base.version)
    if options.chunking not in (None, base.chunking):
        raise CareError(
            f"index '{base.name}' was built with another chunking, which an update cannot change: "
            "omit the chunking options, or build the index again from its whole corpus",
            code="other_chunking",
        )
    options = replace(options, chunking=base.chunking)
    given = changes.delete or ()
    path, deleted = (given, _read_ids(given)) if isinstance(given, Path) else (None, list(given))
    additions = replace(options, corpus=changes.add or "")
    with _checks_base(options, base), _stage_additions(additions, document_encoder) as added:
        new = DocumentReader(added.folder / documents.FILE_NAME) if added else ()
        old = DocumentReader(folder / documents.FILE_NAME)
        merged = _MergedDocuments(base.version, old, new, deleted)
        if merged.missing and not changes.missing_ok:
            id_, count = merged.missing[0], len(merged.missing)
            message = (
                f"{path or 'delete'}: document '{id_}' is not in index '{base.name}'; {count} ids "
                "in total are not (--missing-ok ignores them)"
            )
            raise CorpusError(message, code="unknown_id", path=path, id=id_, count=count)
        record = merged.record
        if not record.added + record.replaced + record.deleted and not other_components:
            return None
        facts = [base.version, added.staged.checksum if added else None, sorted(deleted)]
        facts += ["encode all"] * changes.encode_all  # shards with known vectors are not resumed
        source = Source(
            checksum=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
            stage=lambda target: _stage(target, options, base, merged, added),
            vector_cache=None
            if changes.encode_all or not has_token_vectors(base, options)
            else version_vectors(folder, base, options.builds, options.stores),
            base=base,
        )
        return build(options, document_encoder, query_encoder, source)


def has_token_vectors(base: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the token vectors that the options ask for, if any."""
    return options.token_vectors in (None, token_vector_spec(base))


def _same_components(base: IndexManifest, options: BuildOptions) -> bool:
    same_tokens = token_vector_spec(base) == options.token_vectors
    return same_tokens and same_full_text(base, options) and not _has_old_terms(base)


def _has_old_terms(base: IndexManifest) -> bool:
    """Returns whether the full text of a version, if any, has the terms of an older release."""
    full_text = base.components.get(FULL_TEXT)
    return full_text is not None and not is_current(full_text)


def update_components(
    options: BuildOptions, base: IndexManifest, spec: EncoderSpec
) -> IndexManifest | None:
    """Makes and activates a version with other components, for which no text is encoded.

    These are other full text, another weight or term list of it, or no token vectors, as the
    options say. Full text with the terms of an older release is written again. All other files are
    hard links to those of the active version, whose vectors are in FAISS files.

    Returns:
        The manifest of the new version, or None if nothing would change.

    Raises:
        CareError: If the update fails; the active version does not change.
    """
    _check_encoder(base, spec, options, Changes())
    if _same_components(base, options):
        return None
    started = time.perf_counter()
    index = options.index
    components = dict(base.components)
    if not options.full_text or _has_old_terms(base):
        components.pop(FULL_TEXT, None)
    if not options.full_text or not same_terms(base, options):
        components.pop(TERMS, None)
    if not options.token_vectors:
        components.pop(TOKENS, None)
    # The key of the build of the base, whose shards are those of the new version.
    key = base.version.rpartition("-")[2]
    with (
        _checks_base(options, base),
        index.building("update"),
        index.new_version(key) as (version, folder),
    ):
        linked = [*base.files, *(name for part in components.values() for name in part.files)]
        for name in linked:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(index.version(base.version) / name, folder / name)
        if options.full_text and FULL_TEXT not in components:
            reader = DocumentReader(folder / documents.FILE_NAME)
            filter_reader = FilterReader(folder / filters.FILE_NAME, base.filter_fields, base.count)
            components[FULL_TEXT] = write_full_text(
                folder, reader, filter_reader, progress=options.progress
            )
        if options.full_text and options.terms and TERMS not in components:
            reader = DocumentReader(folder / documents.FILE_NAME)
            components[TERMS] = write_terms(folder, options.terms, reader)
        changed = {
            "version": version,
            "components": components,
            "fusion": dict(options.fusion) if options.full_text else {},
            "created_at": datetime.now(UTC),
            "build_seconds": round(time.perf_counter() - started, 3),
            "libraries": library_versions(),
        }
        return index.publish(base.model_copy(update=changed), folder, base.version)


@contextmanager
def _checks_base(options: BuildOptions, base: IndexManifest) -> Iterator[None]:
    """Replaces an error of the block by `base_not_active` if that is the case.

    The files of a version that is no longer active may have been deleted.
    """
    try:
        yield
    except (CareError, OSError):
        options.index.check_base(base.version)
        raise


@dataclass(frozen=True, slots=True)
class _StagedAdditions:
    """The corpus of added documents, staged in a separate folder."""

    folder: Path
    staged: StagedCorpus


@contextmanager
def _stage_additions(options: BuildOptions, encoder: Encoder) -> Iterator[_StagedAdditions | None]:
    if not options.corpus:
        yield None
        return
    source = corpus_source(options, encoder)
    facts = [source.checksum, options.chunking and options.chunking.model_dump()]
    name = f"added-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    folder = options.builds / options.name / name
    with exclusive(folder, "update", wait=BUILD_WAIT):
        remove_temporary(folder)
        with writing_in(folder):
            staged = source.stage(folder)
        yield _StagedAdditions(folder, staged)
        # Kept if the update fails, so that a retry can reuse it.
        remove_folder(hide(folder))


class _MergedDocuments:
    """The documents of a version after changes, in order; iteration yields each one's chunks.

    `new` documents are added or replace `old` ones.

    Attributes:
        missing: Ids in `deleted` that are not in the version.
        record: Numbers of changes.
    """

    def __init__(
        self,
        base: str,
        old: DocumentReader,
        new: DocumentReader | tuple[()],
        deleted: Sequence[str],
    ) -> None:
        self._old, self._new = old, new
        self._row_of = {_own_id(d): row for row, d in enumerate(new) if d.chunk == 0}
        self._deleted = dict.fromkeys(deleted)
        if both := [id_ for id_ in self._deleted if id_ in self._row_of]:
            message = (
                f"_id '{both[0]}' is both added and deleted; {len(both)} such ids in total: list "
                "them only in --add or only in --delete"
            )
            raise CorpusError(message, code="added_and_deleted", id=both[0], count=len(both))
        found = set()
        self._matched = set()
        replaced = unchanged = 0
        for id_, chunks in groupby(old, _own_id):
            if id_ in self._deleted:
                found.add(id_)
            elif id_ in self._row_of:
                self._matched.add(id_)
                same = _contents(chunks) == _contents(self._chunks(self._row_of[id_]))
                unchanged += same
                replaced += not same
            else:
                unchanged += 1
        self.missing = [id_ for id_ in self._deleted if id_ not in found]
        added = len(self._row_of) - len(self._matched)
        if not added + replaced + unchanged:
            raise CorpusError("the update would delete all documents", code="empty_corpus")
        self.record = UpdateRecord(
            base=base, added=added, replaced=replaced, deleted=len(found), unchanged=unchanged
        )

    def __iter__(self) -> Iterator[list[Document]]:
        for id_, chunks in groupby(self._old, _own_id):
            row = self._row_of.get(id_)
            if id_ not in self._deleted:
                yield list(chunks) if row is None else self._chunks(row)
        for id_, row in self._row_of.items():
            if id_ not in self._matched:
                yield self._chunks(row)

    def _chunks(self, row: int) -> list[Document]:
        return [self._new[row + chunk] for chunk in range(self._new[row].chunks)]


def _own_id(document: Document) -> str:
    return document.parent or document.id


def _contents(chunks: Iterable[Document]) -> list[tuple[str, str, str]]:
    # Compared as JSON, because 1 == 1.0 == True in Python.
    return [(chunk.title, chunk.text, json.dumps(chunk.metadata)) for chunk in chunks]


def _stage(
    folder: Path,
    options: BuildOptions,
    base: IndexManifest,
    merged: _MergedDocuments,
    added: _StagedAdditions | None,
) -> StagedCorpus:
    new_files = added.staged.files if added else []
    staged = stage(
        ((Location(documents.FILE_NAME, n), chunks) for n, chunks in enumerate(merged, start=1)),
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
        "update": merged.record,
    }
    staged = staged.model_copy(update=facts)
    write_staged(folder, staged)
    return staged


def _read_ids(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise CorpusError.at(path, "is not encoded in UTF-8", "not_utf8") from error


def _check_encoder(
    base: IndexManifest, spec: EncoderSpec, options: BuildOptions, changes: Changes
) -> None:
    expected, found = base.encoder.model_dump(), spec.model_dump()
    if differ := [field for field in expected if expected[field] != found[field]]:
        raise EmbeddingSpaceError(
            f"index '{base.name}' was encoded by {base.encoder.model} (embedding space "
            f"'{base.encoder.embedding_space}'), the document encoder of the pair is {spec.model} "
            f"(embedding space '{spec.embedding_space}'); different fields: {', '.join(differ)}. "
            "Use the pair that built the index, or build the index again",
            code="other_encoder",
            differ=differ,
        )
    before, now = (base.backend, base.dtype), (options.backend, options.dtype)
    if not changes.encode_all and UNKNOWN not in before and before != now:
        message = (
            f"index '{base.name}' was encoded with backend and dtype {' '.join(before)}, this "
            f"update uses {' '.join(now)}: use --backend {before[0]} --dtype {before[1]}, or "
            "encode all documents again (--encode-all)"
        )
        raise EmbeddingSpaceError(message, code="other_precision", before=before, now=now)
