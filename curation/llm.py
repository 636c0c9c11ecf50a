"""Questions to language models: answers are JSON, validated by a schema and cached."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

import openai
from pydantic import BaseModel, ValidationError

from core.errors import CareError
from core.progress import Progress, progress_bar, write_above
from core.retries import RetryPolicy, TransientError, is_rejection, is_transient, retry_after
from curation.config import Budget, Endpoint
from curation.ledger import Account, InvalidAnswer, LanguageModelError, Ledger, Outcome
from models.servers import TooLongError, http_client, limit_body

_LONGEST_RETRY_AFTER = 600.0
# The least time between two messages about a failing endpoint [s].
_MESSAGE_INTERVAL = 10.0
# Tokens that a chat template may add to each message.
_TEMPLATE_TOKENS = 32
_QUOTED_CHARS = 2000
# Largest response [bytes].
_ANSWER_BYTES = 16 * 1024 * 1024
_FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)
_MEANINGS = {
    401: "the API key is wrong or missing",
    403: "the API key has no access to this model",
    404: "the model or the address is wrong",
}
_COSTS = (
    *("calls", "answered", "rejected", "failed", "lost", "reused", "invalid"),
    *("prompt_tokens", "answer_tokens", "price"),
)

Answer = TypeVar("Answer", bound=BaseModel)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """A question and the schema of its answer."""

    id: str  # in the file of invalid answers
    system: str  # no system message if empty
    user: str
    again: str  # the message after an invalid answer; `{complaint}` is replaced by the error
    answer: type[Answer]
    # Returns the error of an answer that fits the schema, or "".
    check: Callable[[Answer], str] = lambda _: ""


class LanguageModels:
    """Endpoints that share a ledger and a budget.

    Answers in the ledger are reused. When the budget is spent or an endpoint fails, calls in flight
    are completed and recorded; a later run continues from there.

    Args:
        budget: Limits on all runs with this ledger. A call is sent only if the most tokens that it
            can use fit: one per byte of the prompt, and `max_tokens` of the answer.
        attempts: How often a question is asked until an answer is valid.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        ledger: Path,
        budget: Budget | None = None,
        attempts: int = 3,
    ) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._keys = {endpoint.name: _api_key(endpoint) for endpoint in endpoints}
        self._account = Account(Ledger(ledger), budget or Budget(), attempts)

    @property
    def invalid(self) -> list[InvalidAnswer]:
        """The questions without a valid answer so far, by endpoint and id."""
        return sorted(self._account.invalid, key=lambda item: (item.endpoint, item.id))

    def ask(
        self, questions: Mapping[str, Sequence[Callable[[], Question[Answer]]]], title: str
    ) -> dict[str, list[Answer | None]]:
        """Asks each endpoint its questions.

        Args:
            questions: Functions that build the questions, by the name of the endpoint.

        Returns:
            The answers of each endpoint, in the order of its questions; None for a question without
            a valid answer, see `invalid`.
        """
        answers: dict[str, list[Answer | None]] = {
            name: [None] * len(asked) for name, asked in questions.items()
        }
        self._account.stopped, self._account.changed = None, asyncio.Event()

        async def work(progress: Progress) -> None:
            async with AsyncExitStack() as stack:
                clients = {
                    name: await stack.enter_async_context(self._client(name)) for name in questions
                }
                async with asyncio.TaskGroup() as group:
                    for name, asked in questions.items():
                        endpoint = self._endpoints[name]
                        session = _Session(self._account, endpoint, clients[name], progress)
                        todo = enumerate(asked)
                        for _ in range(endpoint.concurrency):
                            group.create_task(session.work(todo, answers[name]))

        total = sum(map(len, answers.values()))
        with progress_bar(title, total=total, unit="answers") as progress:
            asyncio.run(work(progress))
        if self._account.stopped:
            raise self._account.stopped
        return answers

    def _client(self, name: str) -> openai.AsyncOpenAI:
        endpoint = self._endpoints[name]
        return openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=self._keys[name],
            max_retries=0,  # retries are made here, because each counts against the budget
            timeout=endpoint.timeout,
            http_client=http_client(
                openai.DefaultAsyncHttpxClient,
                endpoint.base_url,
                event_hooks={"response": [partial(limit_body, _ANSWER_BYTES)]},
            ),
        )

    def costs(self) -> dict[str, dict[str, float]]:
        """Returns calls by state, tokens and price of each endpoint, and their sums as "all".

        `reused` and `invalid` count this run; the other values count all runs.
        """
        table: dict[str, dict[str, float]] = {}
        for name, endpoint in self._endpoints.items():
            row = table[name] = dict.fromkeys(_COSTS, 0)
            for state, calls, prompt_tokens, answer_tokens in self._account.ledger.usage(name):
                row["calls"] += calls
                row[state] += calls
                row["prompt_tokens"] += prompt_tokens
                row["answer_tokens"] += answer_tokens
            row["reused"] = self._account.reused[name]
            row["invalid"] = sum(item.endpoint == name for item in self.invalid)
            row["price"] = (
                row["prompt_tokens"] * endpoint.input_price
                + row["answer_tokens"] * endpoint.output_price
            ) / 1e6
        total = {key: sum(row[key] for row in table.values()) for key in _COSTS}
        return table | {"all": total}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._account.ledger.__exit__()


@dataclass
class _Session:
    """One endpoint during one `ask`."""

    account: Account
    endpoint: Endpoint
    client: openai.AsyncOpenAI
    progress: Progress
    # Locks of the calls in flight, by key.
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    answers: bool = False  # whether any call succeeded
    reported: float = -inf  # time of the last message about a failure [s]

    async def work(
        self,
        todo: Iterator[tuple[int, Callable[[], Question[Answer]]]],
        answers: list[Answer | None],
    ) -> None:
        """Asks questions until all are asked or the run is stopped."""
        for place, question in todo:
            try:
                answers[place] = await self._answer(question())
            except (CareError, sqlite3.Error) as error:
                # Raised when the calls of all workers have ended, because those are paid for.
                if isinstance(error, sqlite3.Error):
                    message = f"the ledger of calls cannot be written: {error}"
                    error = CareError(message, code="ledger_not_written")
                self.account.stopped = self.account.stopped or error
                self.account.changed.set()
            if self.account.stopped:
                return
            self.progress.update()

    async def _answer(self, question: Question[Answer]) -> Answer | None:
        contents = (("system", question.system), ("user", question.user))
        asked: list[Message] = [
            {"role": role, "content": content} for role, content in contents if content
        ]
        messages, tried = asked, []
        for _ in range(self.account.attempts):
            outcome = await self._outcome(messages, question.answer)
            if outcome.state == "rejected":
                tried.append({"text": "", "complaint": outcome.text})
                break
            answer, complaint = _read(outcome.text, question)
            if not complaint:
                return answer
            tried.append({"text": outcome.text, "complaint": complaint})
            messages = [
                *asked,
                {"role": "assistant", "content": outcome.text[:_QUOTED_CHARS]},
                {"role": "user", "content": question.again.replace("{complaint}", complaint)},
            ]
        self.account.invalid.append(InvalidAnswer(self.endpoint.name, question.id, tried))
        return None

    async def _outcome(self, messages: list[Message], schema: type[BaseModel]) -> Outcome:
        endpoint = self.endpoint
        body = _body(endpoint, messages, schema)
        # The key does not contain the server's address.
        identity = json.dumps([endpoint.name, body, endpoint.extra_body], sort_keys=True)
        key = hashlib.sha256(identity.encode()).hexdigest()
        # Of two equal concurrent questions, the second uses the answer to the first.
        async with self.locks.setdefault(key, asyncio.Lock()):
            if known := self.account.ledger.outcome(key):
                self.account.reused[endpoint.name] += 1
                self.answers |= known.state == "answered"
                return known
            policy = RetryPolicy(endpoint.retries, endpoint.backoff, _LONGEST_RETRY_AFTER)
            try:
                return await policy.run(lambda: self._call(key, body), self._report)
            except TransientError as error:
                if error.wait > policy.longest_wait:
                    reason = f"{error.reason} with Retry-After {error.wait:.0f} s: run again later"
                    raise self._error(reason, wait=error.wait) from None
                attempts = endpoint.retries + 1
                reason = f"failed {attempts} times in a row: it {error.reason}"
                raise self._error(reason, attempts=attempts) from None

    def _report(self, error: TransientError, delay: float) -> None:
        if time.monotonic() - self.reported >= _MESSAGE_INTERVAL:
            self.reported = time.monotonic()
            write_above(f"{_place(self.endpoint)} {error.reason}: retrying in {delay:.0f} s")

    async def _call(self, key: str, body: dict[str, Any]) -> Outcome:
        endpoint, ledger = self.endpoint, self.account.ledger
        prompt_tokens = sum(
            len(message["content"].encode()) + _TEMPLATE_TOKENS for message in body["messages"]
        ) + len(json.dumps(body.get("response_format", "")))
        admitted = self.account.admitted(key, endpoint.name, prompt_tokens, endpoint.max_tokens)
        async with admitted as row:
            try:
                async with asyncio.timeout(endpoint.timeout):
                    completion = await self.client.chat.completions.create(
                        **body, extra_body=endpoint.extra_body
                    )
                text = completion.choices[0].message.content or ""
                if not isinstance(text, str):
                    raise TypeError
            except openai.APIStatusError as error:
                return self._rejected(row, error)
            except (TimeoutError, openai.APITimeoutError):
                reason = f"did not respond within {endpoint.timeout:g} s"
            except openai.APIConnectionError as error:
                reason = f"cannot be reached ({type(error.__cause__ or error).__name__})"
                if isinstance(error.__cause__, TooLongError):
                    reason = f"returned {error.__cause__}"
            except (openai.APIError, ValueError, TypeError, IndexError, AttributeError):
                # The status is 200.
                reason = "returned a body that is not a chat completion"
            else:
                self.answers = True
                used = completion.usage
                prompt = used.prompt_tokens if used else None
                answer = used.completion_tokens if used else None
                ledger.end(row, "answered", prompt, answer, text)
                return Outcome("answered", text)
            ledger.end(row, "lost")
            raise TransientError(reason)

    def _rejected(self, row: int, error: openai.APIStatusError) -> Outcome:
        """Returns the result of a rejected question, or raises the error of the call."""
        status, ledger = error.status_code, self.account.ledger
        if is_rejection(status) and self.answers:
            # Other questions succeed: this one is too long or violates the rules of the server.
            text = f"status {status}: {error.message}"
            ledger.end(row, "rejected", 0, 0, text)
            return Outcome("rejected", text)
        ledger.end(row, "failed", 0, 0)
        if is_transient(status):
            wait = retry_after(error.response.headers.get("Retry-After"))
            raise TransientError(f"returned status {status}", wait)
        meaning = _MEANINGS.get(status, error.message)
        raise self._error(f"returned status {status}: {meaning}", "request_rejected", status=status)

    def _error(self, reason: str, code: str | None = None, **fields: float) -> LanguageModelError:
        message = f"{_place(self.endpoint)} {reason}"
        return LanguageModelError(message, code=code, endpoint=self.endpoint.name, **fields)


def _place(endpoint: Endpoint) -> str:
    return f"{endpoint.base_url} ({endpoint.name})"


def _api_key(endpoint: Endpoint) -> str:
    variable = endpoint.api_key_env
    if variable is None:
        return "none"  # the client requires a key; servers without keys ignore it
    if not (key := os.environ.get(variable)):
        message = (
            f"the environment variable {variable} is not set: {endpoint.name} needs its API key"
        )
        fields = {"variable": variable, "endpoint": endpoint.name}
        raise LanguageModelError(message, code="missing_api_key", **fields)
    return key


def _body(endpoint: Endpoint, messages: list[Message], schema: type[BaseModel]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": messages,
        "temperature": endpoint.temperature,
        endpoint.max_tokens_field: endpoint.max_tokens,
    }
    if endpoint.seed is not None:
        body["seed"] = endpoint.seed
    if endpoint.structured != "none":
        body["response_format"] = {"type": endpoint.structured}
    if endpoint.structured == "json_schema":
        given = {"name": schema.__name__, "schema": schema.model_json_schema(), "strict": True}
        body["response_format"]["json_schema"] = given
    return body


def _read(text: str, question: Question[Answer]) -> tuple[Answer | None, str]:
    """Returns the answer and "", or None and the error of the text."""
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    try:
        answer = question.answer.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return None, f"{place}: {first['msg']}" if place else first["msg"]
    return answer, question.check(answer)
