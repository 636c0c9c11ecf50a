import os
from pathlib import Path

import pytest

from care.diagnosis import machine
from core.machine import Gpu, visible_gpus


@pytest.mark.parametrize(
    ("cpu_info", "status", "listed"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_vnni\n", "ok", "avx2, avx512_vnni"),
        ("flags : fpu avx2\n", "warning", "avx2"),
        ("Features : fp asimd asimddp\n", "ok", "asimddp"),
        ("", "warning", "none of"),
    ],
)
def test_instructions_that_encoders_gain_from_are_listed(
    tmp_path: Path, cpu_info: str, status: str, listed: str
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpu_info)
    finding = machine.check_features(path)
    assert finding.status == status
    assert finding.message.startswith(listed)
    assert bool(finding.advice) == (status == "warning")


@pytest.mark.parametrize(
    ("available", "limit", "status"),
    [(8, "max", "ok"), (8, str(512 * 2**20), "warning"), (0.5, "max", "warning")],
)
def test_little_memory_is_a_warning(
    tmp_path: Path, available: float, limit: str, status: str
) -> None:
    info, bound = tmp_path / "meminfo", tmp_path / "memory.max"
    kib = int(available * 2**20)
    info.write_text(f"MemTotal:       16777216 kB\nMemAvailable:   {kib} kB\nHugePages_Total: 0\n")
    bound.write_text(f"{limit}\n")
    finding = machine.check_memory(info, bound)
    assert finding.status == status
    assert f"{available:.1f} of 16.0 GiB" in finding.message


def test_unknown_memory_is_no_fault(tmp_path: Path) -> None:
    assert machine.check_memory(tmp_path / "none").status == "ok"


def test_a_folder_that_is_made_later_is_checked_where_it_will_be(tmp_path: Path) -> None:
    finding = machine.check_disk(tmp_path / "a" / "b")
    assert finding.status == "ok"
    assert str(tmp_path / "a" / "b") in finding.message


def test_too_little_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MIN_DISK", 1e9)
    assert machine.check_disk(tmp_path).status == "warning"


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert machine.check_disk(tmp_path).status == "warning"


@pytest.fixture
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Installs a program that answers as nvidia-smi does."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'A GPU, 2048, 1024, 1.0'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Gpu("A GPU", 2**31, 2**30, "1.0")


def test_the_driver_reports_visible_gpus(fake_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus() == [fake_gpu]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-ab")
    assert visible_gpus() == [fake_gpu, fake_gpu]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("provider", "gpus", "status"),
    [("CUDA", 1, "ok"), ("CUDA", 0, "warning"), ("CPU", 1, "warning")],
)
def test_a_gpu_that_is_not_used_is_a_warning(
    fake_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, provider: str, gpus: int, status: str
) -> None:
    names = [f"{provider}ExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: names)
    monkeypatch.setattr("faiss.get_num_gpus", lambda: gpus)
    finding = machine.check_gpu()
    assert finding.status == status
    assert fake_gpu.name in finding.message


def test_without_a_gpu_the_processor_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.check_gpu().status == "ok"
