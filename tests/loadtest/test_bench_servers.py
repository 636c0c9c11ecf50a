import os
import sys

import pytest

from loadtest.bench.options import BenchError
from loadtest.bench.service import free_port, run_server, watch_memory
from loadtest.bench.wrk import bodies, drive, parse

SUMMARY = (
    '{"seconds": 2.0, "requests": 210, "p50_ms": 1.5, "p90_ms": 2.5, "p99_ms": 3.5, '
    '"max_ms": 9.0, "errors": {"status": 10, "connect": 0, "read": 0, "write": 0, "timeout": 0}}'
)
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


def test_the_summary_of_wrk_is_read():
    load = parse(f"Running 2s test\n\n{SUMMARY}\n", 8, busy=0.1)
    assert load.connections == 8
    assert load.qps == 100.0  # answers of 400 and above do not count
    assert load.wrk_share == 0.05
    assert load.p99_ms == 3.5


def test_output_without_a_summary_is_an_error():
    with pytest.raises(BenchError, match="unable to connect"):
        parse("unable to connect to 127.0.0.1\n", 8, busy=0.1)


def test_errors_under_load_are_not_passed_over(tmp_path, monkeypatch):
    wrk = tmp_path / "wrk"
    wrk.write_text(f"#!/bin/sh\necho '{SUMMARY}'\n")
    wrk.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BenchError, match="'status': 10"):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_a_missing_wrk_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="apt-get install wrk"):
        drive("http://127.0.0.1:1", ["{}"], 1, 1)


def test_bodies_are_single_lines():
    assert bodies(["一\n二"], 3) == ['{"query": "一\\n二", "top_k": 3}']


def test_a_server_runs_until_the_block_ends():
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with run_server(command, port, "/", os.environ) as server:
        assert server.metric("care_total") == 5.0
        with pytest.raises(BenchError, match="does not show care_tot"):
            server.metric("care_tot")
        with watch_memory(server, every=0.01) as memory:
            server.get("/")
        assert 0 < memory.as_json()["before"] <= memory.as_json()["max"]
    assert not server.process.is_running()


def test_a_server_that_ends_shows_why():
    command = [sys.executable, "-c", "raise SystemExit('no index')"]
    with (
        pytest.raises(BenchError, match="no index"),
        run_server(command, free_port(), "/", os.environ),
    ):
        pass
