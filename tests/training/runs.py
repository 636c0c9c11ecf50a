"""Reading the files of runs, and interrupting runs."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.training.conftest import only


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    return load_file(path if path.is_file() else folder / "adapter_model.safetensors")


def history_of(stages: Path, name: str) -> list[dict[str, float]]:
    history: list[dict[str, float]]
    history = json.loads(only(stages, f"{name}-*/metrics.json").read_text())
    return history


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
