"""Provenance of a result: the commit, the versions of libraries, the machine."""

import os
import platform
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from core.machine import available_cpus, cpu_flags

_INSTRUCTIONS = {"asimd", "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}

# Modules of libraries that results depend on.
_LIBRARIES = (
    *("accelerate", "bm25s", "faiss", "ir_measures", "jieba", "jionlp", "mteb", "numpy"),
    *("onnx", "onnxruntime", "openvino", "peft", "pyarrow", "pymilvus", "ray", "scipy"),
    *("sentence_transformers", "statsmodels", "tokenizers", "torch", "transformers", "vllm"),
)


def library_versions(*others: str) -> dict[str, str]:
    """Returns the versions of all loaded libraries, by distribution name.

    `others` are modules that another process has loaded and that are included too.
    """
    versions = {}
    for module in _LIBRARIES:
        if module in sys.modules or module in others:
            name = "faiss-cpu" if module == "faiss" else module.replace("_", "-")
            try:
                versions[name] = version(name)
            except PackageNotFoundError:  # another distribution: faiss-gpu, onnxruntime-gpu
                versions[name] = str(getattr(import_module(module), "__version__", "unknown"))
    return versions


def environment(*others: str) -> dict[str, object]:
    """Returns the versions of Python and libraries (`library_versions`), and the architecture."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": library_versions(*others),
    }


def hardware() -> dict[str, object]:
    """Returns the processor model, available processors, memory [bytes] and load average.

    `instructions` are the instruction sets that decide how fast vectors and encoders are.
    """
    return {
        "processor": processor(),
        "instructions": sorted(cpu_flags() & _INSTRUCTIONS),
        "processors": available_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
    }


def processor() -> str:
    """Returns the first model name in `/proc/cpuinfo`, or the machine architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> dict[str, object] | None:
    """Returns the id of the checked-out commit and whether tracked files differ from it.

    Returns None without git or outside of a repository.
    """
    try:
        head, changed = (
            subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"id": head.strip(), "changed": bool(changed)}
