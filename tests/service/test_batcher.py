import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.encoders import Encoding
from core.types import FloatArray
from service.observe.metrics import Metrics
from service.pipeline.batcher import Batcher, Job, choose_batch
from tests.encoders import BigramEncoder

WAIT = 30


class GatedEncoder(BigramEncoder):
    """Encodes each batch when the test releases it, and records its texts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.batches: list[list[str]] = []

    def tokenize(self, texts: Sequence[str]) -> Sequence[str]:
        if any("不可分" in text for text in texts):
            raise RuntimeError("cannot tokenize")
        return super().tokenize(texts)

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        self.batches.append(list(tokens))
        self.entered.release()
        assert self.gate.acquire(timeout=WAIT)
        if "坏" in tokens:
            raise RuntimeError("cannot encode")
        return super().encode_tokens(tokens)


class Outcomes:
    """Collects the batches that a batcher passes on."""

    def __init__(self) -> None:
        self.of: dict[str, FloatArray | Exception] = {}
        self.changed = threading.Condition()

    def __call__(self, jobs: Sequence[Job], vectors: FloatArray | Exception) -> None:
        with self.changed:
            for i, job in enumerate(jobs):
                self.of[job.text] = vectors if isinstance(vectors, Exception) else vectors[i]
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of) >= count, WAIT)


@contextmanager
def running(
    encoder: BigramEncoder, budget: int = 1000, workers: int = 1
) -> Iterator[tuple[Batcher, Outcomes]]:
    outcomes = Outcomes()
    batcher = Batcher(encoder, workers, budget, 1000, outcomes, Metrics())
    try:
        yield batcher, outcomes
    finally:
        if isinstance(encoder, GatedEncoder):
            encoder.gate.release(1000)
        batcher.close()


def jobs(*texts: str) -> list[Job]:
    return [Job(text=text) for text in texts]


@contextmanager
def busy(budget: int = 1000) -> Iterator[tuple[Batcher, GatedEncoder, Outcomes]]:
    """The encoder has a batch of one text, 甲, until the test releases it."""
    encoder = GatedEncoder()
    with running(encoder, budget) as (batcher, outcomes):
        batcher.submit(jobs("甲"))
        assert encoder.entered.acquire(timeout=WAIT)
        yield batcher, encoder, outcomes


@pytest.mark.parametrize(
    ("budget", "texts", "batches"),
    [
        pytest.param(1000, ["乙", "丙", "丁"], [["乙", "丙", "丁"]], id="one batch"),
        pytest.param(4, ["长" * 9, "乙", "丙"], [["长" * 9], ["乙", "丙"]], id="above the budget"),
        pytest.param(8, ["乙" * 8, "丙", "丁"], [["乙" * 8], ["丙", "丁"]], id="the oldest first"),
    ],
)
def test_texts_that_arrive_while_the_encoder_is_busy_form_batches(
    budget: int, texts: list[str], batches: list[list[str]]
) -> None:
    with busy(budget) as (batcher, encoder, outcomes):
        for text in texts:
            batcher.submit(jobs(text))
        encoder.gate.release(10)
        outcomes.wait(4)
    assert encoder.batches == [["甲"], *batches]


def test_each_text_gets_its_own_vector() -> None:
    texts = [f"第{i}个问题" * (i % 7 + 1) for i in range(200)]
    with running(BigramEncoder(), budget=64, workers=3) as (batcher, outcomes):
        for start in range(0, 200, 5):
            batcher.submit(jobs(*texts[start : start + 5]))
        outcomes.wait(200)
    expected = BigramEncoder().encode(texts).vectors
    for text, vector in zip(texts, expected, strict=True):
        np.testing.assert_array_equal(outcomes.of[text], vector)


def test_abandoned_texts_are_not_encoded() -> None:
    with busy() as (batcher, encoder, outcomes):
        gone, kept = jobs("乙", "丙")
        batcher.submit([gone, kept])
        gone.abandoned = True
        encoder.gate.release(2)
        outcomes.wait(2)
    assert encoder.batches == [["甲"], ["丙"]]


@pytest.mark.parametrize("bad", ["坏", "不可分"])
def test_a_failed_batch_fails_its_jobs_only(bad: str) -> None:
    encoder = GatedEncoder()
    encoder.gate.release(3)
    with running(encoder) as (batcher, outcomes):
        batcher.submit(jobs("甲", bad))
        outcomes.wait(2)
        batcher.submit(jobs("乙"))
        outcomes.wait(3)
    assert isinstance(outcomes.of["甲"], RuntimeError)
    assert isinstance(outcomes.of[bad], RuntimeError)
    assert isinstance(outcomes.of["乙"], np.ndarray)


def test_an_urgent_text_is_encoded_before_the_queue() -> None:
    with busy(budget=1) as (batcher, encoder, outcomes):
        batcher.submit(jobs("乙"))
        batcher.submit(jobs("急"), first=True)
        encoder.gate.release(3)
        outcomes.wait(3)
    assert encoder.batches == [["甲"], ["急"], ["乙"]]


def test_closing_encodes_the_queue_first() -> None:
    with busy() as (batcher, encoder, outcomes):
        batcher.submit(jobs("乙"))
        encoder.gate.release(2)
        batcher.close()
        assert set(outcomes.of) == {"甲", "乙"}


def test_times_of_queue_and_batch_are_measured() -> None:
    encoder = GatedEncoder()
    with running(encoder) as (batcher, outcomes):
        first, second = jobs("甲", "乙")
        batcher.submit([first])
        assert encoder.entered.acquire(timeout=WAIT)
        batcher.submit([second])
        time.sleep(0.05)
        encoder.gate.release(2)
        outcomes.wait(2)
    assert second.queue >= 0.05
    assert first.encode >= 0.05 > first.queue
    assert second.tokenize > 0


LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=80)


@given(LENGTHS, st.integers(1, 500), st.integers(0, 50))
def test_a_batch_contains_the_oldest_text_and_fits_the_budget(
    lengths: list[int], budget: int, padding: int
) -> None:
    chosen = choose_batch(lengths, budget, padding)
    longest = max(lengths[i] for i in chosen)
    assert 0 in chosen
    assert len(chosen) == 1 or len(chosen) * longest <= budget
    assert sum(longest - lengths[i] for i in chosen) <= padding * (len(chosen) - 1)


@given(LENGTHS)
def test_all_texts_are_chosen_if_they_fit(lengths: list[int]) -> None:
    room = len(lengths) * max(lengths)
    assert choose_batch(lengths, room, room) == set(range(len(lengths)))


def test_texts_nearest_in_length_are_chosen() -> None:
    assert choose_batch([10, 50, 12, 9, 100, 11], 48, 100) == {0, 2, 3, 5}


def test_a_text_that_adds_too_much_padding_is_not_chosen() -> None:
    assert choose_batch([10, 15, 11, 10, 4, 3, 16], 1000, 6) == {0, 2, 3}
    assert choose_batch([10, 10, 4, 3], 1000, 6) == {0, 1, 2}
    assert choose_batch([10, 16], 1000, 6) == {0, 1}
    assert choose_batch([10, 11, 10], 1000, 0) == {0, 2}


class ReluctantEncoder(GatedEncoder):
    """Tokenizes the first texts only when the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizing = threading.Semaphore(0)
        self.go_on = threading.Event()

    def tokenize(self, texts: Sequence[str]) -> Sequence[str]:
        self.tokenizing.release()
        assert self.go_on.wait(WAIT)
        return super().tokenize(texts)


def test_threads_do_not_overtake_texts_that_another_is_choosing_from() -> None:
    encoder = ReluctantEncoder()
    # Each text is a separate batch.
    with running(encoder, budget=1, workers=2) as (batcher, outcomes):
        batcher.submit(jobs("一", "二"))
        assert encoder.tokenizing.acquire(timeout=WAIT)
        batcher.submit(jobs("三", "四"))
        # Another thread could now take the younger texts.
        assert not encoder.tokenizing.acquire(timeout=0.2)
        encoder.go_on.set()
        for _ in range(2):
            assert encoder.entered.acquire(timeout=WAIT)
        encoder.gate.release(4)
        outcomes.wait(4)
    assert {batch[0] for batch in encoder.batches[:2]} == {"一", "二"}


def test_a_process_ends_without_closing_its_batcher() -> None:
    code = "from tests.service.test_batcher import *\n"
    code += "Batcher(BigramEncoder(), 1, 1000, 1000, print, Metrics())"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class NotesPriority(BigramEncoder):
    """Records the niceness of the thread that encodes."""

    seen: int | None = None

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        self.seen = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return super().encode_tokens(tokens)


@pytest.mark.parametrize("niceness", [0, 19])
def test_the_priority_of_the_encoding_threads_alone_is_lowered(niceness: int) -> None:
    encoder, outcomes = NotesPriority(), Outcomes()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    batcher = Batcher(encoder, 1, 1000, 1000, outcomes, Metrics(), niceness=niceness)
    batcher.submit([Job(text="发热")])
    outcomes.wait(1)
    batcher.close()
    assert encoder.seen == min(own + niceness, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
