"""Dynamic batching by tokens: batches form while the encoder is busy, never by sleeping."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any

from core.encoders import QueryEncoder
from core.types import FloatArray
from service.metrics import Metrics
from stores.faiss.search import limit_threads

# The oldest texts, among which a batch is chosen by length.
_WINDOW = 64


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A text, under the text rules of `core.text`, on its way to its vector.

    An abandoned one, for which nobody waits any more, leaves before it is encoded. `queued` is
    when it was submitted, on the clock of `time.perf_counter`, `queue` the time that it waited;
    `tokenize` and `encode` are those of its batch [s].
    """

    text: str
    abandoned: bool = False
    tokenized: Any = None
    queued: float = field(default_factory=time.perf_counter)
    queue: float = 0.0
    tokenize: float = 0.0
    encode: float = 0.0


class Batcher:
    """Encodes jobs in so many threads of its own, as many jobs at once as `choose` says.

    `encoded` is called in an encoding thread with the jobs of a batch and their vectors, float32
    [n, dimension], or the error that came in their place.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        workers: int,
        budget: int,
        padding: int,
        encoded: Callable[[Sequence[Any], FloatArray | Exception], None],
        metrics: Metrics,
    ) -> None:
        self._encoder = encoder
        self._budget = budget
        self._padding = padding
        self._encoded = encoded
        self._metrics = metrics
        self._waiting: deque[Job] = deque()
        self._changed = Condition()
        # One thread at a time takes jobs and puts back what it leaves: another would take younger
        # ones meanwhile, and put them back before the older.
        self._forming = Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, "encode", limit_threads)
        for _ in range(workers):
            self._threads.submit(self._work)

    def submit(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        """Hands over jobs; `first` puts them before all that wait."""
        with self._changed:
            if first:
                self._waiting.extendleft(reversed(jobs))
            else:
                self._waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Encodes what waits, then ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """Encodes one batch; a thread that waits for the next holds nothing of the last."""
        batch: list[Job] = []
        outcome: FloatArray | Exception
        try:
            with self._forming:
                batch = self._oldest()
                if not batch:
                    return False
                self._tokenize([job for job in batch if job.tokenized is None])
                batch = self._form(batch)
            outcome = self._encode(batch)
        except Exception as error:  # whatever it is, every waiter must hear of it
            outcome = error
        self._encoded(batch, outcome)
        return True

    def _oldest(self) -> list[Job]:
        """Takes the oldest jobs that somebody waits for; none once closed and empty."""
        with self._changed:
            while True:
                window: list[Job] = []
                while self._waiting and len(window) < _WINDOW:
                    job = self._waiting.popleft()
                    if not job.abandoned:
                        window.append(job)
                if window or self._closed:
                    return window
                self._changed.wait()

    def _tokenize(self, fresh: Sequence[Job]) -> None:
        if not fresh:
            return
        started = time.perf_counter()
        tokens = self._encoder.tokenize([job.text for job in fresh])
        spent = time.perf_counter() - started
        for job, tokenized in zip(fresh, tokens, strict=True):
            job.tokenized, job.tokenize = tokenized, spent

    def _form(self, window: Sequence[Job]) -> list[Job]:
        """Chooses a batch and puts the other jobs back where they were."""
        chosen = choose([len(job.tokenized) for job in window], self._budget, self._padding)
        rest = [job for i, job in enumerate(window) if i not in chosen]
        if rest:
            self.submit(rest, first=True)
        return [window[i] for i in sorted(chosen)]

    def _encode(self, batch: Sequence[Job]) -> FloatArray:
        started = time.perf_counter()
        encoding = self._encoder.encode_tokens([job.tokenized for job in batch])
        spent = time.perf_counter() - started
        for job in batch:
            job.queue, job.encode = started - job.queued - job.tokenize, spent
        self._metrics.batch_queries.observe(len(batch))
        self._metrics.batch_tokens.observe(int(encoding.token_counts.sum()))
        return encoding.vectors


def choose(lengths: Sequence[int], budget: int, padding: int) -> set[int]:
    """Chooses which texts are encoded together: positions in their lengths [tokens].

    The oldest text, the first, always is, so none waits for ever. Those nearest to it in length
    come with it as long as each adds no more than `padding` tokens of padding, and texts × tokens
    of the longest stay within the budget: the processor's time for a batch is that of its padded
    tokens and a little for the run itself, so that a text that would make others longer is cheaper
    in a run of its own.
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
