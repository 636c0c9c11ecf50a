"""A local server of a language model whose answers a function returns."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from curation.config import Endpoint

Body = Mapping[str, Any]
# Returns the text of an answer, or writes a response and returns None.
Respond = Callable[[Body, BaseHTTPRequestHandler], str | None]


@contextmanager
def scripted_server(respond: Respond) -> Iterator[str]:
    """Yields the address, up to /v1, of a server of `/v1/chat/completions`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Header and body are sent together; otherwise each response waits for an acknowledgement.
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
    content = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    for name, text in (headers or {}).items():
        handler.send_header(name, text)
    handler.end_headers()
    handler.wfile.write(content)


class Recorder:
    """Counts calls by their last message and passes them on.

    Args:
        respond: Gets the body, the handler and how often this question was asked before.
    """

    def __init__(self, respond: Callable[[Body, BaseHTTPRequestHandler, int], str | None]) -> None:
        self._respond = respond
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.bodies: list[Body] = []

    def __call__(self, body: Body, handler: BaseHTTPRequestHandler) -> str | None:
        key = f"{body['model']} {body['messages'][-1]['content']}"
        with self._lock:
            before = self.asked[key]
            self.asked[key] += 1
            self.bodies.append(body)
        return self._respond(body, handler, before)


def endpoint(url: str, name: str = "judge", **changes: Any) -> Endpoint:
    facts = {"name": name, "model": name, "base_url": url, "backoff": 0.01, "timeout": 20}
    return Endpoint.model_validate(facts | changes)


def grader(grade: Callable[[str, str, str], str]) -> Callable[..., str]:
    """Answers for a judge: `grade` gets the model, the query and the passage."""

    def respond(body: Body, *_: object) -> str:
        query, passages = read_question(body)
        return json.dumps(
            {name: grade(body["model"], query, text) for name, text in passages.items()}
        )

    return respond


def read_question(body: Body) -> tuple[str, Mapping[str, str]]:
    """Returns the query of a judge's prompt, and the passages by name."""
    material: dict[str, Any] = json.loads(body["messages"][1]["content"])
    return material["question"], material["passages"]
