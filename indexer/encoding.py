"""Second pass of a build: texts to vectors, shard by shard, resumable.

The next shard is read, the next batch tokenised and the last shard written while the encoder
works. Whatever the size of the corpus, three shards are in memory.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.documents import DocumentReader
from core.errors import VectorError
from core.shards import ShardRecord, whole_shards, write_shard
from core.text import document_text
from core.types import Encoder, Encoding, FloatArray, QueryEncoder
from indexer.isolation import FAILURES, Isolated, Isolator
from indexer.pipeline import WorkClock, ahead
from indexer.progress import progress_bar
from indexer.staging import unique_text_rows

# For n texts: bool [n], which of them are known; and float32 [known, dimension], their vectors.
Reuse = Callable[[Sequence[str]], tuple[NDArray[np.bool_], FloatArray]]


@runtime_checkable
class PipelinedEncoder(QueryEncoder, Protocol):
    """An encoder whose tokenising can overlap its encoding.

    Attributes:
        concurrent_calls: Calls of `encode_tokens` that keep it at work without a gap; with
            more than one they come from as many threads.
    """

    concurrent_calls: int


@dataclass(frozen=True, slots=True)
class EncodingSummary:
    """What the second pass did; all but new texts and seconds counts resumed shards too.

    Attributes:
        texts: Different texts of the corpus.
        new_texts: Texts that were encoded.
        resumed_texts: Texts of shards that were there.
        reused_texts: Texts whose vectors were known.
        tokens: Tokens that were encoded.
        truncated: Texts that were longer than the encoder reads.
        seconds: Wall time of the pass.
        encoder_seconds: The part of it in which at least one call of the encoder was running.
        refused: Of texts that cannot be encoded, by their number, the reasons.
    """

    texts: int
    new_texts: int
    resumed_texts: int
    reused_texts: int
    tokens: int
    truncated: int
    seconds: float
    encoder_seconds: float
    refused: dict[int, str] = field(default_factory=dict)


def encode_corpus(
    folder: Path,
    encoder: Encoder,
    *,
    shard_size: int,
    batch_size: int,
    progress: bool,
    reuse: Reuse | None = None,
    max_refused: int = 0,
) -> EncodingSummary:
    """Encodes the unique texts of a staged corpus into shards, from the first missing one.

    Inside a shard texts are sorted by length, so that batches hold little padding. Batches
    depend on the shard alone: a resumed run computes what an unbroken one would have.
    Texts that `reuse` knows are not encoded. A batch at which the encoder fails is encoded
    again and, if it fails again, without the texts that it fails at; their rows are zero.

    Args:
        folder: The build folder.
        encoder: Encodes the texts.
        shard_size: Texts in a shard.
        batch_size: Texts in a batch.
        progress: Whether to show a bar.
        reuse: Finds vectors that need not be computed again, or None.
        max_refused: Texts that the encoder may fail at.

    Raises:
        CareError: If the encoder fails at any text.
        VectorError: If it fails at too many, or returns vectors that are not finite and of
            unit norm.
    """
    started = time.perf_counter()
    records = whole_shards(folder)
    resumed = sum(record.rows for record in records)
    count = len(unique_text_rows(folder))
    calls = encoder.concurrent_calls if isinstance(encoder, PipelinedEncoder) else 1
    with (
        # The reader, the tokeniser, the writer, and calls of the encoder.
        ThreadPoolExecutor(3 + calls) as pool,
        progress_bar("encode", show=progress, total=count, initial=resumed) as bar,
    ):
        encoding = _Encoding(encoder, pool, calls)
        writer = _Writer(folder, shard_size, records, pool)
        shards = ahead(_read(folder, resumed, shard_size, encoder.spec.dimension, reuse), pool)
        batches = ahead(_batches(shards, batch_size, encoder), pool)
        for batch, found in encoding.results(batches):
            _fill(batch, found)
            shard = batch.shard
            bar.update(len(batch.positions))
            if found.refused:
                check_refused(records, shard.ids, shard.refused, max_refused)
            if batch.is_last:
                bar.update(shard.reused)
                writer.write(shard)
            elapsed = time.perf_counter() - started
            bar.set_postfix_str(f"{encoding.tokens / elapsed:,.0f} tokens/s", refresh=False)
        writer.end()
    return EncodingSummary(
        texts=count,
        new_texts=encoding.texts,
        resumed_texts=resumed,
        reused_texts=sum(record.reused for record in records),
        tokens=sum(record.tokens for record in records),
        truncated=sum(record.truncated for record in records),
        seconds=time.perf_counter() - started,
        encoder_seconds=encoding.clock.seconds,
        refused=refused_texts(records, shard_size),
    )


def refused_texts(records: Sequence[ShardRecord], shard_size: int) -> dict[int, str]:
    """Returns by the number of the text why it cannot be encoded."""
    return {
        record.shard * shard_size + row: reason
        for record in records
        for row, reason in record.refused.items()
    }


@dataclass(slots=True)
class _Shard:
    """A shard in work; vectors are float32 [texts, dimension], `order` are those to encode."""

    start: int
    ids: list[str]
    texts: list[str]
    vectors: FloatArray
    order: list[int]
    reused: int
    tokens: int = 0
    truncated: int = 0
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch:
    """Texts of a shard that are encoded together, none if the shard has no new ones."""

    shard: _Shard
    positions: list[int]
    texts: list[str]
    tokens: Sequence[Any] | None
    is_last: bool


def _read(
    folder: Path, resumed: int, shard_size: int, dimension: int, reuse: Reuse | None
) -> Iterator[_Shard]:
    reader = DocumentReader(folder / documents.FILE_NAME)
    rows = unique_text_rows(folder)
    for start in range(resumed, len(rows), shard_size):
        found = [reader[int(row)] for row in rows[start : start + shard_size]]
        texts = [document_text(d.title, d.text) for d in found]
        vectors = np.zeros((len(texts), dimension), dtype=np.float32)
        known = np.zeros(len(texts), dtype=np.bool_)
        if reuse:
            known, vectors_known = reuse(texts)
            vectors[known] = vectors_known
        order = [int(i) for i in np.flatnonzero(~known)]
        order.sort(key=lambda i: len(texts[i]), reverse=True)
        yield _Shard(start, [d.id for d in found], texts, vectors, order, int(known.sum()))


def _batches(shards: Iterator[_Shard], size: int, encoder: Encoder) -> Iterator[_Batch]:
    tokenize = encoder.tokenize if isinstance(encoder, PipelinedEncoder) else None
    for shard in shards:
        for at in range(0, len(shard.order), size) or (0,):
            positions = shard.order[at : at + size]
            texts = [shard.texts[i] for i in positions]
            tokens = tokenize(texts) if tokenize and texts else None
            yield _Batch(shard, positions, texts, tokens, at + size >= len(shard.order))


class _Encoding:
    """Calls of the encoder, several at once if that keeps it at work, and what they add up to."""

    def __init__(self, encoder: Encoder, pool: ThreadPoolExecutor, calls: int) -> None:
        self._encoder = encoder
        self._pool = pool
        self._calls = calls
        self._isolator = Isolator(self._encode)
        self.clock = WorkClock()
        self.texts = self.tokens = 0

    def results(self, batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, Isolated]]:
        """Yields each batch, in order, with what became of its texts."""
        pending: deque[tuple[_Batch, Future[Encoding] | None]] = deque()
        for batch in batches:
            pending.append((batch, self._start(batch)))
            if len(pending) == self._calls:
                yield self._end(pending)
        while pending:
            yield self._end(pending)

    def _start(self, batch: _Batch) -> "Future[Encoding] | None":
        if not batch.positions:
            return None
        if self._calls > 1:
            return self._pool.submit(self._encode_batch, batch)
        # In this thread, which an interrupt reaches.
        done: Future[Encoding] = Future()
        try:
            done.set_result(self._encode_batch(batch))
        except FAILURES as error:
            done.set_exception(error)
        return done

    def _end(
        self, pending: "deque[tuple[_Batch, Future[Encoding] | None]]"
    ) -> tuple[_Batch, Isolated]:
        batch, future = pending.popleft()
        if not future:
            return batch, Isolated()
        try:
            found = Isolated([(list(range(len(batch.texts))), future.result())])
            self._isolator.works()
        except FAILURES as error:
            # Another call could be what fails.
            wait([other for _, other in pending if other])
            found = self._isolator.encode(batch.texts, error)
        self.texts += sum(len(positions) for positions, _ in found.parts)
        self.tokens += sum(int(encoding.token_counts.sum()) for _, encoding in found.parts)
        return batch, found

    def _encode_batch(self, batch: _Batch) -> Encoding:
        if batch.tokens is None or not isinstance(self._encoder, PipelinedEncoder):
            return self._encode(batch.texts)
        with self.clock.running():
            return self._encoder.encode_tokens(batch.tokens)

    def _encode(self, texts: Sequence[str]) -> Encoding:
        with self.clock.running():
            return self._encoder.encode(texts)


def _fill(batch: _Batch, found: Isolated) -> None:
    """Puts what became of a batch into its shard."""
    shard = batch.shard
    for positions, encoding in found.parts:
        rows = [batch.positions[i] for i in positions]
        _check(encoding.vectors, shard.vectors.shape[1], [shard.ids[row] for row in rows])
        shard.vectors[rows] = encoding.vectors
        shard.tokens += int(encoding.token_counts.sum())
        shard.truncated += int(encoding.truncated.sum())
    for position, reason in found.refused.items():
        shard.refused[batch.positions[position]] = reason


def check_refused(
    records: Sequence[ShardRecord], ids: Sequence[str], refused: Mapping[int, str], most: int
) -> None:
    """Checks how many texts cannot be encoded.

    Args:
        records: The whole shards.
        ids: The documents of the shard in work.
        refused: Of its rows that cannot be encoded, the reasons.
        most: How many may be left out.

    Raises:
        VectorError: If there are more.
    """
    count = len(refused) + sum(len(record.refused) for record in records)
    if refused and count > most:
        row, reason = list(refused.items())[-1]
        raise VectorError(
            f"document '{ids[row]}': {reason}; texts that cannot be encoded: {count}, "
            f"allowed {max(most, 0)} (--max-reject-rate)"
        )


class _Writer:
    """Writes one shard at a time, in order, in a thread of the pool."""

    def __init__(
        self, folder: Path, size: int, records: list[ShardRecord], pool: ThreadPoolExecutor
    ) -> None:
        self._folder = folder
        self._size = size
        self._records = records
        self._pool = pool
        self._writing: Future[ShardRecord] | None = None

    def write(self, shard: _Shard) -> None:
        """Begins to write a shard, when the one before is whole."""
        self.end()
        self._writing = self._pool.submit(
            write_shard,
            self._folder,
            shard.start // self._size,
            shard.vectors,
            shard.ids,
            tokens=shard.tokens,
            truncated=shard.truncated,
            reused=shard.reused,
            refused=shard.refused,
        )

    def end(self) -> None:
        """Waits for the shard that is being written, and notes it."""
        if self._writing:
            self._records.append(self._writing.result())
            self._writing = None


def _check(vectors: FloatArray, dimension: int, ids: list[str]) -> None:
    if vectors.shape != (len(ids), dimension):
        raise VectorError(
            f"the encoder returned an array of shape {vectors.shape} for {len(ids)} documents "
            f"from '{ids[0]}' on, instead of {dimension} dimensions each"
        )
    norms = np.linalg.norm(vectors, axis=1)
    bad = ~(np.abs(norms - 1) < 1e-3)
    if bad.any():
        raise VectorError(
            f"the encoder returned a vector of norm {norms[bad.argmax()]} "
            f"for document '{ids[int(bad.argmax())]}'"
        )
