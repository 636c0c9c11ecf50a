"""The main job: corpus → vectors → FAISS → verified, published version."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as library_version
from pathlib import Path

import numpy as np

from core import documents, filters
from core.canaries import canary_candidates, check_canaries, choose_canaries, make_canaries
from core.documents import DocumentReader
from core.errors import CareError, CorpusError, IndexVersionError
from core.files import exclusive, sha256_file, sync, write_text, writing_in
from core.shards import ShardedVectors
from core.text import document_text, normalize_text
from core.types import (
    SCHEMA_VERSION,
    Canary,
    Chunking,
    CorpusRecord,
    Encoder,
    EncoderSpec,
    FileRecord,
    IndexManifest,
    RecallReport,
    RowArray,
)
from core.versions import MANIFEST, current_version, index_folder, read_manifest
from indexer.chunking import Chunker
from indexer.corpus import Reject, corpus_checksum, corpus_files, read_corpus
from indexer.encoding import EncodingSummary, Reuse, encode_corpus
from indexer.recall import RECALL_K
from indexer.refusals import max_refused, without_refused
from indexer.staging import StagedCorpus, stage, unique_text_rows, vector_of_row
from indexer.stores import (
    MilvusAddress,
    NewVersion,
    Store,
    check_factory,
    check_store,
    choose_factory,
    store_of,
    write_vectors,
)
from indexer.verify import verify_version
from indexer.versions import clear_hidden, hidden_folder, remove_hidden, switch

_HELD_OUT_QUERIES = 200
_LIBRARIES = ("numpy", "onnxruntime", "pyarrow", "tokenizers")
_STORE_LIBRARIES: dict[Store, str] = {"faiss": "faiss-cpu", "milvus": "pymilvus"}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the user asks for; the defaults are the command's.

    Attributes:
        corpus: A file, folder or glob.
        name: The index.
        indexes: Where indexes are published.
        builds: Where builds keep what a resumed one reads.
        factory: A FAISS factory string, or None to choose by size.
        recall: The recall@10 that search parameters must reach.
        queries: A JSONL file of held-out queries, or None to take first sentences.
        max_reject_rate: The share of records that may be rejected.
        shard_size: Texts in a shard.
        batch_size: Texts in a batch.
        threads: Threads of the encoder and of FAISS.
        memory_gib: What inverted lists in work, or the sample to train them on, may take [GiB].
        progress: Whether to show bars.
        chunking: How long documents are cut, or None to keep them whole.
        store: Where the vectors are kept.
        milvus: Where Milvus is, or None if no version keeps its vectors there.
        engine: Encodes what is staged, as `encode_corpus` does.
        computation: What encodes and in which dtype, where the spec leaves it open.
    """

    corpus: str
    name: str
    indexes: Path = Path("indexes")
    builds: Path = Path("builds")
    factory: str | None = None
    recall: float = 0.99
    queries: Path | None = None
    max_reject_rate: float = 0.01
    shard_size: int = 4096
    batch_size: int = 32
    threads: int = 1
    memory_gib: float = 4.0
    progress: bool = True
    chunking: Chunking | None = None
    store: Store = "faiss"
    milvus: MilvusAddress | None = None
    engine: Callable[..., EncodingSummary] = encode_corpus
    computation: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """What a version is made from.

    Attributes:
        checksum: Checksum of all that decides on the documents; part of the build's key.
        stage: Lays the documents out in the build folder.
        reuse: Finds vectors that need not be computed again, or None.
        base: The version that must still be active when the new one is, or None.
    """

    checksum: str
    stage: Callable[[Path], StagedCorpus]
    reuse: Reuse | None = None
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A corpus that is staged and encoded.

    Attributes:
        folder: The build folder, with the shards.
        staged: What is indexed.
        summary: What the encoder did.
        layout: Where documents, filters and rows lie: the build folder or, if texts cannot be
            encoded, a folder in it without their documents.
        refused: Of the documents left out for that, by id, the reasons.
    """

    folder: Path
    staged: StagedCorpus
    summary: EncodingSummary
    layout: Path
    refused: Mapping[str, str]


def up_to_date(options: BuildOptions, spec: EncoderSpec) -> IndexManifest | None:
    """Returns the active version if a build would only repeat it, else None.

    Raises:
        CorpusError: If the corpus cannot be read.
    """
    try:
        version = current_version(options.indexes, options.name)
        folder = index_folder(options.indexes, options.name) / version
        if store_of(read_manifest(folder)) != options.store:
            return None
        manifest = verify_version(folder, options.milvus)
    except IndexVersionError:
        return None
    factory = options.factory or choose_factory(options.store, manifest.count, spec.dimension)
    same = (
        manifest.corpus.checksum == corpus_checksum(corpus_files(options.corpus))
        and manifest.encoder == spec
        and manifest.factory == factory
        and manifest.recall.target == options.recall
        and manifest.chunking == options.chunking
    )
    return manifest if same else None


def encode(options: BuildOptions, encoder: Encoder, source: Source | None = None) -> Encoded:
    """Stages and encodes a corpus; what an earlier, killed run finished is not done again.

    Args:
        options: What to build.
        encoder: Encodes the documents.
        source: What to encode instead of the corpus that the options name.

    Raises:
        CareError: If the corpus or the vectors are bad, or another build is at work on them.
    """
    index_folder(options.indexes, options.name)
    source = source or _corpus(options, encoder)
    folder = options.builds / options.name / _build_key(source.checksum, encoder, options)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder), writing_in(folder):
        staged = source.stage(folder)
        summary = options.engine(
            folder,
            encoder,
            shard_size=options.shard_size,
            batch_size=options.batch_size,
            progress=options.progress,
            reuse=source.reuse,
            max_refused=max_refused(staged, options.max_reject_rate, reuse=bool(source.reuse)),
        )
        layout, staged, refused = without_refused(
            folder,
            staged,
            summary.refused,
            max_reject_rate=options.max_reject_rate,
            reuse=bool(source.reuse),
        )
    return Encoded(folder, staged, summary, layout, refused)


def build(
    options: BuildOptions,
    document_encoder: Encoder,
    query_encoder: Encoder,
    source: Source | None = None,
) -> tuple[IndexManifest, Encoded]:
    """Builds a version, verifies it and makes it the active one.

    The active version stays what it was until the new one is whole and verified. No other
    command builds or prunes versions of the index meanwhile.

    Args:
        options: What to build.
        document_encoder: Encodes the corpus.
        query_encoder: Encodes the held-out queries and the canaries, as the service will.
        source: What to build from instead of the corpus that the options name.

    Raises:
        CareError: If anything fails; nothing is published then.
    """
    if options.factory:
        check_factory(options.store, options.factory, document_encoder.spec.dimension)
    check_store(options.store, options.milvus)
    parent = index_folder(options.indexes, options.name)
    source = source or _corpus(options, document_encoder)
    parent.mkdir(parents=True, exist_ok=True)
    with exclusive(parent):
        if options.store == "milvus":
            clear_hidden(parent, options.milvus)
        return _build(options, document_encoder, query_encoder, source)


def _build(
    options: BuildOptions, document_encoder: Encoder, query_encoder: Encoder, source: Source
) -> tuple[IndexManifest, Encoded]:
    started = time.perf_counter()
    dimension = document_encoder.spec.dimension
    # A bad file of queries is found before days of encoding.
    asked = _read_queries(options.queries) if options.queries else []
    encoded = encode(options, document_encoder, source)
    layout = encoded.layout
    reader = DocumentReader(layout / documents.FILE_NAME)
    vectors = ShardedVectors(encoded.folder, options.shard_size, vector_of_row(layout))
    factory = options.factory or choose_factory(options.store, len(vectors), dimension)
    check_factory(options.store, factory, dimension, len(vectors))
    canaries = _canaries(reader, vectors, unique_text_rows(layout))
    check_canaries(query_encoder, canaries)
    texts = asked or _first_sentences(reader, unique_text_rows(layout))
    queries = np.concatenate([query_encoder.encode([normalize_text(t)]).vectors for t in texts])

    version = _new_version(options.indexes, options.name, encoded.folder.name)
    with _unpublished(options, version) as folder:
        for name in (documents.FILE_NAME, filters.FILE_NAME):
            shutil.copyfile(layout / name, folder / name)
            sync(folder / name)
        new = NewVersion(
            name=options.name,
            version=version,
            folder=folder,
            vectors=vectors,
            filter_fields=encoded.staged.filter_fields,
            factory=factory,
            queries=queries,
            recall=options.recall,
            threads=options.threads,
            memory=int(options.memory_gib * 2**30),
            progress=options.progress,
        )
        choice = write_vectors(options.store, new, options.milvus)
        manifest = IndexManifest(
            schema_version=SCHEMA_VERSION,
            name=options.name,
            version=version,
            encoder=document_encoder.spec,
            metric="cosine",
            factory=factory,
            search_parameters=choice.parameters,
            count=len(vectors),
            filter_fields=encoded.staged.filter_fields,
            files={path.name: _record(path) for path in sorted(folder.iterdir())},
            corpus=CorpusRecord(
                checksum=encoded.staged.checksum,
                files=encoded.staged.files,
                documents=encoded.staged.documents,
                unique_texts=encoded.staged.unique_texts,
                rejected=encoded.staged.rejected,
                truncated=encoded.summary.truncated,
                tokens=encoded.summary.tokens,
                reused_texts=encoded.summary.reused_texts,
                update=encoded.staged.update,
                chunks=encoded.staged.chunks,
            ),
            recall=RecallReport(
                k=RECALL_K,
                queries=len(queries),
                source=(
                    options.queries.name if options.queries else "first sentences of documents"
                ),
                target=options.recall,
                recall=choice.recall,
                tried=choice.tried,
            ),
            canaries=canaries,
            created_at=datetime.now(UTC),
            build_seconds=round(time.perf_counter() - started, 3),
            libraries={
                name: library_version(name)
                for name in (*_LIBRARIES, _STORE_LIBRARIES[options.store])
            },
            chunking=options.chunking,
        )
        write_text(folder / MANIFEST, manifest.model_dump_json(indent=2))
        verify_version(folder, options.milvus)
        if source.base and source.base != current_version(options.indexes, options.name):
            raise IndexVersionError(
                f"index '{options.name}' has another active version than {source.base}, which "
                "this update began with: run it again"
            )
    switch(options.indexes, options.name, version, options.milvus)
    return manifest, encoded


def _corpus(options: BuildOptions, encoder: Encoder) -> Source:
    chunker = Chunker(encoder, options.chunking) if options.chunking else None
    files = corpus_files(options.corpus)
    checksum = corpus_checksum(files)

    def lay_out(folder: Path) -> StagedCorpus:
        return stage(
            files,
            checksum,
            folder,
            max_reject_rate=options.max_reject_rate,
            progress=options.progress,
            chunker=chunker,
        )

    return Source(checksum, lay_out)


def _build_key(checksum: str, encoder: Encoder, options: BuildOptions) -> str:
    facts = [checksum, encoder.spec.model_dump(), options.shard_size, options.batch_size]
    if options.chunking:
        facts.append(options.chunking.model_dump())
    if options.computation:
        facts.append(options.computation)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read_queries(path: Path) -> list[str]:
    texts = []
    for place, record in read_corpus(corpus_files(str(path))):
        if isinstance(record, Reject):
            raise CorpusError(f"{place}: {record.reason}")
        texts.append(record.text)
    if not texts:
        raise CorpusError(f"{path} holds no queries")
    return texts


def _first_sentences(reader: DocumentReader, rows: RowArray) -> list[str]:
    number = min(len(rows), _HELD_OUT_QUERIES)
    # Offset by half a step: not the rows that become canaries.
    sample = [int(rows[(2 * i + 1) * len(rows) // (2 * number)]) for i in range(number)]
    return [_first_sentence(reader[row].text) for row in sample]


def _canaries(reader: DocumentReader, vectors: ShardedVectors, text_rows: RowArray) -> list[Canary]:
    rows = text_rows[canary_candidates(len(text_rows))]
    texts = [document_text(d.title, d.text) for d in (reader[int(row)] for row in rows)]
    chosen = choose_canaries([len(text) for text in texts])
    return make_canaries([texts[i] for i in chosen], vectors.take(rows[chosen]))


def _first_sentence(text: str) -> str:
    text = normalize_text(text)
    ends = [at for mark in "。？！?!；;" if (at := text.find(mark)) > 0]
    return text[: min(ends)] if ends else text


def _new_version(indexes: Path, name: str, build_key: str) -> str:
    version = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{build_key[:8]}"
    if (index_folder(indexes, name) / version).exists():
        raise CareError(f"index '{name}' already has a version '{version}'")
    return version


@contextmanager
def _unpublished(options: BuildOptions, version: str) -> Iterator[Path]:
    """Yields a hidden folder that becomes the version when the block succeeds."""
    parent = index_folder(options.indexes, options.name)
    folder = hidden_folder(parent, version)
    with writing_in(parent):
        folder.mkdir()
        try:
            yield folder
            sync(folder)
            folder.rename(parent / version)
            sync(parent)
        finally:
            with suppress(CareError, OSError):  # what stays is what the next build or prune removes
                remove_hidden(folder, options.milvus)


def _record(path: Path) -> FileRecord:
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
