"""Builds an index version: corpus → staging → vectors → index → verification → publication."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents, filters
from core.canaries import check_canaries
from core.choices import DEFAULT_BUILDS, DEFAULT_INDEXES, StoreName
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec, TokenVectorSpec
from core.errors import IndexVersionError
from core.files import remove_temporary, sha256_file, writing_in
from core.filters import FilterReader
from core.locks import exclusive
from core.manifest import (
    FULL_TEXT,
    SCHEMA_VERSION,
    TERMS,
    Chunking,
    Component,
    CorpusRecord,
    FileRecord,
    IndexManifest,
    RecallReport,
)
from core.provenance import library_versions
from core.records import write_jsonl
from core.shards import ShardedTokens, ShardedVectors, has_shards, link_shards
from core.terms import TermList
from core.text import normalize_text
from core.versions import read_manifest, with_version
from indexer.chunking import Chunker
from indexer.corpus import Reading, corpus_checksum, corpus_files, corpus_root, warn_about_unread
from indexer.encoding import (
    EncodingSummary,
    Executor,
    LocalExecutor,
    VectorCache,
    encode_corpus,
)
from indexer.failures import failed_documents, max_failed
from indexer.live.carrying import active_state, publish_build
from indexer.publication import BUILD_WAIT, LIVE_KEY, IndexWriter, verify_version
from indexer.readers.fields import FieldNames
from indexer.samples import check_space, first_sentences, read_queries, sample_canaries
from indexer.staging import (
    StagedCorpus,
    read_chunks,
    stage,
    write_version,
)
from indexer.state import IndexState
from stores.base import NewVersion, SearchChoice
from stores.recall import RECALL_K, crowded_rows
from stores.registry import (
    FAISS_ONLY,
    VectorStores,
    check_factory,
    default_factories,
    default_factory,
)
from stores.term_list import GIVEN, write_terms
from stores.token_vectors import token_vector_spec

FAILED = "failed.jsonl"
DEFAULT_RECALL = 0.99

_log = logging.getLogger(__name__)

# Part of the build key: builds of another format of staging, shards or journal are not resumed.
_BUILD_FORMAT = 3


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a build: those of `care index`, with the values that they stand for."""

    corpus: str  # a file, a folder, or a glob
    name: str
    fields: FieldNames = FieldNames()  # noqa: RUF009  # of files that have other fields
    ocr: bool = False  # whether the text of scanned pages is recognized
    indexes: Path = DEFAULT_INDEXES
    builds: Path = DEFAULT_BUILDS
    factory: str | None = None
    # Required recall@10 of the search parameters. With None the target is 0.99, and if no
    # parameters reach it, the best ones are used with a warning.
    recall: float | None = None
    queries: Path | None = None
    max_reject_rate: float = 0.01
    shard_size: int = 4096
    batch_size: int = 32
    threads: int = 1
    memory_gib: float = 4.0
    progress: bool = True
    # How to split long documents, or None to index them as a whole.
    chunking: Chunking | None = None
    store: StoreName = "faiss"
    stores: VectorStores = FAISS_ONLY  # all stores that versions of the index may use
    executor: Executor | None = None  # runs the document encoder; None runs it in this process
    backend: str = "onnx"  # of the document encoder, for the manifest
    dtype: str = "auto"  # requested of the document encoder, for the manifest
    full_text: bool = True
    # How a hybrid search fuses vectors and full text, for the manifest.
    fusion: Mapping[str, float] = field(default_factory=dict)
    # Words of patients and their clinical terms, for searches in full text; None for none.
    terms: TermList | None = None
    # The token vectors that the document encoder computes; None for none.
    token_vectors: TokenVectorSpec | None = None
    live: bool = False  # whether the version is deleted by itself, like those of live writes

    @property
    def index(self) -> IndexWriter:
        return IndexWriter(self.indexes, self.name, self.stores)

    @property
    def reading(self) -> Reading:
        return Reading(corpus_root(self.corpus), self.fields, self.ocr)


@dataclass(frozen=True, slots=True)
class Source:
    """The documents of a new version: those of a corpus, or of an active version and changes."""

    checksum: str  # of all inputs that determine the documents; part of the build key
    stage: Callable[[Path], StagedCorpus]  # writes the documents to the build folder
    vector_cache: VectorCache | None = None
    state: IndexState | None = None  # of an update, the version that it starts from

    @property
    def base(self) -> IndexManifest | None:
        """The manifest of `state`."""
        return None if self.state is None else self.state.manifest


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """A staged and encoded corpus in a build folder."""

    folder: Path
    staged: StagedCorpus
    summary: EncodingSummary
    keep: NDArray[np.bool_] | None  # bool [staged rows], which rows are indexed; None for all
    reasons: dict[str, str]  # why documents cannot be encoded, by document id


def up_to_date(options: BuildOptions, spec: EncoderSpec) -> IndexManifest | None:
    """Returns the manifest of the active version if it has the same inputs and options, or None."""

    def verified(version: str) -> IndexManifest | None:
        folder = options.index.version(version)
        same_store = read_manifest(folder).store == options.store
        return verify_version(folder, options.stores) if same_store else None

    try:
        manifest = with_version(options.index.active, verified)
    except IndexVersionError:
        return None
    if manifest is None:
        return None
    defaults = default_factories(
        options.store, manifest.count, spec.dimension, manifest.corpus.unique_texts
    )
    same = (
        manifest.corpus.checksum == corpus_checksum(corpus_files(options.corpus), options.reading)
        and manifest.encoder == spec
        and (manifest.backend, manifest.dtype) == (options.backend, options.dtype)
        and manifest.factory in ({options.factory} if options.factory else defaults)
        and manifest.recall.target == _target(options)
        and manifest.chunking == options.chunking
        and same_full_text(manifest, options)
        and token_vector_spec(manifest) == options.token_vectors
        and manifest.recall.source == _recall_source(options, _held_out(options))
    )
    return manifest if same else None


def same_full_text(manifest: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the full text, weight and terms that the options ask for."""
    if FULL_TEXT not in manifest.components:
        return not options.full_text
    same_weight = options.full_text and manifest.fusion == options.fusion
    return same_weight and same_terms(manifest, options)


def same_terms(manifest: IndexManifest, options: BuildOptions) -> bool:
    """Returns whether a version has the term list that the options ask for."""
    component = manifest.components.get(TERMS)
    if component is None or options.terms is None:
        return component is None and options.terms is None
    wanted = hashlib.sha256(options.terms.as_tsv().encode()).hexdigest()
    return component.files[GIVEN].sha256 == wanted


def encode(
    options: BuildOptions,
    encoder: Encoder,
    query_encoder: Encoder | None = None,
    source: Source | None = None,
) -> EncodedCorpus:
    """Stages and encodes a corpus; resumes after an interrupted run.

    The embedding space of the query encoder, if given, is checked before documents are encoded.
    Without a source, `options.corpus` is read.
    """
    source = source or corpus_source(options, encoder)
    folder = build_folder(options, encoder, source)
    with exclusive(folder, "encode", wait=BUILD_WAIT):
        return encode_locked(folder, options, encoder, query_encoder, source)


def encode_locked(
    folder: Path,
    options: BuildOptions,
    encoder: Encoder,
    query_encoder: Encoder | None,
    source: Source,
) -> EncodedCorpus:
    """Does what `encode` does; the build folder is locked."""
    reuse = bool(source.vector_cache)
    with writing_in(folder):
        remove_temporary(folder)
        staged = source.stage(folder)
        if not has_shards(folder):
            _link_other_builds(options.builds, folder)
        if query_encoder:
            check_space(folder, source.base, encoder, query_encoder)
        summary = encode_corpus(
            folder,
            encoder.spec.dimension,
            options.executor or LocalExecutor(encoder, options.batch_size),
            shard_size=options.shard_size,
            progress=options.progress,
            vector_cache=source.vector_cache,
            max_failed=max_failed(staged, options.max_reject_rate, reuse=reuse),
        )
        keep, reasons = failed_documents(
            folder, staged, summary.failed, max_reject_rate=options.max_reject_rate, reuse=reuse
        )
        if reasons:
            listed = ({"id": id_, "reason": why} for id_, why in reasons.items())
            write_jsonl(folder / FAILED, listed)
    return EncodedCorpus(folder, staged, summary, keep, reasons)


def build(
    options: BuildOptions,
    document_encoder: Encoder,
    query_encoder: Encoder,
    source: Source | None = None,
) -> tuple[IndexManifest, EncodedCorpus]:
    """Builds a version, verifies it and activates it.

    The index is locked for builds; other commands can activate and prune versions meanwhile.

    Args:
        query_encoder: Encodes the held-out queries and the canaries.
        source: Documents to index; None reads `options.corpus`.

    Returns:
        The manifest of the active version and the encoded corpus.

    Raises:
        CareError: If the build fails; the active version does not change.
    """
    started = time.perf_counter()
    options.stores.get(options.store)  # an unknown or unreachable store fails before the encoding
    if options.factory:
        check_factory(options.store, options.factory, document_encoder.spec.dimension)
    index = options.index
    source = source or corpus_source(options, document_encoder)
    base = source.base.version if source.base else None
    command = "update" if base else "build"
    with index.building(command):
        start = source.state or active_state(index)
        held_out = _held_out(options)  # an invalid file fails before the corpus is encoded
        own_folder = build_folder(options, document_encoder, source)
        # Locked until the version is published, so that no prune deletes the shards.
        with exclusive(own_folder, command, wait=BUILD_WAIT):
            encoded = encode_locked(own_folder, options, document_encoder, query_encoder, source)
            key = LIVE_KEY * options.live + own_folder.name
            with index.new_version(key) as (version, folder):
                manifest = _write_version(
                    folder, version, encoded, held_out, options, document_encoder, query_encoder
                )
                known = {
                    "build_seconds": round(time.perf_counter() - started, 3),
                    "filter_fields": _declared(source) | manifest.filter_fields,
                }
                manifest = manifest.model_copy(update=known)
                manifest = publish_build(index, manifest, folder, start, base)
    return manifest, encoded


def _write_version(
    folder: Path,
    version: str,
    encoded: EncodedCorpus,
    held_out: list[str],
    options: BuildOptions,
    document_encoder: Encoder,
    query_encoder: Encoder,
) -> IndexManifest:
    """Writes the files of a version, except its manifest, to a hidden folder.

    Returns the manifest, without what is known at publication: `parent`, `number`, `build_seconds`.
    """
    vector_of, fields = write_version(encoded.folder, folder, encoded.staged, encoded.keep)
    reader = DocumentReader(folder / documents.FILE_NAME)
    vectors = ShardedVectors(encoded.folder, options.shard_size, vector_of)
    _, text_rows, copies = np.unique(vector_of, return_index=True, return_counts=True)
    text_rows = np.sort(text_rows)
    dimension = document_encoder.spec.dimension
    factory = options.factory or default_factory(
        options.store, len(vectors), dimension, len(text_rows), crowded_rows(copies)
    )
    check_factory(options.store, factory, dimension, len(vectors))
    canaries = sample_canaries(reader, text_rows, vectors.take)
    check_canaries(query_encoder, canaries)
    texts = held_out or first_sentences(reader, text_rows)
    queries = [query_encoder.encode([normalize_text(text)]).vectors for text in texts]
    tokens = None
    if options.token_vectors:
        tokens = ShardedTokens(encoded.folder, options.shard_size, vector_of)
    new = NewVersion(
        index=options.name,
        version=version,
        folder=folder,
        documents=reader,
        filters=FilterReader(folder / filters.FILE_NAME, fields, len(reader)),
        vectors=vectors,
        full_text=options.full_text,
        tokens=tokens,
        token_spec=options.token_vectors,
        factory=factory,
        queries=np.concatenate(queries),
        recall=_target(options),
        threads=options.threads,
        memory=int(options.memory_gib * 2**30),
        progress=options.progress,
    )
    store = options.stores.get(options.store)
    choice = store.build(new)
    _check_recall(choice, options)
    record = _corpus_record(encoded, folder, len(text_rows), len(vectors))
    components: dict[str, Component] = {}
    if options.full_text and options.terms:
        components[TERMS] = write_terms(folder, options.terms, reader)
    components |= store.write_contents(new)
    return IndexManifest(
        schema_version=SCHEMA_VERSION,
        name=options.name,
        version=version,
        parent=None,
        encoder=document_encoder.spec,
        backend=options.backend,
        dtype=options.dtype,
        metric="cosine",
        store=options.store,
        factory=factory,
        search_parameters=choice.parameters,
        count=len(vectors),
        filter_fields=fields,
        files={
            path.name: FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
            for path in sorted(folder.iterdir())
            if path.is_file()
        },
        components=components,
        fusion=dict(options.fusion) if options.full_text else {},
        corpus=record,
        recall=RecallReport(
            k=RECALL_K,
            queries=len(queries),
            source=_recall_source(options, held_out),
            target=_target(options),
            recall=choice.recall,
            tried=choice.tried,
        ),
        canaries=canaries,
        created_at=datetime.now(UTC),
        build_seconds=0.0,
        libraries=library_versions(),
        chunking=options.chunking,
    )


def _declared(source: Source) -> dict[str, int]:
    """Returns the fields that filters may have though no document has had them yet."""
    fields = source.base.filter_fields if source.base else {}
    return {field: 0 for field, values in fields.items() if not values}


def corpus_source(options: BuildOptions, encoder: Encoder) -> Source:
    """Returns the documents of `options.corpus`."""
    chunker = Chunker(encoder, options.chunking) if options.chunking else None
    files = corpus_files(options.corpus)
    warn_about_unread(options.corpus)
    reading = options.reading
    checksum = corpus_checksum(files, reading)

    def stage_files(folder: Path) -> StagedCorpus:
        return stage(
            read_chunks(files, chunker, reading),
            folder,
            files=[file.name for file in files],
            checksum=checksum,
            chunked=chunker is not None,
            max_reject_rate=options.max_reject_rate,
            progress=options.progress,
        )

    return Source(checksum, stage_files)


def build_folder(options: BuildOptions, encoder: Encoder, source: Source) -> Path:
    facts = [
        _BUILD_FORMAT,
        source.checksum,
        encoder.spec.model_dump(),
        options.backend,
        options.dtype,
        options.shard_size,
        options.batch_size,
        options.chunking and options.chunking.model_dump(),
    ]
    if options.token_vectors:
        facts.append(options.token_vectors.model_dump())
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return options.builds / options.index.name / key


def _link_other_builds(builds: Path, folder: Path) -> None:
    """Links the shards of a build with the same key under another index name."""
    for other in sorted(builds.glob(f"*/{folder.name}/")):
        if other != folder and link_shards(other, folder):
            return


def _corpus_record(
    encoded: EncodedCorpus, folder: Path, unique_texts: int, rows: int
) -> CorpusRecord:
    staged, summary = encoded.staged, encoded.summary
    changed = staged.update and encoded.reasons
    return CorpusRecord(
        checksum=sha256_file(folder / documents.FILE_NAME) if changed else staged.checksum,
        files=staged.files,
        documents=staged.documents - len(encoded.reasons),
        unique_texts=unique_texts,
        rejected=staged.rejected + len(encoded.reasons),
        truncated=summary.truncated,
        tokens=summary.tokens,
        reused_texts=summary.reused_texts,
        update=staged.update,
        chunks=rows if staged.chunks else None,
    )


def _held_out(options: BuildOptions) -> list[str]:
    return read_queries(options.queries) if options.queries else []


def _recall_source(options: BuildOptions, held_out: list[str]) -> str:
    """Names the held-out queries for the manifest: their file, and the start of their checksum."""
    if not options.queries:
        return "first sentences of documents"
    digest = hashlib.sha256(json.dumps(held_out).encode()).hexdigest()[:12]
    return f"{options.queries.name}, SHA-256 {digest}"


def _target(options: BuildOptions) -> float:
    return DEFAULT_RECALL if options.recall is None else options.recall


def _check_recall(choice: SearchChoice, options: BuildOptions) -> None:
    if not choice.hint:
        return
    shortfall = (
        f"the best recall@{RECALL_K} is {choice.recall:.4f}, below the target "
        f"{_target(options)}: use {choice.hint}"
    )
    if options.recall is not None:
        raise IndexVersionError(
            shortfall, code="recall_not_reached", recall=choice.recall, target=options.recall
        )
    _log.warning("%s; the index is published with this recall", shortfall)
