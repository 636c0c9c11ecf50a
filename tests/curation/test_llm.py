import asyncio
import json
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from curation.config import Budget, Endpoint
from curation.ledger import BudgetError, LanguageModelError
from curation.llm import LanguageModels, Question
from tests.curation.endpoints import (
    Recorder,
    completion,
    endpoint,
    scripted_server,
    send_json,
)
from tests.errors import raises


class Colour(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: str


BLUE = json.dumps({"colour": "blue"})


def question(text: str = "sky", **changes: Any) -> Callable[[], Question[Colour]]:
    """Builds a question on demand."""
    facts = {
        "id": text,
        "system": "Name a colour.",
        "user": text,
        "again": "Wrong: {complaint}.",
        "answer": Colour,
    }
    return partial(Question, **(facts | changes))


@pytest.fixture
def serve() -> Any:
    """Starts scripted endpoints, which stop after the test."""
    with ExitStack() as stack:

        def start(respond: Callable[..., str | None]) -> tuple[Recorder, str]:
            recorder = Recorder(respond)
            return recorder, stack.enter_context(scripted_server(recorder))

        yield start


def models(tmp_path: Path, *endpoints: Endpoint, **options: Any) -> LanguageModels:
    return LanguageModels(endpoints, tmp_path / "calls.sqlite", **options)


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """Asks an endpoint, by default one question; returns answers, costs and invalid answers."""

    def run(asked: Endpoint, *questions: Callable[[], Question[Colour]], **options: Any) -> Any:
        with models(tmp_path, asked, **options) as llm:
            answers = llm.ask({asked.name: questions or [question()]}, "test")
            return answers[asked.name], llm.costs()[asked.name], llm.invalid

    return run


def test_answers_come_in_the_order_of_the_questions(serve: Any, ask: Any) -> None:
    recorder, url = serve(lambda body, *_: json.dumps({"colour": body["messages"][1]["content"]}))
    texts = [f"q{i}" for i in range(30)]
    answers, *_ = ask(endpoint(url, concurrency=5), *map(question, texts))
    assert [answer and answer.colour for answer in answers] == texts
    sent = recorder.bodies[0]
    assert sent["response_format"]["json_schema"]["schema"] == Colour.model_json_schema()
    assert (sent["temperature"], sent["max_tokens"]) == (0, 512)


def test_concurrency_is_limited(serve: Any, ask: Any) -> None:
    lock, now, most = threading.Lock(), 0, 0

    def respond(*_: object) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return BLUE

    _, url = serve(respond)
    ask(endpoint(url, concurrency=3), *map(question, map(str, range(20))))
    assert most == 3


def test_answers_in_the_ledger_are_reused(serve: Any, ask: Any) -> None:
    recorder, url = serve(lambda *_: BLUE)
    for _ in range(2):
        # Equal concurrent questions are one call.
        _, costs, _ = ask(endpoint(url), question("a"), question("a"), question("b"))
    assert sorted(recorder.asked.values()) == [1, 1]
    assert (costs["calls"], costs["answered"], costs["reused"]) == (2, 2, 3)


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"temperature": 1}, {"extra_body": {"x": 1}}, {"name": "other"}]
)
def test_calls_with_different_content_are_not_reused(
    serve: Any, ask: Any, change: dict[str, Any]
) -> None:
    recorder, url = serve(lambda *_: BLUE)
    for changes in ({}, change):
        ask(endpoint(url, **changes))
    assert len(recorder.bodies) == 2


def test_the_address_is_not_part_of_the_key(serve: Any, ask: Any) -> None:
    (_, first), (second, other) = serve(lambda *_: BLUE), serve(lambda *_: BLUE)
    for url in (first, other):
        ask(endpoint(url))
    assert not second.bodies


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("blue", "Wrong: "),
        ('{"colour": 3}', "Wrong: colour: "),
        ("{}", "Wrong: colour: "),
        ('{"colour": "blue", "shade": 1}', "Wrong: shade: "),
        ("", "Wrong: "),
    ],
)
def test_an_invalid_answer_is_repeated_with_its_error(
    serve: Any, ask: Any, bad: str, complaint: str
) -> None:
    recorder, url = serve(lambda body, *_: bad if len(body["messages"]) == 2 else BLUE)
    answers, _, invalid = ask(endpoint(url))
    assert (answers, invalid) == ([Colour(colour="blue")], [])
    *_, given, again = recorder.bodies[1]["messages"]
    assert given == {"role": "assistant", "content": bad}
    assert again["content"].startswith(complaint)


def test_invalid_answers_are_recorded(serve: Any, ask: Any) -> None:
    recorder, url = serve(lambda body, *_: BLUE if body["messages"][1]["content"] == "sky" else "?")
    for _ in range(2):
        answers, costs, (invalid,) = ask(endpoint(url), question("fog"), question(), attempts=2)
    assert answers == [None, Colour(colour="blue")]
    assert (invalid.endpoint, invalid.id) == ("judge", "fog")
    assert [tried["text"] for tried in invalid.tried] == ["?", "?"]
    assert all(tried["complaint"] for tried in invalid.tried)
    assert len(recorder.bodies) == 3
    assert costs["invalid"] == 1


def test_an_answer_in_a_fence_and_a_check_of_code(serve: Any, ask: Any) -> None:
    fenced = {2: '```json\n{"colour": "red"}\n```', 4: f"```\n{BLUE}\n```"}
    _, url = serve(lambda body, *_: fenced[len(body["messages"])])
    asked = question(check=lambda answer: "red is no colour" if answer.colour == "red" else "")
    assert ask(endpoint(url), asked)[0] == [Colour(colour="blue")]


def reject(status: int, headers: dict[str, str] | None = None) -> Callable[..., str | None]:
    """Fails at the first call of each question."""

    def respond(_: object, handler: Any, before: int) -> str | None:
        if before:
            return BLUE
        send_json(handler, status, {"error": {"message": "not now"}}, headers)
        return None

    return respond


def cut(_: object, handler: Any, before: int) -> str | None:
    if before:
        return BLUE
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    # Linger of 0: closing resets the connection.
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    return None


def other_content(body: Any, handler: Any, before: int) -> str | None:
    if before:
        return BLUE
    answer = completion(body, "")
    answer["choices"][0]["message"]["content"] = [{"type": "text", "text": BLUE}]
    send_json(handler, 200, answer)
    return None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("respond", "lost"),
    [(reject(503), 0), (cut, 1), (other_content, 1)],
    ids=["503", "cut", "other content"],
)
def test_a_call_that_is_retried_has_a_cost(
    serve: Any, ask: Any, respond: Callable[..., str | None], lost: int
) -> None:
    _, url = serve(respond)
    answers, costs, _ = ask(endpoint(url))
    assert answers == [Colour(colour="blue")]
    assert (costs["calls"], costs["answered"]) == (2, 1)
    assert (costs["lost"], costs["failed"]) == (lost, 1 - lost)
    # A lost call may have been charged: it counts with the most tokens that it could use.
    assert (costs["answer_tokens"] > 512) == bool(lost)


@pytest.mark.parametrize("form", ["number", "date"])
def test_retry_after_is_respected(
    serve: Any, ask: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    wait = {"number": "100", "date": formatdate(time.time() + 100, usegmt=True)}[form]
    _, url = serve(reject(429, {"Retry-After": wait}))
    ask(endpoint(url))
    assert 90 < max(waits) <= 100


def test_a_long_retry_after_stops_the_command(serve: Any, ask: Any) -> None:
    recorder, url = serve(reject(503, {"Retry-After": "601"}))
    with raises(LanguageModelError, code="language_model_failed", endpoint="judge", wait=601.0):
        ask(endpoint(url))
    assert len(recorder.bodies) == 1


def test_repeated_failures_stop_the_command(serve: Any, ask: Any) -> None:
    def respond(_: object, handler: Any, __: int) -> None:
        send_json(handler, 500, {})

    _, url = serve(respond)
    with raises(LanguageModelError, code="language_model_failed", endpoint="judge", attempts=3):
        ask(endpoint(url, retries=2))


def test_an_unreachable_endpoint_is_reported(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    with raises(LanguageModelError, code="language_model_failed"):
        ask(endpoint(url, retries=2), *map(question, map(str, range(20))))
    # During the retries, and once for all waiting calls.
    assert capsys.readouterr().err.count(f"{url} (judge) ") == 1


def test_a_permanent_failure_ends_the_run(serve: Any, ask: Any) -> None:
    recorder, url = serve(reject(400))
    with raises(LanguageModelError, code="request_rejected", endpoint="judge", status=400):
        ask(endpoint(url, concurrency=1), question("a"), question("b"))
    assert len(recorder.bodies) == 1


def reject_long(body: Any, handler: Any, _: int) -> str | None:
    if body["messages"][1]["content"] != "long":
        return BLUE
    send_json(handler, 400, {"error": {"message": "too long"}})
    return None


def test_a_rejected_question_has_no_answer(serve: Any, ask: Any) -> None:
    recorder, url = serve(reject_long)
    for _ in range(2):
        answers, _, invalid = ask(endpoint(url, concurrency=1), *map(question, ("a", "long", "b")))
        assert "too long" in invalid[0].tried[0]["complaint"]
    assert [answer is None for answer in answers] == [False, True, False]
    assert len(recorder.bodies) == 3


def test_a_rejection_after_a_kill_concerns_the_question(serve: Any, ask: Any) -> None:
    """Answers from before the kill show that the endpoint works."""
    _, url = serve(reject_long)
    for texts in (["a"], ["a", "long"]):
        answers, *_ = ask(endpoint(url, concurrency=1), *map(question, texts))
    assert [answer is None for answer in answers] == [False, True]


def test_a_key_is_read_from_the_environment(
    serve: Any, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def respond(_: object, handler: Any, __: int) -> str:
        seen.append(handler.headers["Authorization"])
        return BLUE

    _, url = serve(respond)
    with raises(LanguageModelError, code="missing_api_key", variable="MY_KEY", endpoint="judge"):
        ask(endpoint(url, api_key_env="MY_KEY"))
    monkeypatch.setenv("MY_KEY", "sk-1")
    ask(endpoint(url, api_key_env="MY_KEY"))
    assert seen == ["Bearer sk-1"]
    assert b"sk-1" not in (tmp_path / "calls.sqlite").read_bytes()


def test_the_budget_of_calls_is_not_exceeded_and_can_be_increased(serve: Any, ask: Any) -> None:
    recorder, url = serve(lambda *_: BLUE)
    asked = [question(str(i)) for i in range(10)]
    with raises(BudgetError, code="budget_spent", calls=4):
        ask(endpoint(url), *asked, budget=Budget(calls=4))
    assert len(recorder.bodies) == 4
    assert None not in ask(endpoint(url), *asked, budget=Budget(calls=10))[0]
    assert set(recorder.asked.values()) == {1}


def test_the_budget_of_tokens_is_not_exceeded_and_is_used(
    serve: Any, ask: Any, tmp_path: Path
) -> None:
    recorder, url = serve(lambda *_: BLUE)
    asked = [question(str(i)) for i in range(100)]
    # A call uses 34 tokens here and could use about 350.
    with raises(BudgetError, code="budget_spent", tokens=1000):
        ask(endpoint(url, max_tokens=50), *asked, budget=Budget(tokens=1000))
    with models(tmp_path, endpoint(url)) as llm:
        costs = llm.costs()["judge"]
    used = costs["prompt_tokens"] + costs["answer_tokens"]
    assert 600 < used <= 1000
    assert len(recorder.bodies) == costs["answered"] > 15


def test_costs_by_endpoint(serve: Any, tmp_path: Path) -> None:
    _, url = serve(lambda *_: BLUE)
    dear = endpoint(url, "dear", input_price=1e6, output_price=2e6)
    with models(tmp_path, dear, endpoint(url, "free")) as llm:
        llm.ask({"dear": [question()], "free": [question(), question("fog")]}, "test")
        costs = llm.costs()
    tokens = len("Name a colour.sky"), len(BLUE)
    assert (costs["dear"]["prompt_tokens"], costs["dear"]["answer_tokens"]) == tokens
    assert costs["dear"]["price"] == tokens[0] + 2 * tokens[1]
    assert (costs["free"]["price"], costs["all"]["calls"]) == (0, 3)


KILLED = """
import sys
from pathlib import Path
from tests.curation.test_llm import endpoint, models, question
with models(Path(sys.argv[1]), endpoint(sys.argv[2], concurrency=2)) as llm:
    llm.ask({"judge": [question(str(i)) for i in range(20)]}, "test")
"""


@pytest.mark.e2e
def test_a_killed_command_resumes_without_repeating_answered_calls(
    serve: Any, ask: Any, tmp_path: Path
) -> None:
    held, release = threading.Event(), threading.Event()
    answered = []

    def respond(body: Any, handler: Any, _: int) -> str | None:
        if len(answered) >= 7 and not release.is_set():
            held.set()
            release.wait(30)
            handler.close_connection = True
            return None
        answered.append(body["messages"][1]["content"])
        return BLUE

    recorder, url = serve(respond)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), url])
    assert held.wait(60)
    database = sqlite3.connect(tmp_path / "calls.sqlite")
    count = "SELECT count(*) FROM calls WHERE state = 'answered'"
    while database.execute(count).fetchone()[0] < len(answered):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    release.set()
    before = set(answered)

    answers, costs, _ = ask(endpoint(url, concurrency=2), *map(question, map(str, range(20))))
    assert None not in answers
    asked = {key.split()[1]: times for key, times in recorder.asked.items()}
    assert all(asked[text] == 1 for text in before)
    assert len(answered) == len(set(answered)) == 20
    # The calls in flight when it was killed; their results are unknown.
    assert costs["reused"] == len(before)
    assert 1 <= costs["lost"] <= 2
