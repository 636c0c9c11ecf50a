"""Stages that run in parallel to the encoder, and their errors."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest

from core.encoders import Encoding
from core.errors import CareError, ProviderError
from core.shards import complete_shards
from indexer import encoding
from indexer.build import encode
from indexer.encoding import (
    BusyTimer,
    LocalExecutor,
    PipelinedEncoder,
    encode_corpus,
    prefetch,
)
from tests.conftest import make_records
from tests.encoders import DIMENSION, BigramEncoder
from tests.errors import raises
from tests.indexer.builds import BATCH_SIZE, SHARD_SIZE
from tests.indexer.conftest import OptionsMaker
from tests.indexer.crashing import POISON

LIMIT = 30.0
BATCHES = SHARD_SIZE // BATCH_SIZE


class SplitEncoder(BigramEncoder):
    """Tokenizes separately and accepts concurrent calls."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__("document")
        self.concurrent_calls = calls


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # Without tqdm's monitor thread, which is not part of a pool.
    assert {t for t in threading.enumerate() if "tqdm" not in t.name} <= before


def test_the_next_item_is_computed_while_one_is_in_use() -> None:
    made = [Event() for _ in range(4)]

    def make() -> Iterator[int]:
        for i, event in enumerate(made):
            event.set()
            yield i

    with ThreadPoolExecutor(1) as pool:
        for i in prefetch(make(), pool):
            if i < 3:
                assert made[i + 1].wait(LIMIT)
            if i < 2:
                assert not made[i + 2].is_set()


def test_the_timer_counts_overlapping_calls_once() -> None:
    clock = BusyTimer()
    times = iter([10.0, 13.0, 20.0, 21.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("indexer.encoding.time.perf_counter", lambda: next(times))
        with clock.running(), clock.running():
            pass
        with clock.running():
            pass
    assert clock.seconds == 4.0


def test_shards_are_read_and_written_while_the_encoder_runs(
    options: OptionsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3 * SHARD_SIZE
    read = [Event() for _ in range(3)]
    entered = [Event() for _ in range(3)]
    numbers = iter(range(3))

    def vector_cache(texts: Sequence[str]) -> encoding.Known:
        read[next(numbers)].set()
        return encoding.Known(np.zeros(len(texts), np.bool_), np.empty((0, 64), np.float32))

    class Watching(BigramEncoder):
        def encode(self, texts: Sequence[str]) -> Encoding:
            shard = self.texts_seen // SHARD_SIZE
            entered[shard].set()
            if shard < 2:
                assert read[shard + 1].wait(LIMIT)
            return super().encode(texts)

    write = encoding.write_shard

    def write_late(folder: Any, shard: int, *arguments: Any, **more: Any) -> Any:
        if shard < 2:
            assert entered[shard + 1].wait(LIMIT)
        return write(folder, shard, *arguments, **more)

    settings = options(make_records(count))
    folder = encode(settings, BigramEncoder("document")).folder
    (folder / "journal.jsonl").unlink()
    monkeypatch.setattr(encoding, "write_shard", write_late)
    summary = encode_corpus(
        folder,
        DIMENSION,
        LocalExecutor(Watching("document"), BATCH_SIZE),
        shard_size=SHARD_SIZE,
        progress=False,
        vector_cache=vector_cache,
    )
    assert summary.new_texts == count
    assert [record.shard for record in complete_shards(folder)] == [0, 1, 2]
    assert 0 < summary.encoder_seconds <= summary.seconds


def test_the_next_batch_is_tokenized_while_one_is_encoded(options: OptionsMaker) -> None:
    count = 2 * SHARD_SIZE
    tokenised = [Event() for _ in range(count // BATCH_SIZE)]

    class Watching(SplitEncoder):
        def tokenize(self, texts: Sequence[str]) -> Sequence[str]:
            next(event for event in tokenised if not event.is_set()).set()
            return super().tokenize(texts)

        def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
            at = self.texts_seen // BATCH_SIZE
            assert at + 1 == len(tokenised) or tokenised[at + 1].wait(LIMIT)
            return super().encode_tokens(tokens)

    assert isinstance(Watching(), PipelinedEncoder)
    assert encode(options(make_records(count)), Watching()).summary.new_texts == count


def test_concurrent_calls_of_an_encoder_keep_the_order(options: OptionsMaker) -> None:
    records = make_records(2 * SHARD_SIZE)
    barrier = Barrier(2, timeout=LIMIT)

    class Pairwise(SplitEncoder):
        def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
            barrier.wait()
            return super().encode_tokens(tokens)

    plain = encode(options(records), BigramEncoder("document")).folder
    expected = [(plain / f"shard-0000{i}.npy").read_bytes() for i in range(2)]
    (plain / "journal.jsonl").unlink()
    folder = encode(options(records), Pairwise(2)).folder
    assert [(folder / f"shard-0000{i}.npy").read_bytes() for i in range(2)] == expected


def test_only_the_failing_text_of_two_concurrent_calls_is_excluded(options: OptionsMaker) -> None:
    records = make_records(4 * SHARD_SIZE)
    records[21]["text"] = f"{POISON}{records[21]['text']}"
    barrier = Barrier(2, timeout=LIMIT)

    class Shared(SplitEncoder):
        """Both concurrent calls fail if one of them has the poisoned text."""

        def __init__(self) -> None:
            super().__init__(2)
            self._poisoned = False
            self._alone = False

        def encode(self, texts: Sequence[str]) -> Encoding:
            if any(POISON in text for text in texts):
                raise ProviderError("no")
            return super().encode(texts)

        def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
            if threading.current_thread() is threading.main_thread():
                return super().encode_tokens(tokens)
            self._poisoned |= any(POISON in text for text in tokens)
            if not self._alone:
                barrier.wait()
                if self._poisoned:
                    self._alone = True
                    raise ProviderError("no")
            return super().encode_tokens(tokens)

    encoded = encode(options(records, max_reject_rate=0.1), Shared())
    assert list(encoded.reasons) == ["d0021"]
    assert encoded.summary.new_texts == len(records) - 1


class BrokenTokenizer(SplitEncoder):
    def tokenize(self, texts: Sequence[str]) -> Sequence[str]:
        raise CareError("the tokeniser is broken")


class BrokenEncoder(SplitEncoder):
    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        raise CareError("the encoder is broken")


def test_an_error_of_any_stage_stops_all_and_complete_shards_are_resumed(
    options: OptionsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = options(make_records(3 * SHARD_SIZE))
    for calls in (1, 2):
        for broken in (BrokenTokenizer(calls), BrokenEncoder(calls)):
            with pytest.raises(CareError, match="is broken"):
                encode(settings, broken)
    write = encoding.write_shard

    def fail(folder: Any, shard: int, *arguments: Any, **more: Any) -> Any:
        if shard == 1:
            raise OSError(28, "No space left on device", "shard-00001.npy")
        return write(folder, shard, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "write_shard", fail)
        with raises(CareError, "input_output"):
            encode(settings, SplitEncoder())

    def unreadable(title: str, text: str) -> str:
        if "第40号" in text:
            raise CareError("the reader is broken")
        return f"{title}{text}"

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "document_text", unreadable)
        with pytest.raises(CareError, match="the reader is broken"):
            encode(settings, SplitEncoder())
    encoder = SplitEncoder()
    summary = encode(settings, encoder).summary
    assert (summary.resumed_texts, encoder.texts_seen) == (2 * SHARD_SIZE, SHARD_SIZE)


def test_an_interrupt_stops_all_stages(options: OptionsMaker) -> None:
    class Interrupted(SplitEncoder):
        def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
            if self.texts_seen == SHARD_SIZE + BATCH_SIZE:
                raise KeyboardInterrupt
            return super().encode_tokens(tokens)

    settings = options(make_records(3 * SHARD_SIZE))
    with pytest.raises(KeyboardInterrupt):
        encode(settings, Interrupted())
    assert encode(settings, SplitEncoder()).summary.resumed_texts == SHARD_SIZE
