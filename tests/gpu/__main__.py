"""Checks every path on GPUs: `make test-gpu`.

Each check is a process of its own, in the environment that it needs; one that fails does not stop
the others. Without a GPU, small models run on the processor and FAISS's GPUs are simulated, and the
row says so. The status is 1 if a check fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
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
_GRACE = 10  # what a check that is ended may take for it [s]


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
    with subprocess.Popen(
        [*command, *(["--gpu"] if on_gpu else [])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as error:
            _stop(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return row | {"seconds": timeout, "error": f"no result after {timeout:.0f} s"}
    row["seconds"] = round(time.monotonic() - started, 1)
    if process.returncode:
        print(f"--- {name}\n{''.join(errors.splitlines(keepends=True)[-_LINES:])}---")
        lines = errors.strip().splitlines() or [f"status {process.returncode}"]
        return row | {"error": lines[-1][:300]}
    found = json.loads(output.splitlines()[-1])
    if "missing" in found:
        return row | {"status": "not installed", "error": found["missing"]}
    return row | {"status": "passed" if on_gpu else "simulated", "figures": found["figures"]}


def _stop(process: "subprocess.Popen[str]") -> None:
    """Ends a check and the processes that it has started, which may hold the GPU's memory.

    The processes of torchrun have groups of their own, and torchrun ends them at SIGTERM.
    """
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
    parser.add_argument("--limit", type=float, default=480, help="of all checks together [s]")
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
    ends = time.monotonic() + options.limit
    with TemporaryDirectory() as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for name in options.names or NAMES:
            left = min(options.timeout, ends - time.monotonic())
            if left > 0:
                row = run(name, scratch, left, on_gpu=bool(gpus))
            else:
                error = f"all checks together may take {options.limit:.0f} s: name this one"
                row = {"name": name, "status": "not run", "seconds": 0.0, "error": error}
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
