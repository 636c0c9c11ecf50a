"""GPUs of this machine, as the driver of NVIDIA reports them."""

import os
import subprocess
from dataclasses import dataclass

_FIELDS = ("name", "memory.total", "memory.free", "driver_version")
_TIMEOUT = 10.0
_MIB = 2**20


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
