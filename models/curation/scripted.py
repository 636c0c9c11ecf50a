"""An OpenAI-compatible server on this machine whose answers a function gives.

Experiments use it as judges whose errors are known, tests as servers that fail.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = Mapping[str, Any]
# Returns the text of an answer, or writes a response of its own and returns None.
Respond = Callable[[Body, BaseHTTPRequestHandler], str | None]


@contextmanager
def scripted_server(respond: Respond) -> Iterator[str]:
    """Yields the address, up to /v1, of a server of `/v1/chat/completions`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body leave together; otherwise each answer waits for an acknowledgement.
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if (text := respond(body, self)) is not None:
                send_json(self, 200, completion(body, text))

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(body: Body, text: str) -> dict[str, Any]:
    """Returns a chat completion; tokens are counted as characters."""
    prompt = sum(len(message["content"]) for message in body["messages"])
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(text),
            "total_tokens": prompt + len(text),
        },
    }


def send_json(
    handler: BaseHTTPRequestHandler,
    status: int,
    value: Any,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Writes one whole JSON response."""
    content = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    for name, text in (headers or {}).items():
        handler.send_header(name, text)
    handler.end_headers()
    handler.wfile.write(content)
