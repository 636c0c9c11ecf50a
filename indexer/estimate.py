"""What a build would take, from a sample of its corpus: tokens, hours, disk and memory."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import CorpusError
from core.text import document_text
from core.types import Document, Encoder
from indexer.build import BuildOptions
from indexer.chunking import Chunker
from indexer.corpus import MAX_CHUNKED_TEXT_CHARS, MAX_TEXT_CHARS, Reject, corpus_files
from indexer.encoders import TokenCounter
from indexer.index_size import index_bytes
from indexer.sample import Stratum, Total, sample, total
from indexer.stores import Store, check_factory, choose_factory

_TRIAL_BATCHES = 8
_TRIAL_SECONDS = 20.0
# Offsets of four columns of text, one of them of eight bytes; a chunk has three columns more.
_ROW_BYTES, _CHUNK_ROW_BYTES = 20, 12
# Measured with 100,000 and a million documents (python -m loadtest.bench.build).
_STAGING_BYTES = 60e6
_BASE_BYTES = 120e6
_TRAINING_ROWS = 100_000
# A shard that is read, one that is encoded, one that is written.
_SHARDS = 3


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast documents are encoded.

    Attributes:
        tokens: Tokens per second of a device.
        device: What a device is, in a word.
        source: Where the number comes from, in words.
    """

    tokens: float
    device: str
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build would take; sizes in bytes.

    Attributes:
        is_whole: Whether the sample is the corpus.
        sampled: Documents in the sample.
        rejected: Records in the sample that cannot be indexed.
        documents: Documents in the corpus.
        rows: Documents or, if they are cut, their chunks.
        tokens: Tokens to encode if no text repeats.
        truncated: Share of the rows' texts that are cut at the encoder's length.
        store: Where the vectors are kept.
        factory: The index type.
        shards: Shards in the build folder.
        documents_file: `documents.arrow`, in the build folder and in the version.
        vectors_file: `vectors.faiss`, or what Milvus keeps of it.
        memory: Peak without the encoder.
        memory_of: The phase that it is the peak of.
    """

    is_whole: bool
    sampled: int
    rejected: int
    documents: Total
    rows: Total
    tokens: Total
    truncated: float
    store: Store
    factory: str
    shards: float
    documents_file: float
    vectors_file: float
    memory: float
    memory_of: str


@dataclass(frozen=True, slots=True)
class _Counts:
    documents: int
    rows: int
    tokens: int
    truncated: int
    text_bytes: int


class Sample:
    """A sample of the corpus that options name; nothing is written.

    Args:
        options: The build.
        chunker: Cuts long documents, or None to keep them whole.

    Raises:
        CorpusError: If the corpus cannot be read or the sample holds no document.
    """

    def __init__(self, options: BuildOptions, chunker: Chunker | None) -> None:
        self._options = options
        self._chunker = chunker
        limit = MAX_CHUNKED_TEXT_CHARS if chunker else MAX_TEXT_CHARS
        self._strata = sample(corpus_files(options.corpus), limit)
        self._rows = {
            id(block): [row for record in block.records for row in self._cut(record)]
            for stratum in self._strata
            for block in stratum.blocks
        }
        if not any(self._rows.values()):
            raise CorpusError(f"{options.corpus}: no record of the sample can be indexed")

    def _cut(self, record: Document | Reject) -> list[Document]:
        if isinstance(record, Reject):
            return []
        rows = self._chunker.cut(record) if self._chunker else [record]
        return [] if isinstance(rows, Reject) else rows

    @property
    def texts(self) -> list[str]:
        """The texts to encode, in the order of the corpus."""
        return [_text(row) for rows in self._rows.values() for row in rows]

    def estimate(self, count: TokenCounter, dimension: int) -> Estimate:
        """Estimates what a build would take.

        Args:
            count: Counts the tokens of texts.
            dimension: Dimensions of the vectors.

        Raises:
            CareError: If the factory asked for cannot hold as many vectors.
        """
        counts = {key: self._count(rows, count) for key, rows in self._rows.items()}

        def all_of(value: Callable[[_Counts], float]) -> Total:
            return total(self._strata, lambda block: value(counts[id(block)]))

        documents, rows = all_of(lambda c: c.documents), all_of(lambda c: c.rows)
        number = round(rows.value)
        store = self._options.store
        factory = self._options.factory or choose_factory(store, number, dimension)
        check_factory(store, factory, dimension, number)
        vectors_file = index_bytes(factory, number, dimension)
        row_bytes = _ROW_BYTES + (_CHUNK_ROW_BYTES if self._chunker else 0)
        text_bytes = all_of(lambda c: c.text_bytes).value
        memory_of, memory = self._memory(factory, number, dimension, vectors_file, text_bytes)
        sampled = sum(c.rows for c in counts.values())
        return Estimate(
            is_whole=documents.spread == 0 and all(map(_is_whole, self._strata)),
            sampled=sum(c.documents for c in counts.values()),
            rejected=sum(
                len(block.records) - counts[id(block)].documents
                for stratum in self._strata
                for block in stratum.blocks
            ),
            documents=documents,
            rows=rows,
            tokens=all_of(lambda c: c.tokens),
            truncated=sum(c.truncated for c in counts.values()) / sampled,
            store=store,
            factory=factory,
            shards=4.0 * number * dimension,
            documents_file=text_bytes + row_bytes * number,
            vectors_file=vectors_file,
            memory=memory,
            memory_of=memory_of,
        )

    def _count(self, rows: Sequence[Document], count: TokenCounter) -> _Counts:
        counted = count([_text(row) for row in rows]) if rows else []
        return _Counts(
            documents=len({row.parent or row.id for row in rows}),
            rows=len(rows),
            tokens=sum(tokens for tokens, _ in counted),
            truncated=sum(truncated for _, truncated in counted),
            text_bytes=sum(map(_stored_bytes, rows)),
        )

    def _memory(
        self, factory: str, rows: int, dimension: int, vectors_file: int, text_bytes: float
    ) -> tuple[str, float]:
        shard = self._options.shard_size * (4 * dimension + 2 * text_bytes / max(rows, 1))
        bound = self._options.memory_gib * 2**30
        index = float(vectors_file)
        if self._options.store == "milvus":
            index = 0.0
        elif factory.startswith("IVF"):
            # Lists grow by doubling, and are trained on a sample.
            sampled = 4 * dimension * min(rows, _TRAINING_ROWS)
            index = min(2 * max(vectors_file, sampled), bound)
        phases = {
            "staging": _STAGING_BYTES,
            "encoding": _SHARDS * shard,
            "building the index": index,
        }
        phase = max(phases, key=phases.__getitem__)
        return phase, _BASE_BYTES + phases[phase]


def trial(encoder: Encoder, texts: Sequence[str], batch_size: int, devices: int, name: str) -> Rate:
    """Encodes some evenly spaced texts, in batches of like length, and times it.

    The first batch, which warms the encoder up, is timed only if it is the only one.

    Args:
        encoder: Encodes the documents.
        texts: The texts of a sample.
        batch_size: Texts in a batch.
        devices: GPUs that the encoder uses, or 1 for the processor or a server.
        name: The encoder's name and dtype.
    """
    number = min(len(texts), _TRIAL_BATCHES * batch_size)
    chosen = [texts[int(i)] for i in np.linspace(0, len(texts) - 1, number)]
    chosen.sort(key=len, reverse=True)
    batches = [chosen[at : at + batch_size] for at in range(0, number, batch_size)]
    # Long and short by turns: what the time allows for stands for all.
    batches = batches[::2] + batches[1::2][::-1]
    if len(batches) > 1:
        encoder.encode(batches[0])
    tokens = encoded = 0
    started = time.perf_counter()
    for batch in batches:
        tokens += int(encoder.encode(batch).token_counts.sum())
        encoded += len(batch)
        if time.perf_counter() - started > _TRIAL_SECONDS:
            break
    seconds = time.perf_counter() - started
    source = f"measured here: {encoded} texts in {seconds:.1f} s with {name}"
    return Rate(tokens / seconds / devices, "device", source)


def described(estimate: Estimate, rate: Rate) -> list[str]:
    """Returns an estimate in lines for the user."""
    rows = f" in {_number(estimate.rows)} chunks" if estimate.rows != estimate.documents else ""
    read = "all of them" if estimate.is_whole else f"a sample of {estimate.sampled:,}"
    tokens = estimate.tokens
    hours = tokens.value / rate.tokens / 3600
    spread = f" ± {hours * tokens.spread / tokens.value:,.3g}" if tokens.spread else ""
    builds = estimate.shards + estimate.documents_file
    documents = f"documents.arrow {_size(estimate.documents_file)}"
    vectors = f"{_size(estimate.vectors_file)} ({estimate.factory})"
    if estimate.store == "milvus":
        version = f"{documents}; vectors in Milvus {vectors}"
    else:
        total_size = _size(estimate.vectors_file + estimate.documents_file)
        version = f"{total_size}: vectors.faiss {vectors}, {documents}"
    return [
        f"corpus  {_number(estimate.documents)} documents{rows}, from {read}; "
        f"{estimate.rejected:,} records of it would be rejected",
        f"tokens  {_number(tokens)}: {tokens.value / estimate.rows.value:,.1f} a text; "
        f"{estimate.truncated:.1%} of texts are cut at the encoder's length",
        f"time    {hours:,.3g}{spread} {rate.device} hours at {rate.tokens:,.0f} tokens/s a "
        f"{rate.device}, {rate.source}",
        f"disk    builds {_size(builds)}: shards {_size(estimate.shards)}, {documents}",
        f"        version {version}",
        f"memory  {_size(estimate.memory)} at its peak, {estimate.memory_of}, "
        "and what the encoder takes",
        "        nothing is written; texts that repeat are encoded once, filters are not counted",
    ]


def _number(estimate: Total) -> str:
    spread = f" ± {estimate.spread:,.0f}" if estimate.spread else ""
    return f"{estimate.value:,.0f}{spread}"


def _size(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _text(row: Document) -> str:
    return document_text(row.title, row.text)


def _stored_bytes(row: Document) -> int:
    metadata = json.dumps(row.metadata, ensure_ascii=False)
    columns = (row.id, row.title, row.text, metadata, row.parent or "")
    return sum(len(column.encode()) for column in columns)


def _is_whole(stratum: Stratum) -> bool:
    return sum(block.size for block in stratum.blocks) >= stratum.units
