"""vLLM compared with transformers, with the same weights."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from core.errors import PairError, ProviderError
from core.manifest import Chunking
from core.types import Document, FloatArray
from indexer.chunking import Chunker
from models.encoders.factory import resolve_backend
from models.encoders.transformers import TransformersEncoder
from models.encoders.vllm import VllmEncoder, _devices
from tests.checkpoints import (
    GTE_CONFIG,
    LONG,
    MAX_LENGTH,
    TEXTS,
    add_dense,
    checkpoint_spec,
    write_bert,
    write_gte,
    write_gte_qwen2,
)
from tests.errors import raises

ALL = [*TEXTS, LONG]
SAME = 0.9999


@pytest.fixture(scope="module")
def vllm(qwen3: Path) -> Iterator[VllmEncoder]:
    encoder = VllmEncoder(checkpoint_spec(qwen3, prompt="文档："), Path())
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def expected(qwen3: Path) -> FloatArray:
    spec = checkpoint_spec(qwen3, prompt="文档：")
    return TransformersEncoder(spec, Path(), device="cpu").encode(ALL).vectors


def cosines(a: FloatArray, b: FloatArray) -> FloatArray:
    product: FloatArray = (a * b).sum(axis=1)
    return product


def test_vectors_equal_those_of_transformers(vllm: VllmEncoder, expected: FloatArray) -> None:
    encoding = vllm.encode(ALL)
    assert encoding.vectors.dtype == np.float32
    assert cosines(encoding.vectors, expected).min() >= SAME
    order = np.argsort(-(expected @ expected.T), axis=1)
    np.testing.assert_array_equal(np.argsort(-(encoding.vectors @ expected.T), axis=1), order)
    assert np.sort(expected @ expected.T)[:, -2].max() < 0.95


def test_tokens_equal_those_of_transformers_and_truncation_keeps_the_end_token(
    vllm: VllmEncoder, qwen3: Path
) -> None:
    other = TransformersEncoder(vllm.spec, Path(), device="cpu").encode(ALL)
    encoding = vllm.encode(ALL)
    np.testing.assert_array_equal(encoding.token_counts, other.token_counts)
    np.testing.assert_array_equal(encoding.truncated, other.truncated)
    assert encoding.truncated.tolist() == [False] * len(TEXTS) + [True]
    assert encoding.token_counts[-1] == MAX_LENGTH
    assert vllm.tokenize([LONG])[0].ids[-1] == 0


def test_chunks_are_split_at_tokens_of_the_encoder(vllm: VllmEncoder) -> None:
    text = LONG + "😀龘" * 20
    chunks = Chunker(vllm, Chunking(tokens=MAX_LENGTH)).split(Document("d", text))
    other = Chunker(
        TransformersEncoder(vllm.spec, Path(), device="cpu"), Chunking(tokens=MAX_LENGTH)
    )
    assert isinstance(chunks, list)
    assert chunks == other.split(Document("d", text))
    assert "".join(chunk.text for chunk in chunks) == text
    encoding = vllm.encode([chunk.text for chunk in chunks])
    assert not encoding.truncated.any()
    assert encoding.token_counts[:-1].mean() > 0.8 * MAX_LENGTH


def test_a_text_has_the_same_vector_alone_and_in_any_batch(
    vllm: VllmEncoder, expected: FloatArray
) -> None:
    alone = np.concatenate([vllm.encode([text]).vectors for text in ALL])
    assert cosines(alone, expected).min() >= SAME
    many = vllm.encode(ALL[::-1] * 20).vectors
    assert cosines(many, np.tile(expected[::-1], (20, 1))).min() >= SAME


def test_engines_share_a_batch_and_a_crashed_engine_is_an_error(
    qwen3: Path, expected: FloatArray
) -> None:
    before = set(multiprocessing.active_children())
    encoder = VllmEncoder(checkpoint_spec(qwen3, prompt="文档："), Path(), replicas=2)
    try:
        assert cosines(encoder.encode(ALL).vectors, expected).min() >= SAME
        assert cosines(encoder.encode(ALL[:1]).vectors, expected[:1]).min() >= SAME
        first, second = set(multiprocessing.active_children()) - before
        assert first.is_alive()
        os.kill(second.pid or 0, signal.SIGKILL)
        with raises(ProviderError, "engine_died"):
            encoder.encode(ALL)
    finally:
        encoder.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.usefixtures("spawned_engines")
def test_the_processes_of_tensor_parallelism_end_with_a_killed_engine(
    qwen3: Path, expected: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a processor vLLM must be told where the processes run if there is one node of memory.
    cpus = sorted(os.sched_getaffinity(0)) * 2
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[1]}")
    before = set(multiprocessing.active_children())
    encoder = VllmEncoder(checkpoint_spec(qwen3, prompt="文档："), Path(), tensor_parallel=2)
    try:
        assert cosines(encoder.encode(ALL).vectors, expected).min() >= SAME
        (engine,) = set(multiprocessing.active_children()) - before
        tasks = Path(f"/proc/{engine.pid}/task").glob("*/children")
        started = [pid for task in tasks for pid in task.read_text().split()]
        assert len(started) >= 2
        os.kill(engine.pid or 0, signal.SIGKILL)
        with raises(ProviderError, "engine_died"):
            encoder.encode(ALL)
    finally:
        encoder.close()
    for _ in range(600):
        if not any(map(_runs, started)):
            return
        time.sleep(0.1)
    raise AssertionError("processes go on without their engine")


def _runs(pid: str) -> bool:
    """Returns whether a process has not ended; one that has may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_mean_of_an_encoder_with_a_dense_module(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    add_dense(folder, 96, "activation.Tanh")
    spec = checkpoint_spec(folder, "mean", native_dimension=96, dimension=32)
    encoder = VllmEncoder(spec, Path())
    try:
        vectors = encoder.encode(ALL).vectors
    finally:
        encoder.close()
    expected = TransformersEncoder(spec, Path(), device="cpu").encode(ALL).vectors
    assert vectors.shape == (len(ALL), 32)
    assert cosines(vectors, expected).min() >= SAME


def test_attention_of_gte_qwen2_is_bidirectional(tmp_path: Path) -> None:
    spec = checkpoint_spec(write_gte_qwen2(tmp_path), config={"is_causal": False})
    encoder = VllmEncoder(spec, Path())
    try:
        vectors = encoder.encode(ALL).vectors
    finally:
        encoder.close()
    causal = spec.model_copy(update={"config": {}})
    expected, other = (
        TransformersEncoder(s, Path(), device="cpu").encode(ALL).vectors for s in (spec, causal)
    )
    assert cosines(vectors, expected).min() >= SAME
    assert cosines(vectors, other).min() < 0.9


def test_a_gte_model_with_another_model_type_runs_in_transformers(tmp_path: Path) -> None:
    spec = checkpoint_spec(write_gte(tmp_path), "cls", config=GTE_CONFIG)
    with raises(PairError, "unsupported_model_type", model_type="gte"):
        VllmEncoder(spec, Path())
    assert resolve_backend(spec, "auto") == "transformers"


def test_an_error_of_vllm_is_one_line(qwen3: Path) -> None:
    with raises(ProviderError, "engine_not_started") as caught:
        VllmEncoder(checkpoint_spec(qwen3, max_length=4096), Path())
    assert "\n" not in str(caught.value)


def test_engines_stop_when_the_command_is_killed(qwen3: Path) -> None:
    script = f"""
import multiprocessing, time
from pathlib import Path
from models.encoders.vllm import VllmEncoder
from tests.checkpoints import checkpoint_spec
if __name__ == "__main__":
    encoder = VllmEncoder(checkpoint_spec(Path({str(qwen3)!r})), Path())
    (engine,) = multiprocessing.active_children()
    print(engine.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as command:
        assert command.stdout
        engine = int(command.stdout.readline())
        os.kill(engine, 0)
        command.kill()
    for _ in range(600):
        try:
            os.kill(engine, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the engine goes on without its command")


def test_gpus_are_assigned_from_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [_devices(replica, 2) for replica in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6")
    assert _devices(2, 1) == "GPU-6"
    with raises(ProviderError, "too_few_gpus", replica=2, needed=2):
        _devices(1, 2)
