"""The budget of a run of calls to language models, and the state that its endpoints share."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.errors import CareError
from curation.config import Budget
from curation.ledger import Ledger


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
