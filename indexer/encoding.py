"""Second pass of a build: encodes the staged texts into shards; resumable.

While an executor encodes a shard, one thread reads the next shard and another writes the previous
one; the local executor also tokenizes the next batch. Only a few shards are in memory at a time.
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
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoder, Encoding, QueryEncoder
from core.errors import VectorError
from core.progress import progress_bar
from core.shards import ShardRecord, complete_shards, write_shard
from core.text import document_text
from core.types import FloatArray
from indexer.failures import ENCODING_ERRORS, FailureIsolator, IsolationResult
from indexer.staging import unique_text_rows

T = TypeVar("T")


class Known(NamedTuple):
    """What is known of n texts."""

    found: NDArray[np.bool_]  # bool [n]
    vectors: FloatArray  # of the known ones, float32 [known, dimension]
    token_vectors: Sequence[NDArray[np.uint8]] = ()  # theirs, [tokens, bytes] each; empty if none


VectorCache = Callable[[Sequence[str]], Known]


@runtime_checkable
class PipelinedEncoder(QueryEncoder, Protocol):
    """An encoder whose tokenization can run in parallel to encoding."""

    # Number of concurrent calls of `encode_tokens` that use the encoder fully; each is made from
    # its own thread.
    concurrent_calls: int


@dataclass(slots=True)
class Shard:
    """Texts of the corpus and their vectors."""

    number: int
    ids: list[str]  # id of the first document with each text
    texts: list[str]  # normalised texts
    vectors: FloatArray  # float32 [texts, dimension], zero for texts that are not encoded
    new: list[int]  # rows to encode, the longest text first; the vectors of other rows are known
    tokens: int = 0
    truncated: int = 0  # number of texts that exceeded the encoder's maximum length
    # Reason for each row that cannot be encoded.
    failed: dict[int, str] = field(default_factory=dict)
    # Token vectors of the rows that have any, uint8 [tokens, bytes].
    token_vectors: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def all_token_vectors(self) -> list[NDArray[np.uint8]] | None:
        """Returns the token vectors of each row, none for failed ones; None if no row has any."""
        if not self.token_vectors:
            return None
        nothing = next(iter(self.token_vectors.values()))[:0]
        return [self.token_vectors.get(row, nothing) for row in range(len(self.texts))]


# Called during encoding with the shard, and the texts and tokens encoded since the last call.
Report = Callable[[Shard, int, int], None]


class Executor(Protocol):
    """Runs the document encoder over shards."""

    @property
    def encoder_seconds(self) -> float:
        """Time in which the encoder was busy [s]; the mean of several encoders."""
        ...

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Encodes shards and yields them in order; batches must depend only on the shard."""
        ...


@dataclass(frozen=True, slots=True)
class EncodingSummary:
    """Result of the second pass.

    Resumed shards are included, except in `new_texts`, `seconds` and `encoder_seconds`.
    """

    new_texts: int
    resumed_texts: int  # texts in shards of an earlier run
    reused_texts: int  # texts with known vectors
    tokens: int
    truncated: int  # texts that exceeded the encoder's maximum length
    seconds: float  # wall time of the pass [s]
    encoder_seconds: float  # time in which the encoder was busy [s]
    failed: dict[int, str]  # reason for each text that cannot be encoded, by number of the text


def encode_corpus(
    folder: Path,
    dimension: int,
    executor: Executor,
    *,
    shard_size: int,
    progress: bool,
    vector_cache: VectorCache | None = None,
    max_failed: int = 0,
) -> EncodingSummary:
    """Encodes the unique texts of a staged corpus into shards, starting at the first missing one.

    Texts of a shard are encoded in order of length, so that batches have little padding. Batches
    depend only on the shard, so a resumed run computes the same vectors as an uninterrupted one.
    Texts with vectors in `vector_cache` are not encoded. Vectors of failed texts are zero.

    Args:
        folder: The build folder with the staged corpus.
        vector_cache: Returns known vectors of texts, or None.

    Raises:
        CareError: If the encoder fails for every text.
        VectorError: If more than `max_failed` texts fail, or vectors are not finite or not of
            unit norm.
    """
    started = time.perf_counter()
    records = complete_shards(folder)
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
                f"document '{id_}': {reason}; {failed} texts cannot be encoded, {allowed} are "
                "allowed (--max-reject-rate)"
            )
            raise VectorError(
                message, code="too_many_failures", id=id_, count=failed, allowed=allowed
            )

    with (
        # One thread reads shards, one writes them.
        ThreadPoolExecutor(2) as pool,
        progress_bar("encode", show=progress, total=total, initial=resumed) as bar,
    ):
        writing: Future[ShardRecord] | None = None
        shards = prefetch(_read(folder, resumed, shard_size, dimension, vector_cache), pool)
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
                token_vectors=shard.all_token_vectors(),
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
    folder: Path, resumed: int, shard_size: int, dimension: int, vector_cache: VectorCache | None
) -> Iterator[Shard]:
    reader = DocumentReader(folder / documents.FILE_NAME)
    rows = unique_text_rows(folder)
    for start in range(resumed, len(rows), shard_size):
        found = [reader[int(row)] for row in rows[start : start + shard_size]]
        texts = [document_text(d.title, d.text) for d in found]
        vectors = np.zeros((len(texts), dimension), dtype=np.float32)
        shard = Shard(start // shard_size, [d.id for d in found], texts, vectors, [])
        is_new = np.ones(len(texts), dtype=np.bool_)
        if vector_cache:
            known = vector_cache(texts)
            is_new = ~known.found
            vectors[known.found] = known.vectors
            known_rows = np.flatnonzero(known.found).tolist()
            shard.token_vectors = dict(zip(known_rows, known.token_vectors, strict=False))
        shard.new = np.flatnonzero(is_new).tolist()
        shard.new.sort(key=lambda i: len(texts[i]), reverse=True)
        yield shard


@dataclass(slots=True)
class _Batch:
    """Rows of a shard that are encoded in one call; empty if the shard has no new rows."""

    shard: Shard
    rows: list[int]
    texts: list[str]
    call: Callable[[], Encoding]
    is_last: bool
    future: Future[Encoding] | None = None


class LocalExecutor:
    """Encodes in this process, in batches of `batch_size` texts.

    A failed batch is retried; if it fails again, the failing texts are isolated. A
    `PipelinedEncoder` receives several calls concurrently.
    """

    def __init__(self, encoder: Encoder, batch_size: int) -> None:
        self._encoder = encoder
        self._pipelined = encoder if isinstance(encoder, PipelinedEncoder) else None
        self._calls = self._pipelined.concurrent_calls if self._pipelined else 1
        self._batch_size = batch_size
        self._isolator = FailureIsolator(lambda texts: self._run(partial(encoder.encode, texts)))
        self._clock = BusyTimer()

    @property
    def encoder_seconds(self) -> float:
        """Time in which at least one call of the encoder was running [s]."""
        return self._clock.seconds

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Encodes shards and yields them in order; reports after each batch."""
        # One thread tokenizes, the others call the encoder.
        with ThreadPoolExecutor(1 + self._calls) as pool:
            pending: deque[_Batch] = deque()
            for batch in prefetch(self._batches(shards), pool):
                if batch.rows:
                    batch.future = self._start(batch.call, pool)
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
                call = partial(self._encoder.encode, texts)
                if self._pipelined and texts:
                    tokens = self._pipelined.tokenize(texts)
                    call = partial(self._pipelined.encode_tokens, tokens)
                yield _Batch(shard, rows, texts, call, at + size >= len(shard.new))

    def _start(self, call: Callable[[], Encoding], pool: Threads) -> Future[Encoding]:
        if self._calls > 1:
            return pool.submit(self._run, call)
        # In the main thread, so that Ctrl-C interrupts the encoder.
        done: Future[Encoding] = Future()
        try:
            done.set_result(self._run(call))
        except ENCODING_ERRORS as error:
            done.set_exception(error)
        return done

    def _run(self, call: Callable[[], Encoding]) -> Encoding:
        with self._clock.running():
            return call()

    def _end(self, pending: deque[_Batch], report: Report) -> Iterator[Shard]:
        """Waits for the first batch and yields its shard if that is complete."""
        batch = pending.popleft()
        shard = batch.shard
        if batch.future:
            try:
                found = IsolationResult([(list(range(len(batch.texts))), batch.future.result())])
                self._isolator.succeeded()
            except ENCODING_ERRORS as error:
                # A concurrent call could have caused the failure.
                wait([other.future for other in pending if other.future])
                found = self._isolator.encode(batch.texts, error)
            before = shard.tokens
            for positions, encoding in found.parts:
                rows = [batch.rows[i] for i in positions]
                check_encoded(
                    encoding.vectors, shard.vectors.shape[1], [shard.ids[row] for row in rows]
                )
                shard.vectors[rows] = encoding.vectors
                shard.tokens += int(encoding.token_counts.sum())
                shard.truncated += int(encoding.truncated.sum())
                shard.token_vectors |= zip(rows, encoding.token_vectors or (), strict=False)
            shard.failed |= {batch.rows[i]: reason for i, reason in found.failed.items()}
            report(shard, len(batch.rows), shard.tokens - before)
        if batch.is_last:
            yield shard


def check_encoded(vectors: FloatArray, dimension: int, ids: Sequence[str]) -> None:
    """Raises VectorError if vectors of documents are not of unit norm, or of another shape."""
    if vectors.shape != (len(ids), dimension):
        raise VectorError(
            f"the encoder returned an array of shape {vectors.shape} instead of "
            f"({len(ids)}, {dimension}) for a batch with document '{ids[0]}'",
            code="wrong_shape",
            id=ids[0],
        )
    norms = np.linalg.norm(vectors, axis=1)
    bad = ~(np.abs(norms - 1) < 1e-3)
    if bad.any():
        row = int(bad.argmax())
        message = (
            f"the encoder returned a vector of norm {norms[row]:.6g} instead of 1 for document "
            f"'{ids[row]}'"
        )
        raise VectorError(message, code="not_unit_norm", id=ids[row])


def prefetch(items: Iterator[T], pool: Threads) -> Iterator[T]:
    """Yields the items of an iterator, computing the next one in `pool` meanwhile.

    Items must not be None and are computed one at a time. An error is raised when its item is due.
    """
    pending = pool.submit(next, items, None)
    while (item := pending.result()) is not None:
        pending = pool.submit(next, items, None)
        yield item


class BusyTimer:
    """Measures the time in which at least one call is running; thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the block as a running call."""
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
