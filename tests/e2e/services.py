"""What several tests of running services need: indexes to serve, and waiting for them."""

import time
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from care.cli.main import main
from tests.conftest import write_jsonl


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> float:
    """Waits until a condition holds, and returns for how long [s]."""
    started = time.monotonic()
    while True:
        try:
            if holds():
                return time.monotonic() - started
        except (OSError, HTTPException, ValueError):  # a worker has just ended
            pass
        assert time.monotonic() < started + seconds
        time.sleep(0.02)


def build_index(folder: Path, name: str, records: Iterable[dict[str, Any]], *options: str) -> Path:
    """Builds an index with care-mini; returns the folder of indexes."""
    corpus = write_jsonl(folder / f"{name}.jsonl", list(records))
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main(["index", str(corpus), "--index", name, *folders, *options]) == 0
    return folder / "indexes"
