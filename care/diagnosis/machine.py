"""Checks of the machine: Python, processors, memory, GPU, disk."""

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from care.diagnosis.finding import Finding
from care.diagnosis.packages import INSTALL_GPU_BUILDS
from core.machine import CPU_INFO, MEMORY_MAX, affinity, available_cpus, cpu_flags, visible_gpus

_OLDEST_PYTHON = (3, 11)
_GIB = 2**30
# The service with care-mini takes some 0.3 GiB; an index is memory-mapped.
_MIN_MEMORY = 1.0
_MIN_DISK = 1.0
_MEMORY_INFO = Path("/proc/meminfo")
# Instructions that int8 encoders gain from, by their names on x86 and ARM.
_FEATURES = ("avx2", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
_FAST = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


def check_machine(folders: Iterable[Path]) -> Iterator[Finding]:
    """Checks the machine; `folders` are those that commands write to."""
    yield check_python()
    yield check_processors()
    yield check_features()
    yield check_memory()
    yield check_gpu()
    for folder in dict.fromkeys(folders):
        yield check_disk(folder)


def check_python() -> Finding:
    """Checks the version of Python and the operating system."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return Finding("python", "error", found, "Install Python 3.11 or newer.")
    if platform.system() != "Linux":
        return Finding("python", "warning", found, "Only Linux is tested: use it, or the image.")
    return Finding("python", "ok", found)


def check_processors() -> Finding:
    """Reports how many processors this process may use."""
    usable, mask, total = available_cpus(), affinity(), os.cpu_count()
    limits = f"{total} in the machine, {mask} in the affinity mask"
    if usable < mask:
        limits += f", cgroup quota {usable}"
    return Finding("processors", "ok", f"{usable} usable ({limits})")


def check_features(cpu_info: Path = CPU_INFO) -> Finding:
    """Checks the instructions of the processor that encoders are fast with."""
    flags = cpu_flags(cpu_info)
    found = [name for name in _FEATURES if name in flags]
    listed = ", ".join(found) or "none of " + ", ".join(_FEATURES)
    if _FAST & set(found):
        return Finding("features", "ok", listed)
    advice = "Encoding is several times faster on processors with VNNI, AMX or ARM dot products."
    return Finding("features", "warning", listed, advice)


def check_memory(memory_info: Path = _MEMORY_INFO, limit: Path = MEMORY_MAX) -> Finding:
    """Checks the memory that is free, within the limit of the container."""
    try:
        lines = (line.split() for line in memory_info.read_text().splitlines())
        facts = {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in lines}
        free, total = facts["MemAvailable"] / _GIB, facts["MemTotal"] / _GIB
    except (OSError, ValueError, KeyError):
        return Finding("memory", "ok", "unknown: /proc/meminfo cannot be read")
    found = f"{free:.1f} of {total:.1f} GiB available"
    try:
        bound = int(limit.read_text()) / _GIB
        found += f", limit of the container {bound:.1f} GiB"
        free = min(free, bound)
    except (OSError, ValueError):
        pass
    if free < _MIN_MEMORY:
        advice = f"Free memory or raise the limit: the service needs {_MIN_MEMORY:.0f} GiB."
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def check_gpu() -> Finding:
    """Checks whether ONNX Runtime and FAISS can use the GPU, if there is one."""
    import onnxruntime

    from models.encoders.providers import CUDA
    from stores.faiss.gpu import gpus

    found = visible_gpus()
    if not found:
        return Finding("gpu", "ok", "none: encoding and search run on the processor")
    listed = "; ".join(
        f"{each.name}, {each.free / _GIB:.0f} of {each.memory / _GIB:.0f} GiB free, "
        f"driver {each.driver}"
        for each in found
    )
    usable = {
        "ONNX Runtime": CUDA in onnxruntime.get_available_providers(),
        "FAISS": gpus() > 0,
    }
    if absent := [name for name, can in usable.items() if not can]:
        advice = (
            "To encode (CARE_PROVIDER=cuda) and search (CARE_FAISS_DEVICE=cuda) on the GPU, "
            f"install the builds for GPUs: {INSTALL_GPU_BUILDS}."
        )
        return Finding("gpu", "warning", f"{listed}; not used by {' and '.join(absent)}", advice)
    return Finding("gpu", "ok", listed)


def check_disk(folder: Path) -> Finding:
    """Checks whether a folder, or the one that it would be made in, can be written to."""
    present = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )
    free = shutil.disk_usage(present).free / _GIB
    found = f"{folder}: {free:.1f} GiB free"
    if not os.access(present, os.W_OK):
        advice = "Builds need write access; a service only reads."
        return Finding("disk", "warning", f"{found}, not writable", advice)
    if free < _MIN_DISK:
        advice = "Delete old versions (care versions prune) or choose another folder."
        return Finding("disk", "warning", found, advice)
    return Finding("disk", "ok", found)
