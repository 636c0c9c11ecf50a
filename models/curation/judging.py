"""Grades of passages by several language models, and what they agree on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from models.curation import prompts
from models.curation.config import Language
from models.curation.llm import LanguageModels, Question

Grade = Literal["S", "A", "B", "C", "D"]
GRADES: tuple[Grade, ...] = get_args(Grade)
POSITIVE: frozenset[Grade] = frozenset({"S", "A"})

Verdict = Literal["positive", "negative", "disputed", "incomplete"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A query and a document, and the grade of each judge; None where it gave no valid one."""

    query: str
    document: str
    grades: Mapping[str, Grade | None]

    @property
    def verdict(self) -> Verdict:
        """What the judges agree on, by `consensus`."""
        return consensus(list(self.grades.values()))

    def record(self) -> dict[str, Any]:
        """Returns it as a line of judgements.jsonl."""
        return {
            "query-id": self.query,
            "corpus-id": self.document,
            "grades": dict(self.grades),
            "verdict": self.verdict,
        }


def consensus(grades: Sequence[Grade | None]) -> Verdict:
    """Applies the voting rule: positive if all judges say S or A, negative if none does.

    Anything between is disputed; a pair that a judge did not grade is incomplete. Neither
    belongs in a benchmark.
    """
    if None in grades:
        return "incomplete"
    votes = [grade in POSITIVE for grade in grades]
    if all(votes):
        return "positive"
    return "disputed" if any(votes) else "negative"


@dataclass(frozen=True, slots=True)
class JudgingOptions:
    """How passages are put to judges; the fields are those of the configuration."""

    language: Language = "zh"
    passages_per_call: int = 10
    passage_chars: int = 1500


def judge(
    models: LanguageModels,
    judges: Sequence[str],
    pools: Mapping[str, Sequence[str]],
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    options: JudgingOptions,
) -> list[Judgement]:
    """Has each judge grade the documents of each pool.

    All judges see the same calls: the pool's documents in its order, cut into groups.

    Args:
        models: The endpoints.
        judges: Names of the endpoints that judge.
        pools: Document ids by query id.
        queries: Text by id.
        documents: Text by id.
        options: How passages are put to them.

    Returns:
        A judgement for each pair, in the pools' order.

    Raises:
        LanguageModelError: If an endpoint cannot be used or the budget is spent.
    """
    groups = [
        (query, group)
        for query, pool in pools.items()
        for group in _groups(pool, options.passages_per_call)
    ]
    questions = _Questions(groups, queries, documents, options)
    answers = models.ask(dict.fromkeys(judges, questions), "judge")
    return [
        Judgement(query, id_, {name: _grade(answers[name][at], place) for name in judges})
        for at, (query, group) in enumerate(groups)
        for place, id_ in enumerate(group)
    ]


class _Questions(Sequence[Question[BaseModel]]):
    """The questions of groups, made when they are asked: together they can be gigabytes."""

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[str]]],
        queries: Mapping[str, str],
        documents: Mapping[str, str],
        options: JudgingOptions,
    ) -> None:
        self._groups = groups
        self._queries = queries
        self._documents = documents
        self._options = options

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, at: Any) -> Any:
        query, group = self._groups[at]
        options = self._options
        return Question(
            id=f"{query} {' '.join(group)}",
            system=prompts.judge_prompt(options.language),
            user=prompts.judge_question(
                self._queries[query],
                [self._documents[id_][: options.passage_chars] for id_ in group],
            ),
            again=prompts.again(options.language),
            answer=grades_model(len(group)),
        )


def _grade(answer: BaseModel | None, place: int) -> Grade | None:
    if answer is None:
        return None
    grade: Grade = getattr(answer, f"passage_{place}")
    return grade


@cache
def grades_model(count: int) -> type[BaseModel]:
    """Returns the schema of an answer: a grade for `Passage-0` to `Passage-{count - 1}`."""
    fields: dict[str, Any] = {
        f"passage_{i}": (Grade, Field(alias=f"Passage-{i}")) for i in range(count)
    }
    model: type[BaseModel] = create_model("Grades", __config__=ConfigDict(extra="forbid"), **fields)
    return model


_Item = TypeVar("_Item")


def _groups(items: Sequence[_Item], size: int) -> Iterable[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
