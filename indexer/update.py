"""Changes of an index: documents, components, merges; only new texts are encoded."""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pyroaring import BitMap

from core import documents, filters
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError
from core.files import remove_folder, remove_temporary, writing_in
from core.filters import FilterReader
from core.locks import exclusive
from core.manifest import FULL_TEXT, TERMS, TOKENS, IndexManifest
from core.provenance import library_versions
from core.versions import read_manifest, with_version
from indexer.addition import Additions, add_segment
from indexer.build import BuildOptions, EncodedCorpus, corpus_source, same_full_text, same_terms
from indexer.live.version import Changed, compose, publish
from indexer.publication import BUILD_WAIT, IndexWriter, hide, verify_version
from indexer.rewriting import StagedAdditions, rewrite
from indexer.state import IndexState, check_encoder
from stores.lexical import is_current, write_full_text
from stores.registry import default_factories
from stores.term_list import write_terms
from stores.token_vectors import token_vector_spec

# With more new or deleted documents than this share of the base, a version is built anew.
_MOST_CHANGED = 0.2


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of an update."""

    # A corpus; documents with new ids are added, those with known ids are replaced.
    add: str | None = None
    delete: Path | Sequence[str] | None = None  # a file of ids of documents to delete, one per line
    missing_ok: bool = False  # whether to ignore ids in `delete` that are not in the index
    encode_all: bool = False  # whether to encode all documents instead of reusing known vectors


def active_manifest(index: IndexWriter) -> IndexManifest:
    """Returns the manifest of the active version, which is not verified."""
    return with_version(index.latest, lambda version: read_manifest(index.version(version)))


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
) -> tuple[IndexManifest, EncodedCorpus | None] | None:
    """Changes documents of the active version; verifies and activates the version that results.

    The new version has a segment more, with the new documents, and everything else is that of the
    active one. If a fifth of its base is new or deleted, or the options ask for other components,
    it is built anew (`indexer/rewriting.py`).

    Args:
        options: Options of the build; `corpus` is ignored.

    Returns:
        The manifest and the encoded corpus, without which documents were only deleted; or None if
        neither documents nor components would change.

    Raises:
        CareError: If the update fails; the active version does not change.
    """
    encoders = document_encoder, query_encoder
    other_components = not same_components(base, options)
    other_components |= base.store != options.store
    # What was written into Milvus joins its base.
    other_components |= base.store == "milvus" and bool(base.segments)
    other_fusion = options.full_text and base.fusion != options.fusion
    other_index = changes.encode_all or not _same_index(base, options)
    other = other_components or other_fusion or other_index
    if not (changes.add or changes.delete or other):
        message = "the update has no changes: use --add, --delete, --terms, --lexical-weight, "
        message += "--full-text, --token-vectors, --factory, --encode-all or --store"
        raise CorpusError(message, code="no_changes")
    check_encoding(base, document_encoder.spec, options, encode_all=changes.encode_all)
    if options.chunking not in (None, base.chunking):
        raise CareError(
            f"index '{base.name}' was built with another chunking, which an update cannot change: "
            "omit the chunking options, or build the index again from its whole corpus",
            code="other_chunking",
        )
    options = replace(options, chunking=base.chunking)
    given = changes.delete or ()
    path, deleted = (given, _read_ids(given)) if isinstance(given, Path) else (None, list(given))
    to_add = replace(options, corpus=changes.add or "")
    with _checks_base(options, base), _stage_additions(to_add, document_encoder) as added:
        index = options.index
        state = IndexState.open(index, base.version, stores=index.stores)
        additions = Additions(state, added.documents if added else (), deleted)
        if additions.missing and not changes.missing_ok:
            id_, count = additions.missing[0], len(additions.missing)
            message = (
                f"{path or 'delete'}: document '{id_}' is not in index '{base.name}'; {count} ids "
                "in total are not (--missing-ok ignores them)"
            )
            raise CorpusError(message, code="unknown_id", path=path, id=id_, count=count)
        if not (additions or other):
            return None
        anew = other_components or other_index or base.store == "milvus" or bool(options.queries)
        if anew or _is_large(state, additions):
            verify_version(index.version(base.version), index.stores)
            try:
                how = {"encode_all": changes.encode_all}
                return rewrite(options, state, added, additions.deleted, encoders, **how)
            except IndexVersionError as error:
                if anew or error.code != "vectors_gone":
                    raise
        state.check()
        return add_segment(options, state, added, deleted, additions, encoders)


def merge(
    options: BuildOptions, base: IndexManifest, document_encoder: Encoder, query_encoder: Encoder
) -> IndexManifest | None:
    """Builds a version with one segment of the documents of the active version; encodes nothing.

    Args:
        document_encoder: Its specification must be that of the version.

    Returns:
        The manifest of the new version, or None if the active one has one segment and all of its
        documents, or no document at all.

    Raises:
        CareError: If the merge fails; the active version does not change.
    """
    if not (base.segments and base.count):
        return None
    check_encoding(base, document_encoder.spec, options)
    index = options.index
    options = replace(options, chunking=base.chunking)
    with _checks_base(options, base):
        verify_version(index.version(base.version), index.stores)
        state = IndexState.open(index, base.version, stores=index.stores)
        return rewrite(options, state, None, (), (document_encoder, query_encoder))[0]


def _is_large(state: IndexState, additions: Additions) -> bool:
    """Returns whether so much of the base is new or deleted that it is better built anew."""
    base = state.entries[0].count
    new = sum(len(additions.chunks(row)) for row in additions.new.values())
    small = sum(entry.count - entry.deleted for entry in state.entries[1:])
    gone = len(state.deleted) + len(additions.removed)
    return new + small + gone > _MOST_CHANGED * base


def _same_index(base: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the index type and the recall that the options ask for."""
    same_recall = options.recall in (None, base.recall.target)
    return options.factory in (None, base.factory) and same_recall


def same_components(base: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the components that the options ask for, and is current."""
    same_tokens = token_vector_spec(base) == options.token_vectors
    weighted = base.model_copy(update={"fusion": options.fusion})
    return same_tokens and same_full_text(weighted, options) and not _has_old_terms(base)


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
    check_encoding(base, spec, options)
    fusion = dict(options.fusion) if options.full_text else {}
    same = same_components(base, options)
    if same and base.fusion == fusion:
        return None
    started = time.perf_counter()
    index = options.index
    if base.segments:
        assert same, "a version of several segments is merged first"
        with _checks_base(options, base):
            return _change_fusion(index, base, fusion)
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
            "fusion": fusion,
            "created_at": datetime.now(UTC),
            "build_seconds": round(time.perf_counter() - started, 3),
            "libraries": library_versions(),
        }
        return index.publish(base.model_copy(update=changed), folder, base.version)


def _change_fusion(
    index: IndexWriter, base: IndexManifest, fusion: Mapping[str, float]
) -> IndexManifest:
    """Publishes a version with the segments of the active one and another weight of full text."""
    key = hashlib.sha256(json.dumps([base.version, dict(fusion)]).encode()).hexdigest()
    with (
        index.building("update"),
        index.new_version(key) as (version, folder),
        index.changing("update"),
    ):
        index.check_base(base.version)
        state = IndexState.open(index, base.version, stores=index.stores)
        changed = Changed(BitMap(), fusion=fusion)
        manifest, dead = compose(state, version, changed)
        manifest = manifest.model_copy(
            update={"corpus": base.corpus, "libraries": library_versions()}
        )
        return publish(index, folder, manifest, dead, index.next_number())


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


@contextmanager
def _stage_additions(options: BuildOptions, encoder: Encoder) -> Iterator[StagedAdditions | None]:
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
        yield StagedAdditions(folder, staged)
        # Kept if the update fails, so that a retry can reuse it.
        remove_folder(hide(folder))


def _read_ids(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise CorpusError.at(path, "is not encoded in UTF-8", "not_utf8") from error


def check_encoding(
    base: IndexManifest, spec: EncoderSpec, options: BuildOptions, *, encode_all: bool = False
) -> None:
    """Raises EmbeddingSpaceError unless new vectors are like those of a version."""
    check_encoder(base, spec)
    before, now = (base.backend, base.dtype), (options.backend, options.dtype)
    if not encode_all and before != now:
        message = (
            f"index '{base.name}' was encoded with backend and dtype {' '.join(before)}, this "
            f"update uses {' '.join(now)}: use --backend {before[0]} --dtype {before[1]}, or "
            "encode all documents again (--encode-all)"
        )
        raise EmbeddingSpaceError(message, code="other_precision", before=before, now=now)
