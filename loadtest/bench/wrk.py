"""Closed-loop load with wrk: each connection sends its next request once the last is answered."""

import json
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.cpus import available_cpus
from loadtest.bench.options import BenchError

SCRIPT = Path(__file__).with_name("search.lua")

_MISSING = "wrk is missing; on Debian and Ubuntu: apt-get install wrk"


@dataclass(frozen=True, slots=True)
class Load:
    """What came of one run.

    Attributes:
        connections: Clients at once.
        seconds: Length of the run.
        requests: Requests answered, whatever their status.
        qps: Requests answered with 2xx or 3xx per second.
        p50_ms: Median latency; the others likewise.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile.
        max_ms: The longest.
        wrk_share: wrk's own part of the time of all processors that it could use.
        errors: Requests that failed, by kind; `status` counts those of 400 and above.
    """

    connections: int
    seconds: float
    requests: int
    qps: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    wrk_share: float
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """The attributes."""
        return asdict(self)


def bodies(texts: Iterable[str], top_k: int) -> list[str]:
    """JSON bodies of `POST /search`."""
    return [json.dumps({"query": t, "top_k": top_k}, ensure_ascii=False) for t in texts]


def drive(url: str, requests: Iterable[str], connections: int, seconds: int) -> Load:
    """Posts bodies to `/search` in turn, from one thread, until the time is over.

    Args:
        url: `http://host:port`.
        requests: JSON bodies, without line breaks.
        connections: Clients at once.
        seconds: Length of the run.

    Raises:
        BenchError: If wrk is not installed, fails, or gets an error or nothing in answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "bodies.jsonl"
        lines.write_text("\n".join(requests), encoding="utf-8")
        command = [
            *("wrk", "--threads", "1", "--connections", str(connections)),
            *("--duration", f"{seconds}s", "--timeout", "30s", "--script", str(SCRIPT)),
            *(url, "--", "/search", str(lines)),
        ]
        output, busy = _run(command)
    load = parse(output, connections, busy / available_cpus())
    if any(load.errors.values()):
        raise BenchError(f"requests failed under wrk: {load.errors}")
    if not load.requests:
        raise BenchError(f"{url} answered no request within {seconds} s")
    return load


def parse(output: str, connections: int, busy: float) -> Load:
    """Reads what the script printed last.

    Args:
        output: What wrk wrote.
        connections: Clients that it was told to be.
        busy: Processor seconds that it took, per processor.

    Raises:
        BenchError: If the summary is not there.
    """
    try:
        summary = json.loads(output.strip().rsplit("\n", 1)[-1])
    except json.JSONDecodeError as error:
        raise BenchError(f"wrk printed no summary: {output.strip()[-500:]}") from error
    good = summary["requests"] - summary["errors"]["status"]
    return Load(
        connections=connections,
        qps=good / summary["seconds"],
        wrk_share=busy / summary["seconds"],
        **summary,
    )


def _run(command: list[str]) -> tuple[str, float]:
    """Returns wrk's output and the processor seconds that it took."""
    if not shutil.which(command[0]):
        raise BenchError(_MISSING)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise BenchError(f"wrk failed: {(done.stderr or done.stdout).strip()[-500:]}")
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, busy
