"""A new version from the active one: only texts that it does not hold are encoded."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec
from core.errors import CareError, CorpusError, EmbeddingSpaceError
from core.files import exclusive, sha256_file, writing_in
from core.manifest import UNKNOWN, IndexManifest, UpdateRecord
from core.types import Document
from core.versions import current_version, index_folder
from indexer.build import BuildOptions, Encoded, Source, build, corpus_source
from indexer.corpus import Place
from indexer.staging import REJECTS, StagedCorpus, stage, write_staged
from indexer.vector_cache import version_vectors
from indexer.versions import verify_version
from stores.registry import FILES, VectorStores, default_factory


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update changes: options of the command, whose help says more."""

    add: str | None = None
    delete: Path | None = None
    missing_ok: bool = False
    encode_all: bool = False


def active_manifest(indexes: Path, name: str, stores: VectorStores = FILES) -> IndexManifest:
    """Returns the active version's manifest, after the version is verified.

    Raises:
        IndexVersionError: If there is no active version or it is damaged.
    """
    return verify_version(index_folder(indexes, name) / current_version(indexes, name), stores)


def kept_factory(manifest: IndexManifest) -> str | None:
    """Returns the index type that was asked for, or None if it was chosen by size."""
    default = default_factory(manifest.store, manifest.count, manifest.encoder.dimension)
    return None if manifest.factory == default else manifest.factory


def update(
    options: BuildOptions,
    changes: Changes,
    base: IndexManifest,
    document_encoder: Encoder,
    query_encoder: Encoder,
) -> tuple[IndexManifest, Encoded] | None:
    """Builds the active version, `base`, with changes as a new one, verifies and activates it.

    Documents keep their order, replaced ones their place; new ones follow in the order of
    their files. The version is what a build from a corpus in this order would yield. The corpus
    that the options name is not read.

    Returns:
        What `build` returns, or None if the changes change nothing.

    Raises:
        CareError: If anything fails; nothing is published then.
    """
    if not changes.add and not changes.delete:
        raise CorpusError("nothing to update: name --add or --delete", code="no_changes")
    _check_encoder(base, document_encoder.spec, options, changes)
    folder = index_folder(options.indexes, options.name) / base.version
    if options.chunking not in (None, base.chunking):
        raise CareError(
            f"the documents of index '{base.name}' are cut in other chunks: build the index from "
            "its whole corpus to change that",
            code="other_chunking",
        )
    options = replace(options, chunking=base.chunking)
    deleted = _read_ids(changes.delete) if changes.delete else []
    with _added(replace(options, corpus=changes.add or ""), document_encoder) as added:
        new = DocumentReader(added.folder / documents.FILE_NAME) if added else ()
        old = DocumentReader(folder / documents.FILE_NAME)
        merged = _Merged(base.version, old, new, deleted)
        if merged.missing and not changes.missing_ok:
            id_, count = merged.missing[0], len(merged.missing)
            message = (
                f"{changes.delete}: there is no document '{id_}' in index '{base.name}'; ids "
                f"without a document: {count} (--missing-ok ignores them)"
            )
            raise CorpusError(message, code="unknown_id", path=changes.delete, id=id_, count=count)
        if not merged.record.added + merged.record.replaced + merged.record.deleted:
            return None
        facts = [base.version, added.staged.checksum if added else None, sorted(deleted)]
        source = Source(
            checksum=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
            stage=lambda target: _stage(target, options, base, merged, added),
            reuse=None
            if changes.encode_all
            else version_vectors(folder, base, options.builds, options.stores),
            base=base,
        )
        return build(options, document_encoder, query_encoder, source)


@dataclass(frozen=True, slots=True)
class _Added:
    """What is added, staged like a corpus in a folder of its own."""

    folder: Path
    staged: StagedCorpus


@contextmanager
def _added(options: BuildOptions, encoder: Encoder) -> Iterator[_Added | None]:
    if not options.corpus:
        yield None
        return
    source = corpus_source(options, encoder)
    facts = [source.checksum, options.chunking and options.chunking.model_dump()]
    name = f"added-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    folder = options.builds / options.name / name
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        with writing_in(folder):
            staged = source.stage(folder)
        yield _Added(folder, staged)
        # An update that fails or is killed finds it again.
        shutil.rmtree(folder)


class _Merged:
    """Old documents with changes, in order; iterating reads the chunks of one after the other.

    New documents are added or replace old ones, those whose ids are `deleted` are left out.
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
            message = f"_id '{both[0]}' is both added and deleted; ids that are both: {len(both)}"
            raise CorpusError(message, code="added_and_deleted", id=both[0], count=len(both))
        found = set()
        self._met = set()
        replaced = unchanged = 0
        for id_, chunks in groupby(old, _own_id):
            if id_ in self._deleted:
                found.add(id_)
            elif id_ in self._row_of:
                self._met.add(id_)
                same = _contents(chunks) == _contents(self._chunks(self._row_of[id_]))
                unchanged += same
                replaced += not same
            else:
                unchanged += 1
        self.missing = [id_ for id_ in self._deleted if id_ not in found]
        added = len(self._row_of) - len(self._met)
        if not added + replaced + unchanged:
            raise CorpusError("the update would leave no document", code="empty_corpus")
        self.record = UpdateRecord(
            base=base, added=added, replaced=replaced, deleted=len(found), unchanged=unchanged
        )

    def __iter__(self) -> Iterator[list[Document]]:
        for id_, chunks in groupby(self._old, _own_id):
            row = self._row_of.get(id_)
            if id_ not in self._deleted:
                yield list(chunks) if row is None else self._chunks(row)
        for id_, row in self._row_of.items():
            if id_ not in self._met:
                yield self._chunks(row)

    def _chunks(self, row: int) -> list[Document]:
        return [self._new[row + chunk] for chunk in range(self._new[row].chunks)]


def _own_id(document: Document) -> str:
    return document.parent or document.id


def _contents(chunks: Iterable[Document]) -> list[tuple[str, str, str]]:
    # As JSON: in Python 1, 1.0 and True are equal.
    return [(chunk.title, chunk.text, json.dumps(chunk.metadata)) for chunk in chunks]


def _stage(
    folder: Path, options: BuildOptions, base: IndexManifest, merged: _Merged, added: _Added | None
) -> StagedCorpus:
    new_files = added.staged.files if added else []
    staged = stage(
        ((Place(documents.FILE_NAME, n), chunks) for n, chunks in enumerate(merged, start=1)),
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
        raise CorpusError.at(path, "is not UTF-8", "not_utf8") from error


def _check_encoder(
    base: IndexManifest, spec: EncoderSpec, options: BuildOptions, changes: Changes
) -> None:
    ours, theirs = base.encoder.model_dump(), spec.model_dump()
    if differ := [field for field in ours if ours[field] != theirs[field]]:
        raise EmbeddingSpaceError(
            f"index '{base.name}' was encoded by {base.encoder.model} in the space "
            f"'{base.encoder.embedding_space}', the pair's encoder is {spec.model} in the space "
            f"'{spec.embedding_space}' (they differ in {', '.join(differ)}): update it with its "
            "own pair, or build it again",
            code="other_encoder",
            differ=differ,
        )
    before, now = (base.backend, base.dtype), (options.backend, options.dtype)
    if not changes.encode_all and UNKNOWN not in before and before != now:
        message = (
            f"index '{base.name}' was encoded by {' '.join(before)} and this update would use "
            f"{' '.join(now)}: its vectors would be of two kinds; use --backend {before[0]} "
            f"--dtype {before[1]}, or encode all documents again (--encode-all)"
        )
        raise EmbeddingSpaceError(message, code="other_precision", before=before, now=now)
