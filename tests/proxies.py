"""A server that is used as a model server, as a search service, and as a proxy to them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.models.encoders.embedding_server import NATIVE

_ANSWERS = {
    "/v1/embeddings": {"data": [{"index": 0, "embedding": [1.0] + [0.0] * (NATIVE - 1)}]},
    "/v1/rerank": {"results": [{"index": 0, "relevance_score": 1.0}]},
    "/v1/chat/completions": {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "{}"},
            }
        ],
    },
    "/search/batch": {"results": [{"hits": []}]},
    "/health/live": {"status": "live"},
}


@contextmanager
def recording_server() -> Iterator[tuple[int, list[str]]]:
    """Yields the port of a server on 127.0.0.1 and the targets of the requests that it got."""
    targets: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            targets.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps(_ANSWERS.get(urlsplit(self.path).path, {})).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port, targets
        finally:
            server.shutdown()
            thread.join()
