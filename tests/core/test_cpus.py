import os
from pathlib import Path

import pytest

from core.cpus import available_cpus


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("unreadable\n", 8),
    ],
)
def test_the_minimum_of_affinity_and_quota_is_returned(
    tmp_path: Path, quota: str, cpus: int
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert available_cpus(path) == cpus


def test_without_a_quota_the_affinity_is_returned(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "cpu.max") == 8
