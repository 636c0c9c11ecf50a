"""Estimates the tokens, time, disk space and memory of a build from a sample of the corpus.

JSONL files are sampled by bytes: the lines that begin in evenly spaced blocks. Parquet files are
sampled by rows. Counts are scaled by the share that was read. A small corpus is read completely.
Files of other formats are read completely, and a sample of their records is kept.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import pyarrow.parquet as pq

from core.encoders import Encoder
from core.errors import CorpusError
from core.records import open_lines
from core.text import document_text, normalize_text
from core.types import Document
from indexer.build import BuildOptions
from indexer.chunking import Chunker, split_record
from indexer.corpus import (
    PARQUET,
    READ_ERRORS,
    Reading,
    corpus_files,
    has_corpus_fields,
    read_byte_range,
    read_corpus,
    read_row_group,
    warn_about_unread,
)
from indexer.limits import max_text_chars
from indexer.readers.source import Report
from indexer.records import Reject
from models.encoders.factory import TokenCounter
from stores.base import StoreName
from stores.faiss.factory import index_bytes
from stores.registry import check_factory, default_factory

_BLOCK_BYTES = 64 * 1024
_BLOCKS = 64
_BLOCK_ROWS = 64
_GROUPS = 32
_GROUP_BLOCKS = 2
_RECORDS = 4096
# Files and characters of a passage that the result shows.
_FILES, _PASSAGE_CHARS = 10, 120
_TRIAL_BATCHES = 8
_TRIAL_SECONDS = 20.0
# Offsets of four string columns, one of eight bytes; chunks have three more columns.
_ROW_BYTES, _CHUNK_ROW_BYTES = 20, 12
# Measured with 100,000 and 1,000,000 documents by the build benchmark.
_STAGING_BYTES = 60e6
_BASE_BYTES = 120e6
_TRAINING_ROWS = 100_000
# One shard is read, one encoded and one written at the same time.
_SHARDS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read of files: bytes of JSONL, rows of Parquet, records of other formats."""

    units: int  # size of all files
    read: int  # size of what was read
    records: list[Document | Reject]
    first_reject: str = ""


@dataclass(frozen=True, slots=True)
class EncodingRate:
    """Speed of an encoder."""

    tokens: float  # tokens per second and device
    device: str  # name of a device, as in "GPU"
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated size of a build; sizes in bytes."""

    is_whole: bool  # whether the sample is the whole corpus
    sampled: int  # documents in the sample
    rejected: int  # records in the sample
    documents: int
    rows: int  # documents or, with chunking, chunks
    tokens: int  # tokens to encode, without deduplication of texts
    truncated: float  # share of texts that exceed the encoder's maximum length
    store: StoreName
    factory: str
    shards: float  # size of the shards in the build folder
    documents_file: float  # size of `documents.arrow`
    vectors_file: float  # size of `vectors.faiss` or of the vectors in Milvus
    memory: dict[str, float]  # peak memory of each phase without the encoder
    read: tuple[str, ...] = ()  # how files of other formats are read
    passages: tuple[Document, ...] = ()  # of these files, the first, a middle and the last one
    first_reject: str = ""  # of these files, with its place


class CorpusSample:
    """A sample of a corpus, whose long documents the chunker splits, if there is one."""

    def __init__(self, options: BuildOptions, chunker: Chunker | None) -> None:
        self._options = options
        self._chunker = chunker
        limit = max_text_chars(chunked=chunker is not None)
        warn_about_unread(options.corpus)
        self._reports: list[Report] = []
        self._samples = sample_corpus(
            corpus_files(options.corpus), limit, options.reading, self._reports.append
        )
        self._rows = [self._chunks(sample.records) for sample in self._samples]
        if not self.texts:
            raise CorpusError(
                f"{options.corpus}: all sampled records are rejected", code="empty_corpus"
            )

    def _chunks(self, records: Iterable[Document | Reject]) -> list[Document]:
        found = (split_record(record, self._chunker) for record in records)
        return [row for rows in found if not isinstance(rows, Reject) for row in rows]

    @property
    def texts(self) -> list[str]:
        """The sampled texts to encode, in the order of the corpus."""
        return [_text(row) for rows in self._rows for row in rows]

    def estimate(self, count: TokenCounter, dimension: int) -> Estimate:
        """Estimates the size of the build; `count` counts the tokens of texts."""
        counts = [_count(rows, count) for rows in self._rows]
        shares = [sample.units / sample.read for sample in self._samples]
        documents, number, tokens, _, text = (
            round(sum(share * n for share, n in zip(shares, column, strict=True)))
            for column in zip(*counts, strict=True)
        )
        sampled, rows, _, truncated, _ = map(sum, zip(*counts, strict=True))
        store = self._options.store
        factory = self._options.factory or default_factory(store, number, dimension, number)
        check_factory(store, factory, dimension, number)
        vectors_file = index_bytes(factory, number, dimension)
        row_bytes = _ROW_BYTES + (_CHUNK_ROW_BYTES if self._chunker else 0)
        return Estimate(
            is_whole=max(shares) <= 1,
            sampled=sampled,
            rejected=sum(len(sample.records) for sample in self._samples) - sampled,
            documents=documents,
            rows=number,
            tokens=tokens,
            truncated=truncated / rows,
            store=store,
            factory=factory,
            shards=4.0 * number * dimension,
            documents_file=float(text + row_bytes * number),
            vectors_file=vectors_file,
            memory=self._memory(factory, number, dimension, vectors_file, text),
            read=tuple(map(str, self._reports)),
            passages=self._passages() if self._reports else (),
            first_reject=next(filter(None, (s.first_reject for s in self._samples)), ""),
        )

    def _passages(self) -> tuple[Document, ...]:
        rows = self._rows[-1]
        return tuple(rows[at] for at in sorted({0, len(rows) // 2, len(rows) - 1}))

    def _memory(
        self, factory: str, rows: int, dimension: int, vectors_file: int, text_bytes: int
    ) -> dict[str, float]:
        shard = self._options.shard_size * (4 * dimension + 2 * text_bytes / max(rows, 1))
        bound = self._options.memory_gib * 2**30
        index = 0.0 if self._options.store == "milvus" else float(vectors_file)
        if index and factory.startswith("IVF"):
            # The buffers of inverted lists grow by doubling; the lists are trained on a sample.
            sampled = 4 * dimension * min(rows, _TRAINING_ROWS)
            index = min(2 * max(vectors_file, sampled), bound)
        return {
            "staging": _BASE_BYTES + _STAGING_BYTES,
            "encoding": _BASE_BYTES + _SHARDS * shard,
            "the index build": _BASE_BYTES + index,
        }


def sample_corpus(
    files: Sequence[Path],
    max_chars: int,
    reading: Reading | None = None,
    report: Callable[[Report], None] = lambda _: None,
) -> list[Sample]:
    """Reads a sample of about 4 MiB of JSONL, 4096 rows of Parquet, 4096 records of other files.

    A text has at most `max_chars` characters; `report` takes how the other files are read.
    """
    reading = reading or Reading()
    lines, tables, others = list[Path](), list[Path](), list[Path]()
    for file in files:
        is_other = not has_corpus_fields(file, reading)
        (others if is_other else tables if file.suffix == PARQUET else lines).append(file)
    try:
        samples = [
            _sample_lines(lines, max_chars),
            _sample_rows(tables, max_chars),
            _sample_others(others, max_chars, reading, report),
        ]
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise CorpusError(f"the corpus cannot be read: {reason}", code="unreadable") from error
    return [sample for sample in samples if sample.read]


def measure_rate(
    encoder: Encoder, texts: Sequence[str], batch_size: int, devices: int, name: str
) -> EncodingRate:
    """Measures the speed of an encoder with evenly spaced texts, in batches of similar length.

    If there are several batches, the first is also encoded before the measurement, as a warm-up.
    `devices` is the number of GPUs that the encoder uses, 1 for a processor or a server, and
    `name` the backend that the result names.
    """
    number = min(len(texts), _TRIAL_BATCHES * batch_size)
    chosen = [texts[i * len(texts) // number] for i in range(number)]
    chosen.sort(key=len, reverse=True)
    batches = [chosen[at : at + batch_size] for at in range(0, number, batch_size)]
    # Alternate between long and short batches: the time limit can end the measurement early.
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
    return EncodingRate(tokens / seconds / devices, "device", source)


def format_estimate(estimate: Estimate, rate: EncodingRate) -> list[str]:
    rows = f" in {estimate.rows:,} chunks" if estimate.rows != estimate.documents else ""
    read = "the whole corpus" if estimate.is_whole else f"a sample of {estimate.sampled:,}"
    hours = estimate.tokens / rate.tokens / 3600
    builds = _size(estimate.shards + estimate.documents_file)
    phase, memory = max(estimate.memory.items(), key=itemgetter(1))
    documents = f"documents.arrow {_size(estimate.documents_file)}"
    vectors = f"{_size(estimate.vectors_file)} ({estimate.factory})"
    if estimate.store == "milvus":
        version = f"in Milvus: vectors {vectors}, documents {_size(estimate.documents_file)}"
    else:
        total_size = _size(estimate.vectors_file + estimate.documents_file)
        version = f"{total_size}: vectors.faiss {vectors}, {documents}"
    return [
        *_shown_passages(estimate),
        f"corpus  {estimate.documents:,} documents{rows}, estimated from {read}; "
        f"{estimate.rejected:,} of its records are rejected",
        *([f"        first  {estimate.first_reject}"] if estimate.first_reject else []),
        f"tokens  {estimate.tokens:,}: {estimate.tokens / estimate.rows:,.1f} per text; "
        f"{estimate.truncated:.1%} of texts are truncated at the encoder's maximum length",
        f"time    {hours:,.3g} {rate.device} hours at {rate.tokens:,.0f} tokens/s per "
        f"{rate.device}, {rate.source}",
        f"disk    builds {builds}: shards {_size(estimate.shards)}, {documents}",
        f"        version {version}",
        f"memory  peak of {_size(memory)} during {phase}, without the encoder",
        "        nothing was written; duplicate texts and the size of filters are not considered",
    ]


def _shown_passages(estimate: Estimate) -> Iterator[str]:
    for report in estimate.read[:_FILES]:
        yield f"read    {report}"
    if (more := len(estimate.read) - _FILES) > 0:
        yield f"        and {more:,} more files or tables"
    for passage in estimate.passages:
        text = normalize_text(passage.text)
        yield f"passage {passage.id}  {passage.title}"
        yield f"        {text[:_PASSAGE_CHARS]}{' …' if len(text) > _PASSAGE_CHARS else ''}"
        if passage.metadata:
            yield f"        {json.dumps(passage.metadata, ensure_ascii=False)[:_PASSAGE_CHARS]}"


def _size(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _count(rows: Sequence[Document], count: TokenCounter) -> tuple[int, int, int, int, int]:
    """Returns documents, rows, tokens, truncated texts and bytes of text."""
    counted = count([_text(row) for row in rows]) if rows else []
    return (
        len({row.parent or row.id for row in rows}),
        len(rows),
        sum(tokens for tokens, _ in counted),
        sum(truncated for _, truncated in counted),
        sum(map(_stored_bytes, rows)),
    )


def _text(row: Document) -> str:
    return document_text(row.title, row.text)


def _stored_bytes(row: Document) -> int:
    metadata = json.dumps(row.metadata, ensure_ascii=False)
    columns = (row.id, row.title, row.text, metadata, row.parent or "")
    return sum(len(column.encode()) for column in columns)


def _sample_lines(files: Sequence[Path], max_chars: int) -> Sample:
    sizes = [_size_of_lines(file) for file in files]
    units = sum(sizes)
    if units <= _BLOCKS * _BLOCK_BYTES:
        starts = list(range(0, units, _BLOCK_BYTES))
    else:
        starts = [block * units // _BLOCKS for block in range(_BLOCKS)]
    blocks = [(start, min(start + _BLOCK_BYTES, units)) for start in starts]
    records: list[Document | Reject] = []
    # A block can span several files. In each file blocks are read in ascending order, because a
    # compressed file can be read forwards only.
    for file, size, base in zip(files, sizes, accumulate(sizes, initial=0), strict=False):
        ranges = ((max(start - base, 0), min(end - base, size)) for start, end in blocks)
        if chosen := [(first, last) for first, last in ranges if first < last]:
            with open_lines(file) as opened:
                for first, last in chosen:
                    records += read_byte_range(opened, first, last, max_chars)
    return Sample(units, sum(end - start for start, end in blocks), records)


def _sample_others(
    files: list[Path], max_chars: int, reading: Reading, report: Callable[[Report], None]
) -> Sample:
    """Keeps evenly spaced records: every second one, then every fourth, as more are read."""
    kept: list[Document | Reject] = []
    step, number, first_reject = 1, 0, ""
    for number, (place, record) in enumerate(
        read_corpus(files, max_chars, reading=reading, report=report), start=1
    ):
        if isinstance(record, Reject):
            first_reject = first_reject or f"{place}: {record.reason}"
        if number % step == 0:
            kept.append(record)
        if len(kept) == 2 * _RECORDS:
            kept, step = kept[1::2], 2 * step
    return Sample(number, len(kept), kept, first_reject)


def _size_of_lines(file: Path) -> int:
    """Returns the size of a JSONL file [bytes], decompressed."""
    with open_lines(file) as opened:
        return opened.seek(0, os.SEEK_END)


def _sample_rows(files: Sequence[Path], max_chars: int) -> Sample:
    groups = []
    for file in files:
        metadata = pq.read_metadata(file)
        groups += [
            (file, group, metadata.row_group(group).num_rows)
            for group in range(metadata.num_row_groups)
        ]
    units = sum(rows for _, _, rows in groups)
    if units <= _GROUPS * _GROUP_BLOCKS * _BLOCK_ROWS:
        chosen = [(file, group, slice(0, None)) for file, group, _ in groups]
    else:
        number = min(len(groups), _GROUPS)
        most = _GROUPS * _GROUP_BLOCKS // number
        chosen = []
        for i in range(number):
            file, group, rows = groups[(2 * i + 1) * len(groups) // (2 * number)]
            # Evenly spaced blocks of the group, with a different offset in each group.
            step = -(-rows // (_BLOCK_ROWS * most))
            chosen.append((file, group, slice(i * step // number, None, step)))
    records = [
        record
        for file, group, batches in chosen
        for block in read_row_group(file, group, _BLOCK_ROWS, batches, max_chars)
        for record in block
    ]
    return Sample(units, len(records), records)
