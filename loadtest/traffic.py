"""Requests as applications of retrieval-augmented generation send them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.queries import Questions


@dataclass(frozen=True)
class Mix:
    """How the requests are composed; shares are between 0 and 1.

    Attributes:
        repeated: Share of questions that are drawn by popularity; the others are fresh.
        filtered: Share of single questions that ask one department.
        batches: Share of requests that carry several questions.
        batch_size: Questions of such a request.
        top_k: Hits wanted of each question.
    """

    repeated: float = 0.5
    filtered: float = 0.15
    batches: float = 0.05
    batch_size: int = 8
    top_k: int = 10


@dataclass(frozen=True)
class Request:
    """A POST to a path; `name` is what reports call its kind."""

    name: str
    path: str
    body: dict[str, Any]


class Traffic:
    """Draws requests.

    Args:
        questions: Where their texts come from.
        mix: Their shares.
        departments: What questions can be filtered by; without any, none is filtered.
        seed: Fixes their order.
    """

    def __init__(
        self, questions: Questions, mix: Mix, departments: Sequence[str], seed: int
    ) -> None:
        self._questions = questions
        self._mix = mix
        self._departments = departments
        self._random = random.Random(seed)

    def draw(self) -> Request:
        """The next request."""
        if self._random.random() < self._mix.batches:
            queries = [self._query() for _ in range(self._mix.batch_size)]
            return Request("/search/batch", "/search/batch", {"queries": queries})
        if self._departments and self._random.random() < self._mix.filtered:
            wanted = {"department": [self._random.choice(self._departments)]}
            return Request("/search filtered", "/search", self._query() | {"filter": wanted})
        return Request("/search", "/search", self._query())

    def _query(self) -> dict[str, Any]:
        repeated = self._random.random() < self._mix.repeated
        text = self._questions.repeated() if repeated else self._questions.fresh()
        return {"query": text, "top_k": self._mix.top_k}


def departments_of(index: dict[str, Any]) -> list[str]:
    """The departments that the answer of `GET /index` lists; empty where there are none."""
    departments: list[str] = index.get("filters", {}).get("department", [])
    return departments
