"""What a result depends on besides its input: the commit, versions of libraries, the machine."""

import os
import platform
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from core.cpus import available_cpus

# Distributions by the module that they are imported as.
_LIBRARIES = {
    "accelerate": "accelerate",
    "bm25s": "bm25s",
    "faiss": "faiss-cpu",
    "ir_measures": "ir-measures",
    "jieba": "jieba",
    "jionlp": "jionlp",
    "mteb": "mteb",
    "numpy": "numpy",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "peft": "peft",
    "pyarrow": "pyarrow",
    "pymilvus": "pymilvus",
    "ray": "ray",
    "scipy": "scipy",
    "sentence_transformers": "sentence-transformers",
    "statsmodels": "statsmodels",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
    "vllm": "vllm",
}


def library_versions(*others: str) -> dict[str, str]:
    """Returns the versions of the libraries that this process, or another, has loaded.

    They go by distribution; `others` are modules that the other process has loaded.
    """
    versions = {}
    for module, name in _LIBRARIES.items():
        if module in sys.modules or module in others:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:  # another build of it: faiss-gpu, onnxruntime-gpu
                versions[name] = str(getattr(import_module(module), "__version__", "unknown"))
    return versions


def environment(*others: str) -> dict[str, object]:
    """Returns Python's version, the kind of machine and libraries; see `library_versions`."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": library_versions(*others),
    }


def hardware() -> dict[str, object]:
    """Returns the processor's model, processors that may be used, memory [bytes], load average."""
    return {
        "processor": processor(),
        "processors": available_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": list(os.getloadavg()),
    }


def processor(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the first model name of `/proc/cpuinfo`, or the architecture without one."""
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> dict[str, object] | None:
    """Returns the commit that is checked out and whether files differ from it; None without git."""
    try:
        head, changed = (
            subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"id": head.strip(), "changed": bool(changed)}
