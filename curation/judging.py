"""Grades of passages by several language models, and the vote on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from core.errors import CareError
from core.records import write_jsonl
from core.types import Document
from curation import prompts
from curation.common import CACHE, language_models, shuffled
from curation.config import JudgingCommand, JudgingOptions
from curation.llm import LanguageModels, Question
from curation.retrieval import Pools, candidate_pools
from evaluation.beir import document_texts

JUDGEMENTS = "judgements.jsonl"

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


def judge(
    models: LanguageModels,
    judges: Sequence[str],
    pools: Mapping[str, Sequence[str]],
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    options: JudgingOptions,
) -> list[Judgement]:
    """Has each judge, an endpoint by name, grade the documents of each pool, ids by query id.

    All judges see the same calls: the pool's documents in its order, cut into groups. Queries
    and documents are texts by id. Returns a judgement for each pair, in the pools' order.
    """
    size = options.passages_per_call
    groups = [
        (query, pool[start : start + size])
        for query, pool in pools.items()
        for start in range(0, len(pool), size)
    ]
    system, again = (prompts.prompt(name, options.language) for name in ("judge", "again"))

    def question(query: str, group: Sequence[str]) -> Question[BaseModel]:
        texts = (documents[id_][: options.passage_chars] for id_ in group)
        passages = {f"Passage-{place}": text for place, text in enumerate(texts)}
        return Question(
            id=f"{query} {' '.join(group)}",
            system=system,
            user=prompts.question(question=queries[query], passages=passages),
            again=again,
            answer=grades_model(len(group)),
        )

    # Made when they are asked: together they can be gigabytes.
    questions = [partial(question, query, group) for query, group in groups]
    answers = models.ask(dict.fromkeys(judges, questions), "judge")
    return [
        Judgement(query, id_, {n: getattr(answers[n][at], f"passage_{i}", None) for n in judges})
        for at, (query, group) in enumerate(groups)
        for i, id_ in enumerate(group)
    ]


@cache
def grades_model(count: int) -> type[BaseModel]:
    """Returns the schema of an answer: a grade for `Passage-0` to `Passage-{count - 1}`."""
    fields: dict[str, Any] = {
        f"passage_{i}": (Grade, Field(alias=f"Passage-{i}")) for i in range(count)
    }
    model: type[BaseModel] = create_model("Grades", __config__=ConfigDict(extra="forbid"), **fields)
    return model


@dataclass(frozen=True, slots=True)
class Judged:
    """Candidates and what the judges said of them."""

    pools: Pools  # ids by query id, best first
    judgements: Mapping[tuple[str, str], Judgement]  # by query and document id

    def of(self, query: str, verdict: str) -> list[str]:
        """Returns the documents of a query that have a verdict, in the pool's order."""
        return [id_ for id_ in self.pools[query] if self.judgements[query, id_].verdict == verdict]


def judge_candidates(
    config: JudgingCommand,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    also: Mapping[str, Sequence[str]] | None = None,
) -> Judged:
    """Retrieves candidates, has them judged, and writes judgements, costs, invalid answers.

    Judges see each pool in an order that tells nothing, the same for all of them. Documents in
    `also`, ids by query id, are judged wherever they rank. The output folder must be locked.
    """
    if not queries or not documents:
        message = f"{config.queries} and {config.corpus} leave nothing to judge"
        counts = {"queries": len(queries), "documents": len(documents)}
        raise CareError(message, code="nothing_to_judge", **counts)
    # Opened first: a key that is missing shows before hours of encoding.
    with language_models(config, config.judges) as models:
        vectors = config.output / CACHE / "vectors"
        pools = candidate_pools(config.retrievers, documents, queries, config.depth, vectors)
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
    return Judged(pools, {(item.query, item.document): item for item in judgements})
