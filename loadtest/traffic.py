"""Requests as applications send them: questions asked again, new ones, filters and batches."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from core.records import read_jsonl, string

SAMPLE = Path("data/sample/queries.jsonl")

_SEXES = ("男", "女")
_AGES = 99
_DAYS = 365
_PATIENTS = len(_SEXES) * _AGES * _DAYS
# Consecutive new questions lie about this share of all of them apart.
_GOLDEN = (math.sqrt(5) - 1) / 2


def read_texts(path: Path) -> list[str]:
    """Returns the distinct values of `text` in a JSONL file, in file order."""
    lines = read_jsonl(path)
    return list(dict.fromkeys(string(path, number, record, "text") for number, record in lines))


def departments_of(index: dict[str, Any]) -> list[str]:
    """Returns the departments that the response of `GET /index` lists; empty without any."""
    departments: list[str] = index.get("filters", {}).get("department", [])
    return departments


@dataclass(frozen=True)
class Mix:
    """How requests are composed.

    Shares, between 0 and 1: of questions `repeated` are drawn by popularity, the others are new;
    of single ones `filtered` are filtered by one department; of requests `batches` carry
    `batch_size` questions. Each question wants `top_k` hits.
    """

    repeated: float = 0.5
    filtered: float = 0.15
    batches: float = 0.05
    batch_size: int = 8
    top_k: int = 10

    @classmethod
    def add_options(cls, parser: Any) -> None:
        """Adds the shares and the file of questions to the options of a command."""
        add = parser.add_argument
        add("--queries", type=Path, default=SAMPLE, help="JSONL with `text`")
        add("--repeated", type=float, default=cls.repeated, help="share of questions asked before")
        add("--filtered", type=float, default=cls.filtered, help="share of questions with a filter")
        add("--batches", type=float, default=cls.batches, help="share of requests that are batches")

    @classmethod
    def of(cls, options: Any) -> Self:
        """Returns the mix with the shares that options hold."""
        return cls(options.repeated, options.filtered, options.batches)


class Traffic:
    """Draws questions from a list of them, and requests that ask them.

    A repeated question follows Zipf's law: the n-th most popular is asked 1/n as often as the
    first. A new one has a patient behind the question: "…（男，47岁，病程12天）".
    There are 72,270 patients, so the 90 sample questions make 6.5 million new ones. They are
    visited in the order of a full cycle, start + n × stride modulo their number, with a stride
    that is coprime to it: none comes twice before all have come. Another seed starts elsewhere.

    Texts are distinct, the most popular first. The seed fixes the order of everything that is
    drawn. Without departments, no question is filtered.
    """

    def __init__(
        self, texts: Sequence[str], seed: int, mix: Mix = Mix(), departments: Sequence[str] = ()
    ) -> None:
        if not texts or len(set(texts)) < len(texts):
            raise ValueError("at least one question is needed, and all must differ")
        self.departments = departments
        self._mix = mix
        self._texts = texts
        self._random = random.Random(seed)
        self._popularity = list(accumulate(1 / rank for rank in range(1, len(texts) + 1)))
        self._total = len(texts) * _PATIENTS
        self._stride = round(self._total * _GOLDEN)
        while math.gcd(self._stride, self._total) > 1:
            self._stride += 1
        self._place = self._random.randrange(self._total)

    def repeated(self) -> str:
        """Returns a question by its popularity."""
        return self._random.choices(self._texts, cum_weights=self._popularity)[0]

    def fresh(self) -> str:
        """Returns a question that this object has not returned before."""
        self._place = (self._place + self._stride) % self._total
        patient, text = divmod(self._place, len(self._texts))
        patient, day = divmod(patient, _DAYS)
        sex, age = divmod(patient, _AGES)
        return f"{self._texts[text]}（{_SEXES[sex]}，{age + 1}岁，病程{day + 1}天）"

    def draw(self) -> tuple[str, str, dict[str, Any]]:
        """Returns the next request: its kind in reports, its path, the body of the POST."""
        if self._random.random() < self._mix.batches:
            queries = [self._query() for _ in range(self._mix.batch_size)]
            return "/search/batch", "/search/batch", {"queries": queries}
        if self.departments and self._random.random() < self._mix.filtered:
            wanted = {"department": [self._random.choice(self.departments)]}
            return "/search filtered", "/search", self._query() | {"filter": wanted}
        return "/search", "/search", self._query()

    def _query(self) -> dict[str, Any]:
        repeated = self._random.random() < self._mix.repeated
        text = self.repeated() if repeated else self.fresh()
        return {"query": text, "top_k": self._mix.top_k}
