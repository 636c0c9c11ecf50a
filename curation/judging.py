"""Labels of passages by several language models, and the vote on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from core.errors import CareError
from core.records import write_jsonl
from core.types import Document
from curation.common import CACHE, language_models, shuffled
from curation.config import JudgingCommand, JudgingOptions
from curation.llm import LanguageModels, Question
from curation.prompts import FIELDS, Prompt, Prompts
from curation.retrieval import Pools, candidate_pools
from evaluation.beir import document_texts

JUDGEMENTS = "judgements.jsonl"

# `S` to `D` are grades, the others classes.
Label = Literal["S", "A", "B", "C", "D", "positive", "negative"]
LABELS: dict[str, tuple[Label, ...]] = {
    "grade": ("S", "A", "B", "C", "D"),
    "classify": ("positive", "negative"),
}
POSITIVE: frozenset[Label] = frozenset({"S", "A", "positive"})

Verdict = Literal["positive", "negative", "disputed", "incomplete"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The labels of a query and a document, by judge; None for an invalid answer."""

    query: str
    document: str
    grades: Mapping[str, Label | None]

    @property
    def verdict(self) -> Verdict:
        """The result of the vote, see `consensus`."""
        return consensus(list(self.grades.values()))


def consensus(grades: Sequence[Label | None]) -> Verdict:
    """Applies the voting rule: positive if all judges say S, A or positive, negative if none does.

    Other pairs are disputed. Pairs without the label of a judge are incomplete. A benchmark scores
    neither.
    """
    if None in grades:
        return "incomplete"
    votes = [grade in POSITIVE for grade in grades]
    if all(votes):
        return "positive"
    return "disputed" if any(votes) else "negative"


def judge(
    models: LanguageModels,
    judges: Sequence[str],
    pools: Mapping[str, Sequence[str]],
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    options: JudgingOptions,
) -> list[Judgement]:
    """Labels the documents of each pool with each judge, an endpoint of `models`.

    All judges get the same prompts: the documents of a pool in its order, in groups. Pools are
    document ids by query id; queries and documents are texts by id.
    """
    size = options.passages_per_call
    groups = [
        (query, pool[start : start + size])
        for query, pool in pools.items()
        for start in range(0, len(pool), size)
    ]
    prompts = Prompts(options.prompts, options.language)
    task = _Grading(prompts) if options.method == "grade" else _Classification(prompts)

    def question(query: str, group: Sequence[str]) -> Question[BaseModel]:
        texts = [documents[id_][: options.passage_chars] for id_ in group]
        return task.question(f"{query} {' '.join(group)}", queries[query], texts)

    # Built on demand: all prompts together can take gigabytes.
    questions = [partial(question, query, group) for query, group in groups]
    answers = models.ask(dict.fromkeys(judges, questions), "judge")
    return [
        Judgement(query, id_, {name: task.label(answers[name][at], i) for name in judges})
        for at, (query, group) in enumerate(groups)
        for i, id_ in enumerate(group)
    ]


class _Grading:
    """Each passage gets a grade."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompt, self._again = prompts.get("judge"), prompts.again

    def question(self, id_: str, query: str, texts: Sequence[str]) -> Question[BaseModel]:
        passages = {f"Passage-{place}": text for place, text in enumerate(texts)}
        system, user = _messages(self._prompt, query, passages)
        return Question(id_, system, user, self._again, grades_model(len(texts)))

    @staticmethod
    def label(answer: BaseModel | None, place: int) -> Label | None:
        label: Label | None = getattr(answer, f"passage_{place}", None)
        return label


class _Classification:
    """The passages are divided into positive and negative ones; some may be in neither class."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompt, self._again = prompts.get("classify"), prompts.again
        self._keys = tuple(self._prompt.keys.get(name, name) for name in FIELDS["classify"])

    def question(self, id_: str, query: str, texts: Sequence[str]) -> Question[BaseModel]:
        passages = {f"doc-{place}": text for place, text in enumerate(texts, start=1)}
        system, user = _messages(self._prompt, query, passages)
        answer = classes_model(len(texts), self._keys)
        return Question(id_, system, user, self._again, answer, self._check)

    @staticmethod
    def _check(answer: BaseModel) -> str:
        positive, negative = (set(getattr(answer, name)) for name in FIELDS["classify"])
        both = sorted(positive & negative)
        return f"{both[0]} is in both lists" if both else ""

    @staticmethod
    def label(answer: BaseModel | None, place: int) -> Label | None:
        for label in LABELS["classify"]:
            if f"doc-{place + 1}" in getattr(answer, label, ()):
                return label
        return None


def _messages(prompt: Prompt, query: str, passages: Mapping[str, str]) -> tuple[str, str]:
    lines = "\n".join(f"- {name}: {text}" for name, text in passages.items())
    material = {"question": query, "passages": passages}
    return prompt.messages(material, query=query, passages=lines, count=len(passages))


@cache
def grades_model(count: int) -> type[BaseModel]:
    """Returns the schema of an answer: a grade for `Passage-0` to `Passage-{count - 1}`."""
    grade: Any = Literal[LABELS["grade"]]
    fields: dict[str, Any] = {
        f"passage_{i}": (grade, Field(alias=f"Passage-{i}")) for i in range(count)
    }
    model: type[BaseModel] = create_model("Grades", __config__=ConfigDict(extra="forbid"), **fields)
    return model


@cache
def classes_model(count: int, keys: tuple[str, ...]) -> type[BaseModel]:
    """Returns the schema of an answer: lists of `doc-1` to `doc-{count}` under two keys."""
    name: Any = Literal[tuple(f"doc-{i}" for i in range(1, count + 1))]
    fields: dict[str, Any] = {
        field: (list[name], Field(alias=key))
        for field, key in zip(FIELDS["classify"], keys, strict=True)
    }
    model: type[BaseModel] = create_model(
        "Classes", __config__=ConfigDict(extra="forbid"), **fields
    )
    return model


@dataclass(frozen=True, slots=True)
class Judged:
    """Candidates and their judgements."""

    pools: Pools  # document ids by query id, best first; then those that were judged besides
    judgements: Mapping[tuple[str, str], Judgement]  # by query and document id
    # How many documents of each pool the retrievers found, by query id.
    found: Mapping[str, int] = field(default_factory=dict)

    def of(self, query: str, verdict: str) -> list[str]:
        """Returns the documents of a query with a verdict, in the order of the pool."""
        return [id_ for id_ in self.pools[query] if self.judgements[query, id_].verdict == verdict]


def judge_candidates(
    config: JudgingCommand,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    also: Mapping[str, Sequence[str]] | None = None,
) -> Judged:
    """Retrieves candidates, judges them, and writes judgements, costs and invalid answers.

    Each pool is shuffled, in the same way for all judges, so that ranks do not influence grades.
    The output folder must be locked. `also` has more document ids to judge, by query id, whatever
    their rank.
    """
    if not queries or not documents:
        message = f"{config.queries} or {config.corpus} has no texts to judge after cleaning"
        counts = {"queries": len(queries), "documents": len(documents)}
        raise CareError(message, code="nothing_to_judge", **counts)
    # Opened first, so that a missing API key fails before hours of encoding.
    with language_models(config, config.judges) as models:
        vectors = config.vectors or config.output / CACHE / "vectors"
        pools = candidate_pools(
            config.retrievers, documents, queries, config.depth, vectors, config.pool
        )
        found = {query: len(pool) for query, pool in pools.items()}
        for query, ids in (also or {}).items():
            pools[query] += [id_ for id_ in ids if id_ not in pools[query]]
        blind = {query: shuffled(pool, config.seed, query) for query, pool in pools.items()}
        names = [endpoint.name for endpoint in config.judges]
        judgements = judge(models, names, blind, queries, document_texts(documents), config)
    rows = (
        {"query-id": item.query, "corpus-id": item.document}
        | {"grades": dict(item.grades), "verdict": item.verdict}
        for item in judgements
    )
    write_jsonl(config.output / JUDGEMENTS, rows)
    by_pair = {(item.query, item.document): item for item in judgements}
    return Judged(pools, by_pair, found)
