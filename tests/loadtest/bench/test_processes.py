"""Servers and processes that are measured."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.service_process import free_port, running_server
from loadtest.bench.processes import Server, bodies, drive, run_in_new_process, sampled
from tests.errors import raises
from tests.loadtest.bench.conftest import ERRORS, SUMMARY

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = b"# HELP care_total x\\ncare_total{a=\\"1\\"} 2.0\\ncare_total{a=\\"2\\"} 3.0\\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_measured_until_the_block_ends() -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with running_server(
        command, f"http://127.0.0.1:{port}", "/", environment=os.environ
    ) as process:
        server = Server(process)
        assert server.metric("care_total") == 5.0
        with raises(CareError, "metric_missing", metric="care_tot"):
            server.metric("care_tot")
        with sampled(server.rss, every=0.01) as samples:
            server.get("/")
        assert 0 < samples[0] <= max(samples)
        assert len(samples) >= 2
        assert server.cpu() > 0
        assert server.rss() > 0
    assert not server.process.is_running()


@pytest.mark.e2e
def test_work_in_a_fresh_process_returns_or_raises() -> None:
    assert run_in_new_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        run_in_new_process(divmod, 1, 0)


def _prints(wrk: Path, *lines: str, status: int = 0) -> None:
    text = "\n".join(f"echo '{line}'" for line in lines)
    wrk.write_text(f"#!/bin/sh\n{text}\nexit {status}\n")
    wrk.chmod(0o755)


def _summary(**changes: Any) -> str:
    return json.dumps(SUMMARY | changes)


def test_the_summary_is_read(wrk: Path) -> None:
    _prints(wrk, "Running 2s test", "", _summary())
    load = drive("http://127.0.0.1:1", ["{}"], 8, 2)
    assert load["connections"] == 8
    assert load["qps"] == 100.0
    assert load["p99_ms"] == 3.5


def test_output_without_a_summary_is_an_error(wrk: Path) -> None:
    _prints(wrk, "unable to connect to 127.0.0.1:1", status=1)
    with raises(CareError, "wrk_failed", status=1):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


@pytest.mark.parametrize("changes", [{"errors": ERRORS | {"status": 10}}, {"requests": 0}])
def test_failed_requests_are_an_error(wrk: Path, changes: dict[str, Any]) -> None:
    _prints(wrk, _summary(**changes))
    with raises(CareError, "requests_failed", **changes.get("errors", ERRORS)):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_wrk_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(CareError, "wrk_missing"):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_bodies_are_single_lines() -> None:
    assert bodies(["一\n二"], 3) == ['{"query": "一\\n二", "top_k": 3, "mode": "dense"}']
