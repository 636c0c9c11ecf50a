import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from loadtest.bench.bare import Way
from loadtest.bench.options import BenchError, Options


def run_bare(options: Options, task: str, seconds: float, way: Way | None = None) -> Any:
    """Runs `loadtest.bench.bare` in a process of its own and returns what it found.

    Raises:
        BenchError: If it fails.
    """
    command = [
        *(sys.executable, "-m", "loadtest.bench.bare", "--task", task),
        *("--indexes", str(options.indexes), "--index", options.index, "--pair", options.pair),
        *("--queries", str(options.queries), "--top-k", str(options.top_k)),
        *("--seconds", str(seconds)),
    ]
    if way:
        command += ["--way", json.dumps(asdict(way))]
    # Threads of FAISS that wait must not take the processor from the encoder.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"the bare loop failed:\n{done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)
