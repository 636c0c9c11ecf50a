"""Checks every path on GPUs with tiny models: `make test-gpu`.

Each check is a process of its own, in the environment that it needs. Without a GPU, a path that can
be simulated runs on the processor, and its row says so. The status is 1 if a check fails.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from core.gpus import visible_gpus
from tests.gpu.paths import NAMES, environment

ROOT = Path(__file__).parents[2]
_TIMEOUT = 900
_LINES = 15


def run(name: str, *, on_gpu: bool) -> dict[str, Any]:
    """Runs a check and returns its row: status, seconds, and what was found."""
    row = {"status": "passed" if on_gpu else "simulated", "seconds": 0.0, "what": ""}
    folder, made_by = environment(name, on_gpu=on_gpu)
    python = ROOT / folder / "bin" / "python"
    if not python.exists():
        return row | {"status": "not run", "what": f"{folder} is missing: {made_by}"}
    command = [str(python), "-m", "tests.gpu.checks", name, *(["--gpu"] if on_gpu else [])]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return row | {"status": "failed", "what": f"no result after {_TIMEOUT} s"}
    row["seconds"] = round(time.monotonic() - started, 1)
    if done.returncode:
        print(f"--- {name}\n{''.join(done.stderr.splitlines(keepends=True)[-_LINES:])}")
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return row | {"status": "failed", "what": lines[-1][:200]}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return row | {"what": "; ".join(f"{key} {value}" for key, value in found.items())}


def main(names: list[str]) -> int:
    """Runs the named checks, or all, and prints a table."""
    gpus = visible_gpus()
    hardware = ", ".join(f"{gpu.name} ({gpu.memory >> 30} GiB)" for gpu in gpus)
    driver = f"; driver {gpus[0].driver}" if gpus else ""
    print(f"GPUs: {hardware or 'none; paths are simulated on the processor'}{driver}\n", flush=True)
    width = max(map(len, NAMES))
    failed = False
    for name in NAMES:
        if names and name not in names:
            continue
        row = run(name, on_gpu=bool(gpus))
        status, seconds = f"{row['status']:9}", f"{row['seconds']:6.1f} s"
        print(f"{name:{width}}  {status}  {seconds}  {row['what']}", flush=True)
        failed |= row["status"] == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
