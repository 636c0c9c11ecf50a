import os
from pathlib import Path

import pytest

from core.machine import available_cpus, cpu_flags


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


def test_the_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    assert cpu_flags(path) == set()
    path.write_text("processor : 0\nflags\t\t: fpu avx2\n\nprocessor : 1\nflags\t\t: fpu\n")
    assert cpu_flags(path) == {"fpu", "avx2"}
