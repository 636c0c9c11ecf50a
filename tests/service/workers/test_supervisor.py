from pathlib import Path
from typing import Any

import pytest

from core.machine import available_memory
from service.settings import Settings
from service.workers import supervisor
from service.workers.supervisor import choose_workers


@pytest.mark.parametrize(
    ("settings", "processors", "gib", "expected"),
    [
        ({}, 4, 16, (4, "one for each processor")),
        ({}, 16, 2.2, (6, "half of the memory has room for as many")),
        ({}, 16, 0.1, (1, "half of the memory has room for as many")),
        (
            {"overflow_pair": "care-mini-lookup"},
            16,
            2,
            (5, "half of the memory has room for as many"),
        ),
        ({"pair": "missing"}, 4, 16, (4, "one for each processor")),
        ({"provider": "cuda"}, 4, 16, (1, "the encoder or FAISS runs on a GPU")),
        ({"faiss_device": "cuda"}, 4, 16, (1, "the encoder or FAISS runs on a GPU")),
        ({"workers": 7, "provider": "cuda"}, 4, 0.1, (7, "as set")),
    ],
)
def test_workers_are_as_many_as_processors_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    processors: int,
    gib: float,
    expected: tuple[int, str],
) -> None:
    monkeypatch.setattr(supervisor, "available_cpus", lambda: processors)
    monkeypatch.setattr(supervisor, "available_memory", lambda: int(gib * 2**30))
    assert choose_workers(Settings(**settings)) == expected


@pytest.mark.parametrize(("text", "limited"), [("max\n", False), ("1048576\n", True)])
def test_memory_is_that_of_the_machine_or_the_cgroup(
    tmp_path: Path, text: str, limited: bool
) -> None:
    (path := tmp_path / "memory.max").write_text(text)
    assert (available_memory(path) == 1 << 20) == limited
    assert available_memory(tmp_path / "missing") > 1 << 20
