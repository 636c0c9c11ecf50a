"""Questions to language models: each answer is valid JSON under a schema, or is set aside."""

import asyncio
import hashlib
import json
import os
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

import openai
from pydantic import BaseModel, ValidationError
from tqdm import tqdm

from core.errors import BudgetError, CareError, LanguageModelError
from models.curation.config import Budget, Endpoint
from models.curation.ledger import Ledger, Outcome

_LONGEST_BACKOFF = 60.0
_LONGEST_RETRY_AFTER = 600.0
# What a chat template may add to each message [tokens].
_TEMPLATE_TOKENS = 32
_QUOTED_CHARS = 2000
_FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)

Answer = TypeVar("Answer", bound=BaseModel)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Question(Generic[Answer]):
    """One question and what counts as an answer.

    Attributes:
        id: What it is about, as files of answers set aside name it.
        system: The instruction.
        user: The question.
        again: How an invalid answer is asked for again; `{complaint}` says what was wrong.
        answer: The schema.
        check: Returns what is wrong with an answer that fits the schema, or "".
    """

    id: str
    system: str
    user: str
    again: str
    answer: type[Answer]
    check: Callable[[Answer], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A question without a valid answer, and what came instead: texts and complaints."""

    endpoint: str
    id: str
    tried: list[dict[str, str]]


class LanguageModels:
    """Endpoints that share a ledger and a budget.

    An answer that is in the ledger is never asked for again. When the budget is spent, or an
    endpoint fails for good, calls under way are waited for and written down; a later run goes
    on from there.

    Args:
        endpoints: The endpoints that may be asked.
        ledger: The file of calls.
        budget: The most calls and tokens of all runs with this ledger. A call is sent only
            if the most that it can use still fits: a token for each byte of the prompt, and
            all tokens that the answer may have.
        attempts: How often a question is put before its answers are set aside.

    Raises:
        LanguageModelError: If the environment variable of a key is not set.
        CareError: If the file is no ledger.
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
        self._budget = budget or Budget()
        self._attempts = attempts
        self._ledger = Ledger(ledger)
        self._reused: Counter[str] = Counter()
        self.set_aside: list[SetAside] = []

    def ask(
        self, questions: Mapping[str, Sequence[Question[Answer]]], title: str
    ) -> dict[str, list[Answer | None]]:
        """Puts questions to endpoints and returns the answers in the questions' order.

        Args:
            questions: By the name of the endpoint.
            title: Of the progress bar.

        Returns:
            For each endpoint its answers; None where none was valid: see `set_aside`.

        Raises:
            BudgetError: If the next call could exceed the budget.
            LanguageModelError: If an endpoint cannot be used or goes on failing.
        """
        session = _Session(self._ledger, self._budget, self._attempts, self._reused)
        answers = asyncio.run(session.run(self._clients(), questions, title))
        self.set_aside += sorted(session.set_aside, key=lambda item: (item.endpoint, item.id))
        return answers

    def _clients(self) -> list[tuple[Endpoint, openai.AsyncOpenAI]]:
        # Repetitions are ours: each counts against the budget.
        return [
            (
                endpoint,
                openai.AsyncOpenAI(
                    base_url=endpoint.base_url,
                    api_key=self._keys[name],
                    max_retries=0,
                    timeout=endpoint.timeout,
                ),
            )
            for name, endpoint in self._endpoints.items()
        ]

    def costs(self) -> dict[str, dict[str, float]]:
        """Returns calls by state, tokens and price of each endpoint, and of all.

        `reused` counts the answers that this run found in the ledger; all else, all runs.
        """
        table: dict[str, dict[str, float]] = {
            name: dict.fromkeys(
                (
                    *("calls", "answered", "refused", "failed", "lost", "reused", "set_aside"),
                    *("prompt_tokens", "answer_tokens", "price"),
                ),
                0,
            )
            for name in self._endpoints
        }
        for usage in self._ledger.usage():
            if (row := table.get(usage.endpoint)) is None:
                continue
            endpoint = self._endpoints[usage.endpoint]
            row["calls"] += usage.calls
            row[usage.state] += usage.calls
            row["prompt_tokens"] += usage.prompt_tokens
            row["answer_tokens"] += usage.answer_tokens
            row["price"] += (
                usage.prompt_tokens * endpoint.input_price
                + usage.answer_tokens * endpoint.output_price
            ) / 1e6
        for name, row in table.items():
            row["reused"] = self._reused[name]
            row["set_aside"] = sum(item.endpoint == name for item in self.set_aside)
        columns = next(iter(table.values()))
        total = {key: sum(row[key] for row in table.values()) for key in columns}
        return table | {"all": total}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.__exit__()


class _Session:
    """One call of `LanguageModels.ask`: what lives as long as its event loop."""

    def __init__(self, ledger: Ledger, budget: Budget, attempts: int, reused: Counter[str]) -> None:
        self._ledger = ledger
        self._budget = budget
        self._attempts = attempts
        self._reused = reused
        self._under_way = 0
        self._changed = asyncio.Condition()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reached: set[str] = set()
        self._stop: CareError | None = None
        self.set_aside: list[SetAside] = []

    async def run(
        self,
        clients: Sequence[tuple[Endpoint, openai.AsyncOpenAI]],
        questions: Mapping[str, Sequence[Question[Answer]]],
        title: str,
    ) -> dict[str, list[Answer | None]]:
        answers: dict[str, list[Answer | None]] = {
            name: [None] * len(asked) for name, asked in questions.items()
        }
        progress = tqdm(total=sum(map(len, questions.values())), desc=title, unit=" answers")
        async with AsyncExitStack() as stack:
            group = asyncio.TaskGroup()
            with progress:
                async with group:
                    for endpoint, client in clients:
                        await stack.enter_async_context(client)
                        name = endpoint.name
                        todo = enumerate(questions.get(name, ()))
                        for _ in range(endpoint.concurrency):
                            group.create_task(
                                self._work(endpoint, client, todo, answers.get(name, []), progress)
                            )
        if self._stop:
            raise self._stop
        return answers

    async def _work(
        self,
        endpoint: Endpoint,
        client: openai.AsyncOpenAI,
        todo: Iterator[tuple[int, Question[Answer]]],
        answers: list[Answer | None],
        progress: "tqdm[Any]",
    ) -> None:
        for place, question in todo:
            try:
                answers[place] = await self._answer(endpoint, client, question)
            except (CareError, sqlite3.Error) as error:
                # Not raised before the calls of the other workers have ended: they are paid for.
                self._stop = self._stop or _care_error(error)
                await self._wake()
            if self._stop:
                return
            progress.update()

    async def _answer(
        self, endpoint: Endpoint, client: openai.AsyncOpenAI, question: Question[Answer]
    ) -> Answer | None:
        asked: list[Message] = [
            {"role": "system", "content": question.system},
            {"role": "user", "content": question.user},
        ]
        messages, tried = asked, []
        for _ in range(self._attempts):
            outcome = await self._outcome(endpoint, client, messages, question.answer)
            if outcome.state == "refused":
                tried.append({"text": "", "complaint": outcome.text})
                break
            answer, complaint = _read(outcome.text, question)
            if not complaint:
                return answer
            tried.append({"text": outcome.text, "complaint": complaint})
            messages = [
                *asked,
                {"role": "assistant", "content": outcome.text[:_QUOTED_CHARS]},
                {"role": "user", "content": question.again.format(complaint=complaint)},
            ]
        self.set_aside.append(SetAside(endpoint.name, question.id, tried))
        return None

    async def _outcome(
        self,
        endpoint: Endpoint,
        client: openai.AsyncOpenAI,
        messages: list[Message],
        schema: type[BaseModel],
    ) -> Outcome:
        body = _body(endpoint, messages, schema)
        key = _key(endpoint, body)
        # Equal questions at once: the second waits for the first one's answer.
        async with self._locks.setdefault(key, asyncio.Lock()):
            if known := self._ledger.outcome(key):
                self._reused[endpoint.name] += 1
                if known.state == "answered":
                    self._reached.add(endpoint.name)
                return known
            backoff = endpoint.backoff
            for left in range(endpoint.retries, -1, -1):
                try:
                    return await self._call(endpoint, client, key, body)
                except _PassingError as error:
                    if not left:
                        raise LanguageModelError(
                            f"{endpoint.base_url} ({endpoint.name}) failed "
                            f"{endpoint.retries + 1} times in a row, at last with {error.reason}"
                        ) from None
                    jitter = random.uniform(0.5, 1)
                    await asyncio.sleep(max(error.wait, jitter * min(backoff, _LONGEST_BACKOFF)))
                    backoff *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _call(
        self, endpoint: Endpoint, client: openai.AsyncOpenAI, key: str, body: dict[str, Any]
    ) -> Outcome:
        prompt_tokens = sum(
            len(message["content"].encode()) + _TEMPLATE_TOKENS for message in body["messages"]
        ) + len(json.dumps(body.get("response_format", "")))
        await self._admit(prompt_tokens + endpoint.max_tokens)
        row = self._ledger.begin(key, endpoint.name, prompt_tokens, endpoint.max_tokens)
        self._under_way += 1
        try:
            return await self._send(endpoint, client, row, body)
        finally:
            self._under_way -= 1
            await self._wake()

    async def _send(
        self, endpoint: Endpoint, client: openai.AsyncOpenAI, row: int, body: dict[str, Any]
    ) -> Outcome:
        try:
            async with asyncio.timeout(endpoint.timeout):
                completion = await client.chat.completions.create(
                    **body, extra_body=endpoint.extra_body
                )
            text = completion.choices[0].message.content or ""
            if not isinstance(text, str):
                raise TypeError
        except (TimeoutError, openai.APITimeoutError):
            self._ledger.lose(row)
            raise _PassingError(f"no answer in {endpoint.timeout:g} s") from None
        except openai.APIStatusError as error:
            return self._refusal(endpoint, row, error)
        except openai.APIConnectionError as error:
            self._ledger.lose(row)
            reason = error.__cause__ or error
            raise _PassingError(f"a broken connection ({type(reason).__name__})") from None
        except (openai.APIError, ValueError, TypeError, IndexError, AttributeError):
            # A body that is no chat completion, though the status is 200.
            self._ledger.lose(row)
            raise _PassingError("a body that is no chat completion") from None
        self._reached.add(endpoint.name)
        if usage := completion.usage:
            self._ledger.end(row, "answered", usage.prompt_tokens, usage.completion_tokens, text)
        else:
            self._ledger.end(row, "answered", text=text)
        return Outcome("answered", text)

    def _refusal(self, endpoint: Endpoint, row: int, error: openai.APIStatusError) -> Outcome:
        """Says what a status other than 200 means: for the question, the call or the endpoint."""
        status, name = error.status_code, f"{endpoint.base_url} ({endpoint.name})"
        if status in (408, 409, 429) or status >= 500:
            self._ledger.end(row, "failed", 0, 0)
            header = error.response.headers.get("Retry-After", "")
            wait = float(header) if header.isdecimal() else 0.0
            if wait > _LONGEST_RETRY_AFTER:
                raise LanguageModelError(
                    f"{name} answers status {status} and asks to wait for {wait:.0f} s"
                )
            raise _PassingError(f"status {status}", wait)
        if status in (400, 413, 422) and endpoint.name in self._reached:
            # It answers other questions: this one is too long, or not to its taste.
            text = f"status {status}: {error.message}"
            self._ledger.end(row, "refused", 0, 0, text)
            return Outcome("refused", text)
        self._ledger.end(row, "failed", 0, 0)
        known = {
            401: "the key is wrong or missing",
            403: "the key may not use this model",
            404: f"it does not know the model '{endpoint.model}', or the address is wrong",
        }
        raise LanguageModelError(
            f"{name} answers status {status}: {known.get(status, error.message)}"
        )

    async def _admit(self, tokens: int) -> None:
        """Waits until a call fits into the budget; those under way may use less than they can."""
        async with self._changed:
            while True:
                if self._stop:
                    raise self._stop
                most = self._budget
                if most.calls is not None and self._ledger.calls >= most.calls:
                    raise BudgetError(
                        f"the budget of {most.calls:,} calls is spent: raise budget.calls and run "
                        "again to go on"
                    )
                if most.tokens is None or self._ledger.tokens + tokens <= most.tokens:
                    return
                if not self._under_way:
                    raise BudgetError(
                        f"the budget of {most.tokens:,} tokens has {self._left():,} left and the "
                        f"next call could use {tokens:,}: raise budget.tokens and run again to go "
                        "on"
                    )
                await self._changed.wait()

    def _left(self) -> int:
        return (self._budget.tokens or 0) - self._ledger.tokens

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _PassingError(Exception):
    """A fault that may be gone when the call is repeated, `wait` seconds from now."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


def _care_error(error: CareError | sqlite3.Error) -> CareError:
    if isinstance(error, CareError):
        return error
    return CareError(f"the ledger of calls cannot be written: {error}")


def _api_key(endpoint: Endpoint) -> str:
    if endpoint.api_key_env is None:
        return "none"  # the client insists on one; servers without keys ignore it
    if not (key := os.environ.get(endpoint.api_key_env)):
        raise LanguageModelError(
            f"the environment variable {endpoint.api_key_env}, the key of {endpoint.name}, "
            "is not set"
        )
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
    if endpoint.structured == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif endpoint.structured == "json_schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {
                "name": schema.__name__,
                "schema": schema.model_json_schema(),
                "strict": True,
            },
        }
    return body


def _key(endpoint: Endpoint, body: dict[str, Any]) -> str:
    """Returns the identity of a call; the server's address is no part of it."""
    content = json.dumps([endpoint.name, body, endpoint.extra_body], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _read(text: str, question: Question[Answer]) -> tuple[Answer | None, str]:
    """Returns the answer, or what is wrong with the text."""
    if fenced := _FENCE.fullmatch(text):
        text = fenced[1]
    try:
        answer = question.answer.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return None, f"{place}: {first['msg']}" if place else first["msg"]
    return answer, question.check(answer)
