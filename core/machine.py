"""Processors and GPUs of this machine, as far as this process may use them."""

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")
CPU_INFO = Path("/proc/cpuinfo")
# What the driver of NVIDIA is asked, and for how long [s].
_FIELDS = ("name", "memory.total", "memory.free", "driver_version")
_TIMEOUT = 10.0
_MIB = 2**20


def available_cpus(cpu_max: Path = _CPU_MAX) -> int:
    """Returns the number of processors that this process may use, at least 1.

    It is the minimum of the affinity mask and the cgroup v2 quota: in a container with a lower
    quota, thread pools of the machine's core count are throttled.
    """
    cpus = affinity()
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cpus
    if quota == "max":
        return cpus
    return max(1, min(cpus, math.ceil(int(quota) / int(period))))


def affinity() -> int:
    """Returns the number of processors in the affinity mask; without masks, as on macOS, of all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(memory_max: Path = MEMORY_MAX) -> int:
    """Returns the memory that this process may use: of the machine or the cgroup [bytes]."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(memory_max.read_text()))
    except (OSError, ValueError):  # "max"
        return machine


def cpu_flags(cpu_info: Path = CPU_INFO) -> set[str]:
    """Returns the names of the processor's instruction sets, as Linux lists them."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86, of ARM
            return set(flags.split())
    return set()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, with its memory in bytes."""

    name: str
    memory: int
    free: int  # memory that no process uses
    driver: str  # version of the driver


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of `CUDA_VISIBLE_DEVICES`.

    The list is empty if there are none or `nvidia-smi` is not installed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    chosen = [[*command, f"--id={each}"] for each in visible.split(",")] if visible else [command]
    try:
        return [gpu for each in chosen for gpu in _query(each)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _query(command: list[str]) -> list[Gpu]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return [Gpu(name, int(all_) * _MIB, int(free) * _MIB, v) for name, all_, free, v in rows]
