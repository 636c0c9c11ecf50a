"""A file of all calls to language models: the cache of answers and the record of tokens."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from core.errors import CareError
from curation.config import Budget

State = Literal["sent", "answered", "rejected", "failed", "lost"]

# A killed process loses no committed row; a power failure may lose the last ones.
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS calls (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    state TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    answer_tokens INTEGER NOT NULL,
    text TEXT NOT NULL DEFAULT ''
);
DROP INDEX IF EXISTS final;
UPDATE calls SET state = 'rejected' WHERE state = 'refused';
CREATE UNIQUE INDEX IF NOT EXISTS ended ON calls (key) WHERE state IN ('answered', 'rejected');
UPDATE calls SET state = 'lost' WHERE state = 'sent';
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The final result of a call: the answer, or why the server rejected the question."""

    state: Literal["answered", "rejected"]
    text: str


class Ledger:
    """The calls of one output folder, in a SQLite file that one process opens at a time.

    A call is written before it is sent, with the greatest number of tokens that it can use, and
    updated with the tokens used when the response arrives. An interrupted call keeps the greatest
    number. The file is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise CareError.at(
                path, f"is not a file of calls: {error}; delete it to start again", "not_ledger"
            ) from error
        self.calls: int
        self.tokens: int
        self.calls, self.tokens = self._db.execute(
            "SELECT count(*), coalesce(sum(prompt_tokens + answer_tokens), 0) FROM calls"
        ).fetchone()

    def outcome(self, key: str) -> Outcome | None:
        """Returns the final result of a call, or None if it has none."""
        row = self._db.execute(
            "SELECT state, text FROM calls WHERE key = ? AND state IN ('answered', 'rejected')",
            (key,),
        ).fetchone()
        return Outcome(*row) if row else None

    def begin(self, key: str, endpoint: str, prompt_tokens: int, answer_tokens: int) -> int:
        """Records a call before it is sent, with the most tokens it can use; returns its row."""
        row = self._db.execute(
            "INSERT INTO calls (key, endpoint, state, prompt_tokens, answer_tokens)"
            " VALUES (?, ?, 'sent', ?, ?)",
            (key, endpoint, prompt_tokens, answer_tokens),
        ).lastrowid
        assert row is not None
        self.calls += 1
        self.tokens += prompt_tokens + answer_tokens
        return row

    def end(
        self,
        row: int,
        state: Literal["answered", "rejected", "failed", "lost"],
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        text: str = "",
    ) -> None:
        """Records the result of a call and the tokens used; None keeps the greatest number."""
        (change,) = self._db.execute(
            "SELECT coalesce(?, prompt_tokens) - prompt_tokens"
            " + coalesce(?, answer_tokens) - answer_tokens FROM calls WHERE id = ?",
            (prompt_tokens, answer_tokens, row),
        ).fetchone()
        self._db.execute(
            "UPDATE calls SET state = ?, text = ?, prompt_tokens = coalesce(?, prompt_tokens),"
            " answer_tokens = coalesce(?, answer_tokens) WHERE id = ?",
            (state, text, prompt_tokens, answer_tokens, row),
        )
        self.tokens += change

    def usage(self, endpoint: str) -> list[tuple[State, int, int, int]]:
        """Returns state, calls, prompt tokens and answer tokens of an endpoint, for each state."""
        return self._db.execute(
            "SELECT state, count(*), sum(prompt_tokens), sum(answer_tokens) FROM calls"
            " WHERE endpoint = ? GROUP BY state ORDER BY state",
            (endpoint,),
        ).fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()


class LanguageModelError(CareError):
    """A language model's server cannot be reached, rejects requests, or fails repeatedly."""

    default_code = "language_model_failed"


class BudgetError(LanguageModelError):
    """The next call could exceed the budget."""

    default_code = "budget_spent"


@dataclass(frozen=True, slots=True)
class InvalidAnswer:
    """A question without a valid answer, and its attempts: `text` and `complaint` of each."""

    endpoint: str
    id: str
    tried: list[dict[str, str]]


@dataclass
class Account:
    """The ledger, the budget and the state of the run, which all endpoints share."""

    ledger: Ledger
    budget: Budget
    attempts: int
    in_flight: int = 0  # calls without a response yet
    stopped: CareError | None = None  # once it is set, no call is sent
    # Set when a call ends or all are stopped; belongs to one event loop.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reused: Counter[str] = field(default_factory=Counter)  # answers from the ledger, by endpoint
    invalid: list[InvalidAnswer] = field(default_factory=list)

    @asynccontextmanager
    async def admitted(
        self, key: str, endpoint: str, prompt_tokens: int, answer_tokens: int
    ) -> AsyncIterator[int]:
        """Waits until a call fits in the budget, records it, and yields its row in the ledger."""
        # Calls in flight may use fewer tokens than were reserved.
        while not self._fits(prompt_tokens + answer_tokens):
            self.changed.clear()
            await self.changed.wait()
        row = self.ledger.begin(key, endpoint, prompt_tokens, answer_tokens)
        self.in_flight += 1
        try:
            yield row
        finally:
            self.in_flight -= 1
            self.changed.set()

    def _fits(self, tokens: int) -> bool:
        if self.stopped:
            raise self.stopped
        most, spent = self.budget, self.ledger
        if most.calls is not None and spent.calls >= most.calls:
            message = f"the budget of {most.calls:,} calls is spent: increase budget.calls"
            raise BudgetError(f"{message} and run again to continue", calls=most.calls)
        if most.tokens is None or spent.tokens + tokens <= most.tokens:
            return True
        if not self.in_flight:
            left = most.tokens - spent.tokens
            message = f"the budget of {most.tokens:,} tokens has {left:,} left and the next call"
            message += f" could use {tokens:,}: increase budget.tokens and run again to continue"
            raise BudgetError(message, tokens=most.tokens, left=left)
        return False
