"""Closed-loop load with wrk: each connection sends the next request after the last response.

wrk uses less than 1 % of the CPUs that it shares with the service. A Python client uses a quarter
of a CPU at the rates of cached queries.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core.choices import Mode
from core.errors import CareError

WARM_UP_SECONDS = 2
_SCRIPT = Path(__file__).with_name("search.lua")


def bodies(
    texts: Iterable[str], top_k: int, mode: Mode = "dense", *, rerank: bool = False
) -> list[str]:
    """Returns JSON bodies of `POST /search`; other systems search by vectors alone."""
    fields = {"top_k": top_k, "mode": mode} | ({"rerank": True} if rerank else {})
    return [json.dumps({"query": text, **fields}, ensure_ascii=False) for text in texts]


def drive(url: str, requests: Iterable[str], connections: int, seconds: int) -> dict[str, Any]:
    """Sends JSON bodies, without line breaks, to `POST /search` in turn for some seconds.

    Returns `qps`, requests with status 2xx or 3xx per second; the latencies `p50_ms`, `p90_ms`,
    `p99_ms` and `max_ms`; `requests`, `seconds` and `connections` of the run; and its `errors` by
    kind. CareError if wrk is missing or fails, or a request fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "bodies.jsonl"
        lines.write_text("\n".join(requests), encoding="utf-8")
        command = [
            *("wrk", "--threads", "1", "--connections", str(connections)),
            *("--duration", f"{seconds}s", "--timeout", "30s", "--script", str(_SCRIPT)),
            *(url, "--", "/search", str(lines)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            message = "wrk is missing; on Debian and Ubuntu: apt-get install wrk"
            raise CareError(message, code="wrk_missing") from error
    try:
        load: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError as error:
        message = f"wrk failed: {(done.stderr or done.stdout).strip()}"
        raise CareError(message, code="wrk_failed", status=done.returncode) from error
    if any(load["errors"].values()) or not load["requests"]:
        failed = ", ".join(f"{kind} {count}" for kind, count in load["errors"].items() if count)
        message = f"{load['requests']} requests to {url}, of which failed: {failed or 'none'}"
        raise CareError(message, code="requests_failed", **load["errors"])
    return load | {"connections": connections, "qps": load["requests"] / load["seconds"]}
