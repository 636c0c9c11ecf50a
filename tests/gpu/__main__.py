"""Checks every path on GPUs: `make test-gpu`.

Each check is a process of its own, in the environment that it needs; one that fails does not stop
the others. Without a GPU, small models run on the processor and FAISS's GPUs are simulated, and the
row says so. The status is 1 if a check fails.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.machine import visible_gpus

ROOT = Path(__file__).parents[2]
NAMES = (
    "documents-8b",
    "lora-8b",
    "train-8b",
    "query-0-3b",
    "transformers",
    "fsdp2",
    "onnxruntime-0-3b",
    "onnxruntime-cuda",
    "onnxruntime-tensorrt",
    "faiss-build",
    "faiss-search",
    "vllm",
)
_LINES = 25


def python(name: str, *, on_gpu: bool) -> str:
    """Returns the interpreter of a check: vLLM has an environment of its own, if that is made."""
    folder = ".venv-vllm" if on_gpu else ".venv-engines"
    own = ROOT / folder / "bin" / "python"
    return str(own) if name == "vllm" and own.exists() else sys.executable


def run(name: str, scratch: Path, timeout: float, *, on_gpu: bool) -> dict[str, Any]:
    """Runs a check and returns its row: name, status, seconds, and its figures or what failed."""
    row: dict[str, Any] = {"name": name, "status": "failed", "seconds": 0.0}
    command = [python(name, on_gpu=on_gpu), "-m", "tests.gpu.checks", name, str(scratch)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    if not on_gpu:
        environment["OMP_NUM_THREADS"] = "1"
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *(["--gpu"] if on_gpu else [])],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return row | {"seconds": timeout, "error": f"no result after {timeout:.0f} s"}
    row["seconds"] = round(time.monotonic() - started, 1)
    if done.returncode:
        print(f"--- {name}\n{''.join(done.stderr.splitlines(keepends=True)[-_LINES:])}---")
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return row | {"error": lines[-1][:300]}
    found = json.loads(done.stdout.splitlines()[-1])
    if "missing" in found:
        return row | {"status": "not installed", "error": found["missing"]}
    return row | {"status": "passed" if on_gpu else "simulated", "figures": found["figures"]}


def what(row: dict[str, Any]) -> str:
    """Returns the figures of a row in words, or its error."""
    figures: dict[str, str] = row.get("figures", {})
    return row.get("error") or "; ".join(f"{key} {value}" for key, value in figures.items())


def main() -> int:
    """Runs the named checks, or all; prints a line for each, then all as a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CHECK", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--timeout", type=float, default=180, help="of each check [s]")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints, which is kept")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(
            f"there is no check {', '.join(sorted(unknown))}: choose of {', '.join(NAMES)}"
        )
    gpus = visible_gpus()
    hardware = ", ".join(f"{gpu.name} ({gpu.memory >> 30} GiB)" for gpu in gpus)
    driver = f"; driver {gpus[0].driver}" if gpus else ""
    print(f"GPUs: {hardware or 'none; paths are simulated on the processor'}{driver}\n", flush=True)
    rows = []
    with TemporaryDirectory() as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for name in options.names or NAMES:
            row = run(name, scratch, options.timeout, on_gpu=bool(gpus))
            status, seconds = f"{row['status']:13}", f"{row['seconds']:6.1f} s"
            print(f"{name:20}  {status}  {seconds}  {what(row)}", flush=True)
            rows.append(row)
    if options.json:
        found = {"hardware": hardware, "driver": gpus[0].driver if gpus else "", "checks": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n| check | on {hardware or 'a processor'} | s | figures |\n|---|---|---|---|")
    for row in rows:
        print(f"| `{row['name']}` | {row['status']} | {row['seconds']:.0f} | {what(row)} |")
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
