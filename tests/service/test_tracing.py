import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from service.observe.metrics import STAGES
from service.observe.tracing import ENDPOINT, make_tracer
from tests.service.conftest import Serve

SECRET = "绝密病历"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector(HTTPServer):
    """An exporter that stores the spans that an OTLP collector would receive."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.bodies: list[bytes] = []

    def spans(self) -> list[Span]:
        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_is_a_span_with_a_child_for_each_stage(
    collector: Collector, serve: Serve
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "X-Request-ID": "mine"}
    client = serve()
    assert client.post("/search", json={"query": SECRET}, headers=headers).status_code == 200
    assert client.post("/search", json={"query": ""}).status_code == 422
    client.__exit__(None, None, None)
    spans = collector.spans()
    request, refused = (span for span in spans if span.name == "/search")
    assert request.trace_id.hex() == TRACE_ID
    assert request.parent_span_id.hex() == PARENT
    attributes = {a.key: a.value for a in request.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["care.request_id"].string_value == "mine"
    stages = [span for span in spans if span.parent_span_id == request.span_id]
    assert [span.name for span in stages] == [name for name in STAGES if name != "total"]
    assert request.start_time_unix_nano == stages[0].start_time_unix_nano
    for stage, following in pairwise(stages):
        assert stage.end_time_unix_nano == following.start_time_unix_nano
    assert stages[-1].end_time_unix_nano <= request.end_time_unix_nano
    assert not [span for span in spans if span.parent_span_id == refused.span_id]
    assert not any(SECRET.encode() in body for body in collector.bodies)


def test_tracing_is_disabled_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert make_tracer() is None


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from service.observe.tracing import make_tracer\n"
        "try: make_tracer()\n"
        "except Exception as error: print(error.code, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={ENDPOINT: "http://127.0.0.1:1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("missing_package ")
    assert "pip install 'care-retrieval[tracing]'" in done.stdout
