"""Servers and processes that are measured."""

import os
import sys

import pytest

from core.errors import CareError
from core.service_process import free_port, running_server
from loadtest.bench.processes import Server, run_in_new_process, sampled
from tests.errors import raises

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
