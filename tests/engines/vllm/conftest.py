import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_qwen3
from tests.engines.vllm.preloaded import Preloaded

# Inherited by the processes of engines: one core each, and little memory.
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session", autouse=True)
def preloaded_engines() -> Iterator[None]:
    """Starts engines by a fork; users' are new interpreters (`spawned_engines`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.encoders.vllm.multiprocessing", Preloaded)
        yield


@pytest.fixture
def spawned_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts engines as users do, with the variables of the test."""
    monkeypatch.setattr("models.encoders.vllm.multiprocessing", multiprocessing)
