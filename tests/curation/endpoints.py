"""Scripted endpoints: what each answers and how often each question was asked."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from models.curation import prompts
from models.curation.config import Endpoint
from models.curation.scripted import Body


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
        query, passages = prompts.read_judge_question(body["messages"][1]["content"])
        return json.dumps(
            {name: grade(body["model"], query, text) for name, text in passages.items()}
        )

    return respond
