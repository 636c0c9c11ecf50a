"""The real service in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def start_service(
    indexes: Path, index: str, **settings: str
) -> tuple["subprocess.Popen[str]", str]:
    """Starts `python -m service` on a free port; returns the process and its address."""
    variables = {"INDEXES": str(indexes), "INDEX": index, "PORT": "0", "LOG_LEVEL": "warning"}
    environment = os.environ | {f"CARE_{k}": v for k, v in (variables | settings).items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "service"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    line = process.stdout.readline()
    assert line, "the service did not start"
    return process, line.split()[-1]


@contextmanager
def run_service(indexes: Path, index: str, **settings: str) -> Iterator[str]:
    """Starts the service, yields its address, and sees it end well."""
    process, address = start_service(indexes, index, **settings)
    try:
        yield address
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0
