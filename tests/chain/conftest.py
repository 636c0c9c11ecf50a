"""The chain: the paper's recipes from raw texts to served answers, on tiny models.

`make chain` runs it. `test_training.py` runs in the environment of training and writes the folder
that `test_serving.py` starts from, in the environment of vLLM.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "builds" / "chain"
# Widths of the document encoders; both are wider than the query encoder, as in the paper.
WIDTHS = {"care-0.3b-8b": 128, "care-0.3b-4b": 96}
PAIRS = tuple(WIDTHS)
# What a user sets so that all commands find the same folders; one thread in each process.
VARIABLES = {
    "CARE_PAIRS": str(FOLDER / "pairs"),
    "CARE_INDEXES": str(FOLDER / "indexes"),
    "CARE_BUILDS": str(FOLDER / "builds"),
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.train


class Steps:
    """Runs commands and collects a line for each step."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, seconds: float | None, result: str) -> None:
        """Adds a line of the table that is printed at the end."""
        took = "" if seconds is None else f"{seconds:.1f}"
        self.lines.append(f"{name:<34}{took:>7}  {result}")

    def care(self, *words: str, name: str = "", processes: int = 1) -> dict[str, Any]:
        """Runs a command of `care` as a user does, and returns its result.

        Args:
            words: The command line.
            name: Name of the step; by default the first two words.
            processes: Number of processes that torchrun starts.
        """
        launcher = ["-m", "care"]
        if processes > 1:
            run = ["-m", "torch.distributed.run", "--standalone"]
            launcher = [*run, f"--nproc-per-node={processes}", *launcher]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *launcher, *words, "--json"],
            cwd=ROOT,
            env=os.environ | VARIABLES,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        result: dict[str, Any] = json.loads(done.stdout)
        shown = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in result.items()
            if isinstance(value, int | float)
        }
        facts = ", ".join(f"{key} {value}" for key, value in shown.items())
        self.add(name or " ".join(words[:2]), time.monotonic() - started, facts)
        return result


_STEPS = Steps()


@pytest.fixture(scope="session")
def steps() -> Iterator[Steps]:
    return _STEPS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _STEPS.lines:
        terminalreporter.section("the chain: steps, seconds, results")
        for line in _STEPS.lines:
            terminalreporter.write_line(line)
