"""An embedding server with scripted responses."""

import base64
import json
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from core.types import FloatArray
from core.vectors import truncate_normalize
from tests.encoders import make_spec

SPEC = make_spec("document").model_copy(update={"dimension": 16, "prompt": "文："})
NATIVE = SPEC.native_dimension

Answer = Callable[["Handler", dict[str, Any]], None]


def native(text: str) -> FloatArray:
    """Returns the vector that the server computes for an input."""
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    return generator.standard_normal(NATIVE).astype(np.float32)


def expected(texts: Sequence[str]) -> FloatArray:
    vectors = np.stack([native(SPEC.prompt + text) for text in texts])
    return truncate_normalize(vectors, SPEC.dimension)


def item(index: int, vector: FloatArray, form: str = "base64") -> dict[str, Any]:
    packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return {"index": index, "embedding": packed if form == "base64" else vector.tolist()}


def items(body: dict[str, Any], form: str = "base64") -> list[dict[str, Any]]:
    return [item(i, native(text), form) for i, text in enumerate(body["input"])]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "FakeServer"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.paths.append(self.path)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.times.append(time.monotonic())
            faults = self.server.faults
            answer = faults.popleft() if faults else self.server.answer
        answer(self, body)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_items(self, data: Any, **more: Any) -> None:
        self.send(200, json.dumps({"object": "list", "data": data} | more).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    """Responds with the scripted faults in order, and then normally."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self.faults: deque[Answer] = deque()
        self.answer: Answer = plain
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []

    def script(self, *faults: Answer) -> None:
        """Sets the faults of the next requests and clears the record of earlier ones."""
        self.faults.extend(faults)
        self.requests.clear()
        self.times.clear()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)


def plain(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_items(items(body))


def status(code: int, **headers: str) -> Answer:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        # A server can quote its input.
        handler.send(code, json.dumps({"error": body["input"]}).encode(), **headers)

    return answer


def hang_up(handler: Handler, body: dict[str, Any]) -> None:
    handler.close_connection = True
