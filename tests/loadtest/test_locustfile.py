"""Locust in a separate process, started like `make loadtest`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loadtest.known_service import KnownService, served

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def _locust(url: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"),
        *("--users", "2", "--spawn-rate", "2", "--run-time", "2s", "--host", url),
        *("--csv", str(out / "report"), "--html", str(out / "report.html"), *options),
    ]
    environment = os.environ | {"CARE_LOAD_KEY": "secret-key"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _codes(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the codes at the end of the error lines."""
    return re.findall(r"error: .*\[(\w+)\]$", run.stderr, re.MULTILINE)


def test_within_the_budget(tmp_path: Path) -> None:
    service = KnownService(key="secret-key")
    with served(service) as url:
        run = _locust(url, tmp_path, "--min-rate", "1", "--batches", "0.3", "--filtered", "0.5")
    assert run.returncode == 0, run.stderr
    # Locust writes the CSV files with a delay of a second.
    assert (tmp_path / "report_stats.csv").is_file()
    stats = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in stats for name in ('"/search"', '"/search filtered"', '"/search/batch"'))
    texts = [q["query"] for body in service.bodies for q in body.get("queries", [body])]
    fresh = [text for text in texts if text.endswith("天）")]
    assert 0 < len(set(fresh)) == len(fresh) < len(texts)


def test_a_missed_rate_fails(tmp_path: Path) -> None:
    with served(KnownService()) as url:
        run = _locust(url, tmp_path, "--min-rate", "1000000")
    assert run.returncode == 1
    assert _codes(run) == ["low_rate"]


def test_an_exceeded_error_rate_fails(tmp_path: Path) -> None:
    """One request of three gets 429."""
    with served(KnownService(statuses=(200, 200, 429))) as url:
        run = _locust(url, tmp_path, "--max-error-rate", "0.01")
    assert run.returncode == 1, run.stderr
    assert _codes(run) == ["high_error_rate"]
    assert "code=429" in run.stdout + run.stderr


def test_an_unreachable_service_fails(tmp_path: Path) -> None:
    run = _locust("http://127.0.0.1:9", tmp_path)
    assert run.returncode == 1
    assert "user_failed" in _codes(run) or "high_error_rate" in _codes(run)
