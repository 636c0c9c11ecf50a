"""Dynamic batching by tokens: batches form while the encoder is busy, without timers."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

from core.encoders import QueryEncoder, TokenVectorEncoder
from core.types import FloatArray
from models.encoders.providers import MAX_ROWS
from service.limits import ANYONE, Client
from service.observe.metrics import Metrics
from service.pipeline.fairness import FairQueue, Turn
from stores.faiss.search import limit_threads


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A text to encode."""

    text: str  # normalized by `core.text`
    client: Client = ANYONE  # who asks: the queue serves clients in turn
    abandoned: bool = False  # whether no request waits for it any more; it is then not encoded
    tokenized: Any = None  # its tokens, once tokenized
    with_tokens: bool = False  # whether its token vectors are wanted too
    # Its token vectors, float32 [tokens, dimension], if the encoder computes them.
    token_vectors: FloatArray | None = None
    # When it was submitted, on the clock of `time.perf_counter` [s].
    queued: float = field(default_factory=time.perf_counter)
    queue: float = 0.0  # time in the queue [s]
    tokenize: float = 0.0  # time to tokenize its batch [s]
    encode: float = 0.0  # time to encode its batch [s]


class Batcher:
    """Encodes jobs in threads, in batches that `choose_batch` forms.

    Args:
        encoder: The query encoder.
        workers: Number of encoding threads.
        budget: Most tokens of a batch, padding included.
        padding: Most padding that one more text may add to a batch [tokens].
        encoded: Called in an encoding thread with the jobs of a batch and their vectors, float32
            [n, dimension], or the exception that encoding raised.
        metrics: Where the sizes of batches are counted.
        niceness: By how much the priority of the threads is below that of the process, 0 to 19.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        workers: int,
        budget: int,
        padding: int,
        encoded: Callable[[Sequence[Any], FloatArray | Exception], None],
        metrics: Metrics,
        *,
        niceness: int = 0,
    ) -> None:
        self._encoder = encoder
        self._token_encoder: TokenVectorEncoder | None = None
        if isinstance(encoder, TokenVectorEncoder) and encoder.token_dimension:
            self._token_encoder = encoder
        self._niceness = niceness
        self._budget = budget
        self._padding = padding
        self._encoded = encoded
        self._metrics = metrics
        self._waiting: FairQueue[Job] = FairQueue()
        # Held while the jobs, the idle threads or `_closed` are read and changed.
        self._lock = Lock()
        # Each idle thread waits for its lock. The one that became idle last works next, because its
        # data are still in the caches of a processor.
        self._idle: list[Lock] = []
        # One thread at a time takes jobs and puts back those that it does not choose. Otherwise
        # another thread could take younger jobs meanwhile and put them back before older ones.
        self._forming = Lock()
        self._closed = False
        # As daemons they do not keep a process alive that ends without `close`.
        self._threads = [
            Thread(target=self._work, name=f"encode_{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Adds jobs to the queue: in the turns of their clients or, if `first`, at its start."""
        if not jobs:
            return
        with self._lock:
            for job in jobs:
                self._waiting.push(job, job.client, len(job.text) + 1, first=first)
            self._wake()

    def close(self) -> None:
        """Encodes the queued jobs, then stops the threads."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._wake()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        limit_threads()
        os.nice(self._niceness)  # on Linux, of the calling thread
        while self._wait():
            self._work_once()

    def _wait(self) -> bool:
        """Waits for a job; returns False once closed and empty."""
        idle = Lock()
        with self._lock:
            if self._waiting or self._closed:
                return bool(self._waiting)
            idle.acquire()
            self._idle.append(idle)
        with idle:
            return True

    def _work_once(self) -> None:
        """Encodes one batch, if there is a job.

        A separate function, so that a waiting thread holds no reference to the last batch.
        """
        batch: list[Job] = []
        outcome: FloatArray | Exception
        try:
            with self._forming:
                window = self._next()
                batch = [job for _, job in window]
                if not batch:
                    return
                self._tokenize([job for job in batch if job.tokenized is None])
                batch = self._form(window)
            outcome = self._encode(batch)
        except Exception as error:  # of any kind: each waiting request must get it
            outcome = error
        self._encoded(batch, outcome)

    def _next(self) -> list[tuple[Turn, Job]]:
        """Takes the next jobs, from which a batch is chosen, without those that are abandoned."""
        with self._lock:
            taken = self._waiting.take(MAX_ROWS)
            window = [(turn, job) for turn, job in taken if not job.abandoned]
            if self._waiting:
                self._wake()
        return window

    def _wake(self) -> None:
        """Wakes the thread that became idle last, if there is one; the caller holds the lock."""
        if self._idle:
            self._idle.pop().release()

    def _tokenize(self, fresh: Sequence[Job]) -> None:
        if not fresh:
            return
        started = time.perf_counter()
        tokens = self._encoder.tokenize([job.text for job in fresh])
        spent = time.perf_counter() - started
        for job, tokenized in zip(fresh, tokens, strict=True):
            job.tokenized, job.tokenize = tokenized, spent

    def _form(self, window: Sequence[tuple[Turn, Job]]) -> list[Job]:
        """Chooses a batch and puts the other jobs back with their turns."""
        lengths = [len(job.tokenized) for _, job in window]
        chosen = choose_batch(lengths, self._budget, self._padding)
        with self._lock:
            for i, (turn, job) in enumerate(window):
                if i not in chosen:
                    self._waiting.put_back(turn, job)
            if len(chosen) < len(window):
                self._wake()
        return [window[i][1] for i in sorted(chosen)]

    def _encode(self, batch: Sequence[Job]) -> FloatArray:
        started = time.perf_counter()
        tokens = [job.tokenized for job in batch]
        if self._token_encoder and any(job.with_tokens for job in batch):
            encoding, found = self._token_encoder.encode_token_vectors(tokens)
            for job, vectors in zip(batch, found, strict=True):
                job.token_vectors = vectors
        else:
            encoding = self._encoder.encode_tokens(tokens)
        spent = time.perf_counter() - started
        for job in batch:
            job.queue, job.encode = started - job.queued - job.tokenize, spent
        self._metrics.batch_queries.observe(len(batch))
        self._metrics.batch_tokens.observe(int(encoding.token_counts.sum()))
        return encoding.vectors


def choose_batch(lengths: Sequence[int], budget: int, padding: int) -> set[int]:
    """Chooses which texts to encode together; returns their positions in `lengths` [tokens].

    The first text, whose turn it is, is always chosen, so that no text waits forever. Texts follow
    in the order of their difference in length from it, if each adds at most `padding` tokens of
    padding and the padded batch (texts × tokens of the longest) stays within the budget. The time
    to encode a batch is proportional to its padded tokens plus a small constant, so a text that
    would add more padding is cheaper in another batch.
    """
    chosen = {0}
    longest = lengths[0]
    for i in sorted(range(1, len(lengths)), key=lambda i: (abs(lengths[i] - lengths[0]), i)):
        grown = max(longest, lengths[i])
        added = (grown - longest) * len(chosen) + grown - lengths[i]
        if (len(chosen) + 1) * grown <= budget and added <= padding:
            chosen.add(i)
            longest = grown
    return chosen
