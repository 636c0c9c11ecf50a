"""Synthetic traffic of applications: repeated and new questions, filters and batches."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from core.records import read_jsonl, string

SAMPLE = Path("data/sample/queries.jsonl")

_SEXES = ("男", "女")
_AGES = 99
_DAYS = 365
_PATIENTS = len(_SEXES) * _AGES * _DAYS
# Distance of consecutive new questions in the cycle, as a share of its length.
_GOLDEN = (math.sqrt(5) - 1) / 2


def read_texts(path: Path) -> list[str]:
    """Returns the distinct values of `text` in a JSONL file, in file order."""
    lines = read_jsonl(path)
    return list(dict.fromkeys(string(path, number, record, "text") for number, record in lines))


def departments_of(index: dict[str, Any]) -> list[str]:
    """Returns the departments in a response of `GET /index`; empty if there are none."""
    departments: list[str] = index.get("filters", {}).get("department", [])
    return departments


@dataclass(frozen=True)
class Mix:
    """Composition of the traffic."""

    repeated: float = 0.5  # share of questions that are sampled by popularity; the others are new
    filtered: float = 0.15  # share of single questions with a filter on one department
    batches: float = 0.05  # share of requests that are batches
    batch_size: int = 8  # questions per batch
    top_k: int = 10  # hits per question
    # Further fields of each question, such as its mode.
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def add_options(cls, parser: Any) -> None:
        """Adds the shares and the file of questions to a command line."""
        add = parser.add_argument
        add("--queries", type=Path, default=SAMPLE, help="JSONL with `text`")
        add("--repeated", type=float, default=cls.repeated, help="share of repeated questions")
        add("--filtered", type=float, default=cls.filtered, help="share of questions with a filter")
        add("--batches", type=float, default=cls.batches, help="share of batches among requests")
        add(
            "--field",
            type=_named_value,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="a further field of all questions, such as mode=lexical or rerank=true",
        )

    @classmethod
    def of(cls, options: Any) -> Self:
        """Returns the mix of parsed options."""
        shares = options.repeated, options.filtered, options.batches
        return cls(*shares, fields=dict(options.field))


def _named_value(argument: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; the value is JSON or, if it is not, a text."""
    name, _, value = argument.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class Traffic:
    """Samples requests from a list of questions.

    Repeated questions follow Zipf's law: the n-th most popular question is sampled 1/n as often
    as the first. A new question is a question followed by a patient, "…（男，47岁，病程12天）".
    There are 72,270 patients, so the 110 sample questions give 7.9 million new questions. They are
    visited in a full cycle, (start + n × stride) modulo their number with a coprime stride, so
    that none repeats before all have been used. The seed determines the start.

    `texts` are distinct questions, the most popular first (else ValueError). Without `departments`
    no question is filtered.
    """

    def __init__(
        self, texts: Sequence[str], seed: int, mix: Mix = Mix(), departments: Sequence[str] = ()
    ) -> None:
        if not texts or len(set(texts)) < len(texts):
            raise ValueError("questions must not be empty and must all differ")
        self.departments = departments
        self._mix = mix
        self._texts = texts
        self._random = random.Random(seed)
        self._popularity = list(accumulate(1 / rank for rank in range(1, len(texts) + 1)))
        self._total = len(texts) * _PATIENTS
        self._stride = round(self._total * _GOLDEN)
        while math.gcd(self._stride, self._total) > 1:
            self._stride += 1
        self._position = self._random.randrange(self._total)

    def repeated(self) -> str:
        """Samples a question by popularity."""
        return self._random.choices(self._texts, cum_weights=self._popularity)[0]

    def new(self) -> str:
        """Returns a question that this object has not returned before."""
        self._position = (self._position + self._stride) % self._total
        patient, text = divmod(self._position, len(self._texts))
        patient, day = divmod(patient, _DAYS)
        sex, age = divmod(patient, _AGES)
        return f"{self._texts[text]}（{_SEXES[sex]}，{age + 1}岁，病程{day + 1}天）"

    def draw(self) -> tuple[str, str, dict[str, Any]]:
        """Samples a request: its name in reports, its path, and the body of the POST."""
        if self._random.random() < self._mix.batches:
            queries = [self._query() for _ in range(self._mix.batch_size)]
            return "/search/batch", "/search/batch", {"queries": queries}
        if self.departments and self._random.random() < self._mix.filtered:
            filter_ = {"department": [self._random.choice(self.departments)]}
            return "/search filtered", "/search", self._query() | {"filter": filter_}
        return "/search", "/search", self._query()

    def _query(self) -> dict[str, Any]:
        repeated = self._random.random() < self._mix.repeated
        text = self.repeated() if repeated else self.new()
        return {"query": text, "top_k": self._mix.top_k, **self._mix.fields}
