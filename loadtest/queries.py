"""Questions as users send them: some asked again and again, others never asked before."""

import json
import math
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

SAMPLE = Path("data/sample/queries.jsonl")

_SEXES = ("男", "女")
_AGES = 99
_DAYS = 365
_PATIENTS = len(_SEXES) * _AGES * _DAYS
# Consecutive fresh questions lie about this share of all of them apart.
_GOLDEN = (math.sqrt(5) - 1) / 2


def read_texts(path: Path) -> list[str]:
    """The different `text`s of a JSONL file, in its order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(json.loads(line)["text"] for line in lines))


class Questions:
    """Draws questions from a list of them.

    A repeated question follows Zipf's law: the n-th most popular is asked 1/n as often as the
    first. A fresh one has a patient behind the question: "…（男，47岁，病程12天）".
    There are 72,270 patients, so the 90 sample questions make 6.5 million fresh ones. They are
    visited in the order of a full cycle, start + n × stride modulo their number, with a stride
    that is coprime to it: none comes twice before all have come. Another seed starts elsewhere.

    Args:
        texts: Different questions, the most popular first.
        seed: Fixes the order of everything that is drawn.

    Raises:
        ValueError: No texts, or equal ones.
    """

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        if not texts or len(set(texts)) < len(texts):
            raise ValueError("the questions must be some, and differ")
        self._texts = texts
        self._random = random.Random(seed)
        self._popularity = list(accumulate(1 / rank for rank in range(1, len(texts) + 1)))
        self._fresh_total = len(texts) * _PATIENTS
        self._stride = round(self._fresh_total * _GOLDEN)
        while math.gcd(self._stride, self._fresh_total) > 1:
            self._stride += 1
        self._place = self._random.randrange(self._fresh_total)

    def repeated(self) -> str:
        """A question by its popularity."""
        return self._random.choices(self._texts, cum_weights=self._popularity)[0]

    def fresh(self) -> str:
        """A question that this object has not given before."""
        self._place = (self._place + self._stride) % self._fresh_total
        patient, text = divmod(self._place, len(self._texts))
        patient, day = divmod(patient, _DAYS)
        sex, age = divmod(patient, _AGES)
        return f"{self._texts[text]}（{_SEXES[sex]}，{age + 1}岁，病程{day + 1}天）"
