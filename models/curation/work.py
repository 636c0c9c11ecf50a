"""What the commands that ask language models share: an output folder, candidates, grades."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from core.errors import CareError
from core.files import exclusive, writing_in
from core.text import document_text
from core.types import Document
from models.curation.config import AnnotationConfig, AuditConfig, BenchmarkConfig, Budget, Endpoint
from models.curation.judging import Judgement, JudgingOptions, judge
from models.curation.llm import LanguageModels
from models.curation.records import write_json, write_jsonl
from models.curation.retrieval import Pools, candidate_pools, sample_key

CACHE = "cache"
COST = "cost.json"
SET_ASIDE = "set-aside.jsonl"
JUDGEMENTS = "judgements.jsonl"

JudgedConfig = BenchmarkConfig | AuditConfig | AnnotationConfig


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """Makes and holds an output folder.

    Raises:
        CareError: If another command is at work there, or it cannot be written.
    """
    with writing_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            yield folder


@contextmanager
def language_models(
    endpoints: Sequence[Endpoint], folder: Path, budget: Budget, attempts: int
) -> Iterator[LanguageModels]:
    """Yields endpoints whose calls are kept in `folder`.

    However the block ends, the costs and the answers set aside are written.
    """
    with LanguageModels(endpoints, folder / CACHE / "calls.sqlite", budget, attempts) as models:
        try:
            yield models
        finally:
            write_json(folder / COST, models.costs())
            write_jsonl(folder / SET_ASIDE, map(asdict, models.set_aside))


@dataclass(frozen=True, slots=True)
class Judged:
    """Candidates and what the judges said of them.

    Attributes:
        pools: Ids by query id, best first.
        judgements: By query and document id.
    """

    pools: Pools
    judgements: Mapping[tuple[str, str], Judgement]

    def of(self, query: str, verdict: str) -> list[str]:
        """Returns the documents of a query that have a verdict, in the pool's order."""
        return [id_ for id_ in self.pools[query] if self.judgements[query, id_].verdict == verdict]


def sample_queries(queries: Mapping[str, str], limit: int | None, seed: int) -> dict[str, str]:
    """Returns at most `limit` queries, chosen by `seed`, in their order."""
    chosen = set(sorted(queries, key=lambda id_: sample_key(seed, id_))[:limit])
    return {id_: text for id_, text in queries.items() if id_ in chosen}


def judge_candidates(
    config: JudgedConfig,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    also: Mapping[str, Sequence[str]] | None = None,
) -> Judged:
    """Retrieves candidates, has them judged, and writes judgements, costs and set-asides.

    Judges see each pool in an order that tells nothing, the same for all of them.

    Args:
        config: The command's configuration; its output folder must be held.
        documents: The corpus.
        queries: Text by id.
        also: Documents by query id that are judged wherever they rank.

    Raises:
        CareError: If a retriever or endpoint cannot be used or the budget is spent.
    """
    if not queries or not documents:
        raise CareError(f"{config.queries} and {config.corpus} leave nothing to judge")
    folder = config.output
    # Opened first: a key that is missing shows before hours of encoding.
    with language_models(config.judges, folder, config.budget, config.attempts) as models:
        pools = candidate_pools(
            config.retrievers, documents, queries, config.depth, folder / CACHE / "vectors"
        )
        for query, ids in (also or {}).items():
            pools[query] += [id_ for id_ in ids if id_ not in pools[query]]
        judgements = judge(
            models,
            [endpoint.name for endpoint in config.judges],
            {
                query: sorted(pool, key=lambda id_: sample_key(config.seed, query, id_))
                for query, pool in pools.items()
            },
            queries,
            {document.id: document_text(document.title, document.text) for document in documents},
            JudgingOptions(config.language, config.passages_per_call, config.passage_chars),
        )
    write_jsonl(folder / JUDGEMENTS, (judgement.record() for judgement in judgements))
    return Judged(pools, {(item.query, item.document): item for item in judgements})
