"""The main job: corpus → staging → vectors → index → verified, published version."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents, filters
from core.canaries import canary_candidates, check_canaries, choose_canaries, make_canaries
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec
from core.errors import CareError, CorpusError, IndexVersionError
from core.files import exclusive, publish, sha256_file, write_text, writing_in
from core.filters import FilterReader
from core.manifest import (
    SCHEMA_VERSION,
    Canary,
    Chunking,
    CorpusRecord,
    FileRecord,
    IndexManifest,
    RecallReport,
)
from core.provenance import library_versions
from core.records import write_jsonl
from core.shards import ShardedVectors, has_shards, link_shards
from core.text import first_sentence, normalize_text
from core.types import FloatArray, RowArray
from core.versions import MANIFEST, current_version, index_folder, read_manifest
from indexer import versions
from indexer.chunking import Chunker
from indexer.corpus import Reject, corpus_checksum, corpus_files, read_corpus
from indexer.encoding import EncodingSummary, Executor, LocalExecutor, Reuse, encode_corpus
from indexer.failures import FAILURES, failed_documents, max_failed
from indexer.staging import (
    StagedCorpus,
    read_chunks,
    row_texts,
    stage,
    unique_text_rows,
    write_version,
)
from stores.base import NewVectors, SearchChoice, StoreName
from stores.recall import RECALL_K
from stores.registry import FILES, VectorStores, check_factory, default_factory

FAILED = "failed.jsonl"
DEFAULT_RECALL = 0.99

_log = logging.getLogger(__name__)

# Part of the key of a build: another format of staging, shards or journal starts anew.
_BUILD_FORMAT = 2
_HELD_OUT_QUERIES = 200


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the user asks for: options of the command, whose help says more, and its defaults.

    Attributes:
        recall: The recall@10 that search parameters must reach, or None for 0.99 or, if no
            parameters reach it, the best there is, with a warning.
        queries: A JSONL file of held-out queries, or None to take first sentences.
        memory_gib: What inverted lists in work, or the sample to train them on, may take [GiB].
        progress: Whether to show bars.
        chunking: How long documents are cut, or None to keep them whole.
        stores: All stores that versions of the index may use.
        executor: Runs the document encoder, or None to run it here.
    """

    corpus: str
    name: str
    indexes: Path = Path("indexes")
    builds: Path = Path("builds")
    factory: str | None = None
    recall: float | None = None
    queries: Path | None = None
    max_reject_rate: float = 0.01
    shard_size: int = 4096
    batch_size: int = 32
    threads: int = 1
    memory_gib: float = 4.0
    progress: bool = True
    chunking: Chunking | None = None
    store: StoreName = "faiss"
    stores: VectorStores = FILES
    executor: Executor | None = None
    backend: str = "onnx"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Source:
    """What a version is made from.

    Attributes:
        checksum: Checksum of all that decides on the documents; part of the build's key.
        stage: Writes the documents by rows in the build folder.
        reuse: Finds vectors that need not be computed again, or None.
        base: The version that must still be active when the new one is published, or None.
    """

    checksum: str
    stage: Callable[[Path], StagedCorpus]
    reuse: Reuse | None = None
    base: IndexManifest | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A corpus that is staged and encoded in a build folder.

    Attributes:
        keep: bool [staged rows], which rows are indexed, or None for all.
        reasons: Why documents cannot be encoded, by id.
    """

    folder: Path
    staged: StagedCorpus
    summary: EncodingSummary
    keep: NDArray[np.bool_] | None
    reasons: dict[str, str]


def up_to_date(options: BuildOptions, spec: EncoderSpec) -> IndexManifest | None:
    """Returns the active version if a build would only repeat it, else None.

    Raises:
        CorpusError: If the corpus cannot be read.
    """
    try:
        version = current_version(options.indexes, options.name)
        folder = index_folder(options.indexes, options.name) / version
        if read_manifest(folder).store != options.store:
            return None
        manifest = versions.verify_version(folder, options.stores)
    except IndexVersionError:
        return None
    factory = options.factory or default_factory(options.store, manifest.count, spec.dimension)
    same = (
        manifest.corpus.checksum == corpus_checksum(corpus_files(options.corpus))
        and manifest.encoder == spec
        and (manifest.backend, manifest.dtype) == (options.backend, options.dtype)
        and manifest.factory == factory
        and manifest.recall.target == _target(options)
        and manifest.chunking == options.chunking
    )
    return manifest if same else None


def encode(
    options: BuildOptions,
    encoder: Encoder,
    query_encoder: Encoder | None = None,
    source: Source | None = None,
) -> Encoded:
    """Stages and encodes a corpus; what an earlier, killed run finished is not done again.

    A query encoder is only checked to share the space, before anything is encoded. A source is
    encoded instead of the corpus that the options name.

    Raises:
        CareError: If the corpus or the vectors are bad, or another build works on them.
        EmbeddingSpaceError: If the query encoder does not share the space.
    """
    index_folder(options.indexes, options.name)
    source = source or corpus_source(options, encoder)
    folder = options.builds / options.name / _build_key(source.checksum, encoder, options)
    folder.mkdir(parents=True, exist_ok=True)
    reuse = bool(source.reuse)
    with exclusive(folder), writing_in(folder):
        staged = source.stage(folder)
        if not has_shards(folder):
            _link_other_builds(options.builds, folder)
        if query_encoder:
            _check_space(folder, source.base, encoder, query_encoder)
        summary = encode_corpus(
            folder,
            encoder.spec.dimension,
            options.executor or LocalExecutor(encoder, options.batch_size),
            shard_size=options.shard_size,
            progress=options.progress,
            reuse=source.reuse,
            max_failed=max_failed(staged, options.max_reject_rate, reuse=reuse),
        )
        keep, reasons = failed_documents(
            folder, staged, summary.failed, max_reject_rate=options.max_reject_rate, reuse=reuse
        )
        if reasons:
            listed = ({"id": id_, "reason": why} for id_, why in reasons.items())
            write_jsonl(folder / FAILED, listed)
    return Encoded(folder, staged, summary, keep, reasons)


def build(
    options: BuildOptions,
    document_encoder: Encoder,
    query_encoder: Encoder,
    source: Source | None = None,
) -> tuple[IndexManifest, Encoded]:
    """Builds a version, verifies it and makes it the active one.

    The active version stays what it was until the new one is complete and verified. No other
    command builds or prunes versions of the index meanwhile.

    The query encoder encodes the held-out queries and the canaries, as the service will. The
    version is built from the source, if there is one, and not from the corpus of the options.

    Raises:
        CareError: If anything fails; nothing is published then.
    """
    started = time.perf_counter()
    store = options.stores.get(options.store)
    dimension = document_encoder.spec.dimension
    if options.factory:
        check_factory(options.store, options.factory, dimension)
    parent = index_folder(options.indexes, options.name)
    source = source or corpus_source(options, document_encoder)
    parent.mkdir(parents=True, exist_ok=True)
    with exclusive(parent):
        if options.store == "milvus":
            versions.remove_incomplete(parent, options.stores)
        # A bad file of queries is found before days of encoding.
        held_out = _read_queries(options.queries) if options.queries else []
        encoded = encode(options, document_encoder, query_encoder, source)
        with _new_version(options, parent, encoded.folder.name) as (version, folder):
            vector_of, fields = write_version(encoded.folder, folder, encoded.staged, encoded.keep)
            reader = DocumentReader(folder / documents.FILE_NAME)
            vectors = ShardedVectors(encoded.folder, options.shard_size, vector_of)
            text_rows = np.sort(np.unique(vector_of, return_index=True)[1])
            factory = options.factory or default_factory(options.store, len(vectors), dimension)
            check_factory(options.store, factory, dimension, len(vectors))
            canaries = _canaries(reader, text_rows, vectors.take)
            check_canaries(query_encoder, canaries)
            texts = held_out or _first_sentences(reader, text_rows)
            queries = [query_encoder.encode([normalize_text(text)]).vectors for text in texts]
            choice = store.build(
                NewVectors(
                    index=options.name,
                    version=version,
                    folder=folder,
                    vectors=vectors,
                    filters=FilterReader(folder / filters.FILE_NAME, fields),
                    factory=factory,
                    queries=np.concatenate(queries),
                    recall=_target(options),
                    threads=options.threads,
                    memory=int(options.memory_gib * 2**30),
                    progress=options.progress,
                )
            )
            _check_recall(choice, options)
            manifest = IndexManifest(
                schema_version=SCHEMA_VERSION,
                name=options.name,
                version=version,
                parent=_active(options),
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
                },
                corpus=_corpus_record(encoded, folder, len(text_rows), len(vectors)),
                recall=RecallReport(
                    k=RECALL_K,
                    queries=len(queries),
                    source=(
                        options.queries.name if options.queries else "first sentences of documents"
                    ),
                    target=_target(options),
                    recall=choice.recall,
                    tried=choice.tried,
                ),
                canaries=canaries,
                created_at=datetime.now(UTC),
                build_seconds=round(time.perf_counter() - started, 3),
                libraries=library_versions(),
                chunking=options.chunking,
            )
            write_text(folder / MANIFEST, manifest.model_dump_json(indent=2))
            versions.verify_version(folder, options.stores)
            if source.base and source.base.version != _active(options):
                raise IndexVersionError(
                    f"index '{options.name}' has another active version than "
                    f"{source.base.version}, which this update began with: run it again",
                    code="base_not_active",
                    version=source.base.version,
                )
        versions.switch(options.indexes, options.name, version, options.stores)
    return manifest, encoded


def corpus_source(options: BuildOptions, encoder: Encoder) -> Source:
    """Returns the corpus that options name.

    Raises:
        CareError: If it cannot be read, or not be cut by the tokens of the encoder.
    """
    chunker = Chunker(encoder, options.chunking) if options.chunking else None
    files = corpus_files(options.corpus)
    checksum = corpus_checksum(files)

    def stage_files(folder: Path) -> StagedCorpus:
        return stage(
            read_chunks(files, chunker),
            folder,
            files=[file.name for file in files],
            checksum=checksum,
            chunked=chunker is not None,
            max_reject_rate=options.max_reject_rate,
            progress=options.progress,
        )

    return Source(checksum, stage_files)


def _build_key(checksum: str, encoder: Encoder, options: BuildOptions) -> str:
    facts = [
        _BUILD_FORMAT,
        checksum,
        encoder.spec.model_dump(),
        options.backend,
        options.dtype,
        options.shard_size,
        options.batch_size,
        options.chunking and options.chunking.model_dump(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _link_other_builds(builds: Path, folder: Path) -> None:
    """Takes over the shards that a build of the same key made under another index name."""
    for other in sorted(builds.glob(f"*/{folder.name}/")):
        if other != folder and link_shards(other, folder):
            return


def _check_space(
    folder: Path, base: IndexManifest | None, encoder: Encoder, query_encoder: Encoder
) -> None:
    """Checks with 16 texts, before all are encoded, that both encoders share one space."""
    if base:
        check_canaries(query_encoder, base.canaries)
        return
    if has_shards(folder):
        return
    reader = DocumentReader(folder / documents.FILE_NAME)
    rows = unique_text_rows(folder)

    def encoded(chosen: RowArray) -> FloatArray:
        texts = row_texts(reader, chosen)
        return np.concatenate([encoder.encode([text]).vectors for text in texts])

    with suppress(*FAILURES):  # encoding all finds the text at fault
        check_canaries(query_encoder, _canaries(reader, rows, encoded))


def _corpus_record(encoded: Encoded, folder: Path, unique_texts: int, rows: int) -> CorpusRecord:
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


def _active(options: BuildOptions) -> str | None:
    try:
        return current_version(options.indexes, options.name)
    except IndexVersionError:
        return None


def _target(options: BuildOptions) -> float:
    return DEFAULT_RECALL if options.recall is None else options.recall


def _check_recall(choice: SearchChoice, options: BuildOptions) -> None:
    if not choice.hint:
        return
    shortfall = (
        f"recall@{RECALL_K} is {choice.recall:.4f} at most, below {_target(options)}: choose "
        f"{choice.hint}"
    )
    if options.recall is not None:
        raise IndexVersionError(
            shortfall, code="recall_not_reached", recall=choice.recall, target=options.recall
        )
    _log.warning("%s; the index is published with it", shortfall)


def _read_queries(path: Path) -> list[str]:
    texts = []
    for place, record in read_corpus(corpus_files(str(path))):
        if isinstance(record, Reject):
            raise CorpusError(
                f"{place}: {record.reason}", code="bad_query", path=place.file, line=place.line
            )
        texts.append(record.text)
    if not texts:
        raise CorpusError.at(path, "holds no queries", "no_queries")
    return texts


def _first_sentences(reader: DocumentReader, rows: RowArray) -> list[str]:
    number = min(len(rows), _HELD_OUT_QUERIES)
    # Offset by half a step: not the rows that become canaries.
    sample = [int(rows[(2 * i + 1) * len(rows) // (2 * number)]) for i in range(number)]
    return [first_sentence(normalize_text(reader[row].text)) for row in sample]


def _canaries(
    reader: DocumentReader, text_rows: RowArray, vectors: Callable[[RowArray], FloatArray]
) -> list[Canary]:
    rows = text_rows[canary_candidates(len(text_rows))]
    texts = list(row_texts(reader, rows))
    chosen = choose_canaries([len(text) for text in texts])
    return make_canaries([texts[i] for i in chosen], vectors(rows[chosen]))


@contextmanager
def _new_version(options: BuildOptions, parent: Path, build_key: str) -> Iterator[tuple[str, Path]]:
    """Yields an id and a hidden folder that becomes the version when the block succeeds."""
    version = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{build_key[:8]}"
    if (parent / version).exists():
        raise CareError(
            f"index '{parent.name}' already has a version '{version}'", code="version_exists"
        )
    folder = versions.hidden_folder(parent, version)
    with writing_in(parent):
        folder.mkdir()
        try:
            yield version, folder
            publish(folder, parent / version)
        finally:
            with suppress(CareError, OSError):  # what stays is what the next build or prune removes
                versions.remove_hidden(folder, options.stores)
