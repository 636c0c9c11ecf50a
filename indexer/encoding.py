"""Second pass of a build: texts to vectors, shard by shard, resumable.

The next shard is read and the last one written while an executor encodes; the local one also
tokenises the next batch meanwhile. Whatever the size of the corpus, few shards are in memory.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoder, Encoding, QueryEncoder
from core.errors import VectorError
from core.progress import progress_bar
from core.shards import ShardRecord, whole_shards, write_shard
from core.text import document_text
from core.types import FloatArray
from indexer.failures import FAILURES, Isolated, Isolator
from indexer.staging import unique_text_rows

T = TypeVar("T")

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


@dataclass(slots=True)
class Shard:
    """Texts of the corpus and what has been encoded of them.

    Attributes:
        number: Its number, from 0.
        ids: Of each text the id of the first document with it.
        texts: The texts, after the text rules.
        vectors: float32 [texts, dimension], zero where a text is not encoded.
        new: Rows to encode, the longest text first; the vectors of the others are known.
        tokens: Tokens that were encoded.
        truncated: Texts that were longer than the encoder reads.
        failed: Of rows that cannot be encoded, the reasons.
    """

    number: int
    ids: list[str]
    texts: list[str]
    vectors: FloatArray
    new: list[int]
    tokens: int = 0
    truncated: int = 0
    failed: dict[int, str] = field(default_factory=dict)


# Called with a shard whose failures may be new, and the texts and tokens encoded since.
Report = Callable[[Shard, int, int], None]


class Executor(Protocol):
    """What runs the document encoder over shards."""

    @property
    def encoder_seconds(self) -> float:
        """Time in which the encoder was running [s], of several its mean."""
        ...

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Yields the shards in order, encoded; batches depend on the shard alone."""
        ...


@dataclass(frozen=True, slots=True)
class EncodingSummary:
    """What the second pass did; all but new texts and seconds counts resumed shards too.

    Attributes:
        new_texts: Texts that were encoded.
        resumed_texts: Texts of shards that existed.
        reused_texts: Texts whose vectors were known.
        tokens, truncated: As of a shard.
        seconds: Wall time of the pass.
        encoder_seconds: The part of it in which at least one call of the encoder was running.
        failed: Of texts that cannot be encoded, by their number, the reasons.
    """

    new_texts: int
    resumed_texts: int
    reused_texts: int
    tokens: int
    truncated: int
    seconds: float
    encoder_seconds: float
    failed: dict[int, str]


def encode_corpus(
    folder: Path,
    dimension: int,
    executor: Executor,
    *,
    shard_size: int,
    progress: bool,
    reuse: Reuse | None = None,
    max_failed: int = 0,
) -> EncodingSummary:
    """Encodes the unique texts of a staged corpus into shards, from the first missing one.

    Inside a shard texts are encoded by length, so that batches hold little padding. Batches
    depend on the shard alone: a resumed run computes what an uninterrupted one would have.
    Texts that `reuse` knows are not encoded. Rows of texts that cannot be encoded are zero.

    Raises:
        CareError: If the encoder fails at any text.
        VectorError: If it fails at more than `max_failed`, or returns vectors that are not finite
            and of unit norm.
    """
    started = time.perf_counter()
    records = whole_shards(folder)
    resumed = sum(record.rows for record in records)
    total = len(unique_text_rows(folder))
    new_texts = tokens = 0

    def report(shard: Shard, texts: int, more_tokens: int) -> None:
        nonlocal tokens
        tokens += more_tokens
        bar.update(texts)
        rate = tokens / (time.perf_counter() - started)
        bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        failed = len(shard.failed) + sum(len(record.failed) for record in records)
        if shard.failed and failed > max_failed:
            row, reason = list(shard.failed.items())[-1]
            id_, allowed = shard.ids[row], max(max_failed, 0)
            message = (
                f"document '{id_}': {reason}; texts that cannot be encoded: {failed}, "
                f"allowed {allowed} (--max-reject-rate)"
            )
            raise VectorError(
                message, code="too_many_failures", id=id_, count=failed, allowed=allowed
            )

    with (
        # One reads shards, one writes them.
        ThreadPoolExecutor(2) as pool,
        progress_bar("encode", show=progress, total=total, initial=resumed) as bar,
    ):
        writing: Future[ShardRecord] | None = None
        shards = ahead(_read(folder, resumed, shard_size, dimension, reuse), pool)
        for shard in executor.encode(shards, report):
            bar.update(len(shard.texts) - len(shard.new))
            new_texts += len(shard.new) - len(shard.failed)
            if writing:
                records.append(writing.result())
            writing = pool.submit(
                write_shard,
                folder,
                shard.number,
                shard.vectors,
                shard.ids,
                tokens=shard.tokens,
                truncated=shard.truncated,
                reused=len(shard.texts) - len(shard.new),
                failed=shard.failed,
            )
        if writing:
            records.append(writing.result())
    return EncodingSummary(
        new_texts=new_texts,
        resumed_texts=resumed,
        reused_texts=sum(record.reused for record in records),
        tokens=sum(record.tokens for record in records),
        truncated=sum(record.truncated for record in records),
        seconds=time.perf_counter() - started,
        encoder_seconds=executor.encoder_seconds,
        failed={
            record.shard * shard_size + row: reason
            for record in records
            for row, reason in record.failed.items()
        },
    )


def _read(
    folder: Path, resumed: int, shard_size: int, dimension: int, reuse: Reuse | None
) -> Iterator[Shard]:
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
        new = [int(i) for i in np.flatnonzero(~known)]
        new.sort(key=lambda i: len(texts[i]), reverse=True)
        yield Shard(start // shard_size, [d.id for d in found], texts, vectors, new)


@dataclass(slots=True)
class _Batch:
    """Rows of a shard that are encoded together, none if the shard has no new ones."""

    shard: Shard
    rows: list[int]
    texts: list[str]
    work: Callable[[], Encoding]
    is_last: bool
    future: Future[Encoding] | None = None


class LocalExecutor:
    """Encodes in this process, in batches of `batch_size` texts.

    A batch at which the encoder fails is encoded again and, if it fails again, without the texts
    that it fails at. Encoders that ask for it get several calls at once.
    """

    def __init__(self, encoder: Encoder, batch_size: int) -> None:
        self._encoder = encoder
        self._pipelined = encoder if isinstance(encoder, PipelinedEncoder) else None
        self._calls = self._pipelined.concurrent_calls if self._pipelined else 1
        self._batch_size = batch_size
        self._isolator = Isolator(lambda texts: self._run(partial(encoder.encode, texts)))
        self._clock = WorkClock()

    @property
    def encoder_seconds(self) -> float:
        """Time in which at least one call of the encoder was running [s]."""
        return self._clock.seconds

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Yields the shards in order, encoded; reports after each batch."""
        # One tokenises, the others call the encoder.
        with ThreadPoolExecutor(1 + self._calls) as pool:
            pending: deque[_Batch] = deque()
            for batch in ahead(self._batches(shards), pool):
                if batch.rows:
                    batch.future = self._start(batch.work, pool)
                pending.append(batch)
                if len(pending) == self._calls:
                    yield from self._end(pending, report)
            while pending:
                yield from self._end(pending, report)

    def _batches(self, shards: Iterator[Shard]) -> Iterator[_Batch]:
        size = self._batch_size
        for shard in shards:
            for at in range(0, len(shard.new), size) or (0,):
                rows = shard.new[at : at + size]
                texts = [shard.texts[row] for row in rows]
                work = partial(self._encoder.encode, texts)
                if self._pipelined and texts:
                    tokens = self._pipelined.tokenize(texts)
                    work = partial(self._pipelined.encode_tokens, tokens)
                yield _Batch(shard, rows, texts, work, at + size >= len(shard.new))

    def _start(self, work: Callable[[], Encoding], pool: Threads) -> Future[Encoding]:
        if self._calls > 1:
            return pool.submit(self._run, work)
        # In this thread, which an interrupt reaches.
        done: Future[Encoding] = Future()
        try:
            done.set_result(self._run(work))
        except FAILURES as error:
            done.set_exception(error)
        return done

    def _run(self, work: Callable[[], Encoding]) -> Encoding:
        with self._clock.running():
            return work()

    def _end(self, pending: deque[_Batch], report: Report) -> Iterator[Shard]:
        """Waits for the first batch and yields its shard if that is complete."""
        batch = pending.popleft()
        shard = batch.shard
        if batch.future:
            try:
                found = Isolated([(list(range(len(batch.texts))), batch.future.result())])
                self._isolator.succeeded()
            except FAILURES as error:
                # Another call could be what fails.
                wait([other.future for other in pending if other.future])
                found = self._isolator.encode(batch.texts, error)
            before = shard.tokens
            for positions, encoding in found.parts:
                rows = [batch.rows[i] for i in positions]
                _check(encoding.vectors, shard.vectors.shape[1], [shard.ids[row] for row in rows])
                shard.vectors[rows] = encoding.vectors
                shard.tokens += int(encoding.token_counts.sum())
                shard.truncated += int(encoding.truncated.sum())
            shard.failed |= {batch.rows[i]: reason for i, reason in found.failed.items()}
            report(shard, len(batch.rows), shard.tokens - before)
        if batch.is_last:
            yield shard


def _check(vectors: FloatArray, dimension: int, ids: list[str]) -> None:
    if vectors.shape != (len(ids), dimension):
        raise VectorError(
            f"the encoder returned an array of shape {vectors.shape} for {len(ids)} documents "
            f"from '{ids[0]}' on, instead of {dimension} dimensions each",
            code="wrong_shape",
            id=ids[0],
        )
    norms = np.linalg.norm(vectors, axis=1)
    bad = ~(np.abs(norms - 1) < 1e-3)
    if bad.any():
        row = int(bad.argmax())
        message = f"the encoder returned a vector of norm {norms[row]} for document '{ids[row]}'"
        raise VectorError(message, code="not_unit_norm", id=ids[row])


def ahead(items: Iterator[T], pool: Threads) -> Iterator[T]:
    """Yields items, none of them None, each of which `pool` makes while the one before is in use.

    The items are made one at a time; an error is raised at its item's turn.
    """
    coming = pool.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = pool.submit(next, items, None)
        yield item


class WorkClock:
    """The time in which at least one call was running; calls may come from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of the block."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self.seconds += time.perf_counter() - self._since
