"""The scores of an index in each mode, beside BM25 on the same documents."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

from core.choices import DEFAULT_QUERY_CHARS
from core.encoders import Encoder
from core.errors import CareError
from core.files import sha256_file
from core.manifest import FULL_TEXT, VECTORS_FILE, IndexManifest
from core.provenance import commit, environment, hardware
from core.types import Document, Mode, Query
from evaluation.beir import Qrels, Run, read_judged_queries
from evaluation.bm25 import ENGINE, LABELS, bm25_run
from evaluation.comparison import Comparison, compare_runs, run_name
from evaluation.index_search import Reranker, Searcher
from evaluation.statistics import Difference, paired_difference
from evaluation.weights import (
    DEPTH,
    MinScoreSuggestion,
    WeightScore,
    best_weight,
    compare_weights,
    suggest_min_score,
)
from search.snapshot import Snapshot

TOP_K = 100
# Hits that are ranked again: the default of the service.
RERANKED = 50
# Ranks the documents or chunks of an index for queries, given by id.
System = Callable[[Iterable[Document], Mapping[str, str], Qrels], Run]
# Queries that response times are measured with, at most.
_TIMED = 300


@dataclass(frozen=True, slots=True)
class JudgementCoverage:
    """How many of the judged documents an index holds."""

    judged_documents: int
    judged_documents_not_indexed: int
    queries_without_indexed_answer: int  # no relevant document is indexed: they can only score 0
    relevant_documents: int  # judged above 0 for some query

    def warning(self, index: str) -> str | None:
        """Returns a sentence about judgements that are all 0 or that the index lacks, or None."""
        if not self.relevant_documents:
            return "no judgement is above 0, so every score is 0: check the file of judgements"
        if not self.judged_documents_not_indexed:
            return None
        return (
            f"{self.judged_documents_not_indexed:,} of {self.judged_documents:,} judged "
            f"documents are not in index '{index}'; "
            f"{self.queries_without_indexed_answer:,} queries have no relevant document in it "
            "and score 0. Scores of an index of part of the corpus cannot be compared with scores "
            "on the whole corpus."
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of searches one after another, from the text to its hits, in this process."""

    queries_per_second: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Returns the speed of searches that took these times [s]."""
        p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1000
        return cls(len(seconds) / sum(seconds), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class IndexEvaluation:
    """Scores of the modes of an index and of BM25, and what they were measured on."""

    index: str  # name of the index
    version: str  # id of its version
    pair: str  # name of the pair
    factory: str  # type of the index
    documents: int  # number of documents in the index
    queries: int  # number of judged queries
    mode: Mode  # the default mode of the index
    # Scores of the modes, of the default mode with its first hits ranked again if something does
    # that, of BM25, and of the other systems; differences are to mode dense.
    comparison: Comparison
    # Difference of nDCG@10 to the default mode, of this mode with its first hits ranked again; None
    # if nothing does that.
    rerank_gain: Difference | None
    speeds: dict[str, Speed]  # times of each system but BM25
    timed: int  # number of queries that these were measured with
    coverage: JudgementCoverage  # how many of the judged documents the index holds
    min_score: MinScoreSuggestion | None  # a suggestion for mode `mode`
    bytes_per_passage: dict[str, float]  # size of vectors and full text
    weights: list[WeightScore]  # scores of weights of full text, if they were asked for
    facts: dict[str, Any]  # encoder, checksums, versions of libraries

    @property
    def warning(self) -> str | None:
        """The sentence of `coverage`, or None if there is nothing to warn of."""
        return self.coverage.warning(self.index)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as a JSON object, as `--output` and `--json` write it."""
        return {
            "mode": self.mode,
            **self.comparison.as_json(),
            "rerank_gain": asdict(self.rerank_gain) if self.rerank_gain else None,
            "speeds": {name: asdict(speed) for name, speed in self.speeds.items()},
            "timed_queries": self.timed,
            "coverage": asdict(self.coverage),
            "min_score": asdict(self.min_score) if self.min_score else None,
            "index": {
                "name": self.index,
                "version": self.version,
                "pair": self.pair,
                "factory": self.factory,
                "documents": self.documents,
                "bytes_per_passage": self.bytes_per_passage,
            },
            "queries": self.queries,
            "bm25": ENGINE,
            "weights": [asdict(each) for each in self.weights],
            "lexical_weight": best_weight(self.weights),
            **self.facts,
        }


def evaluate_index(
    open_index: Callable[[], tuple[Snapshot, Encoder]],
    pair: str,
    queries: Path,
    qrels: Path,
    weights: Sequence[float] = (),
    server: Reranker | None = None,
    max_query_chars: int = DEFAULT_QUERY_CHARS,
    others: Mapping[str, System] | None = None,
) -> IndexEvaluation:
    """Scores the modes of an index, BM25 and other systems, in this process.

    Only judged queries are searched. An index of chunks is scored by documents.

    Args:
        open_index: Opens the version of the index and the query encoder; called once the files
            have been read.
        pair: Name of the pair.
        queries: JSONL with `_id` and `text`.
        qrels: TSV with query-id, corpus-id and score.
        weights: Weights of full text to compare; they need an index with full text.
        server: Scores texts for a query, to rank hits again; without it late interaction does, if
            pair and index have token vectors.
        max_query_chars: Most characters of a query.
        others: Further systems by their names in the comparison.
    """
    own = {run_name(name) for name in (*get_args(Mode), *LABELS.values())}
    if taken := [name for name in others or () if run_name(name) in own]:
        message = f"a row of the table has the name '{taken[0]}' already: rename the pair or run"
        raise CareError(message, code="duplicate_system", system=taken[0])
    judged, judgements = read_judged_queries(queries, qrels, max_query_chars)
    snapshot, encoder = open_index()
    manifest = snapshot.manifest
    if weights and FULL_TEXT not in manifest.components:
        message = f"index '{manifest.name}' has no full text: add it (care update --full-text)"
        raise CareError(message, code="mode_not_available")
    searcher = Searcher(snapshot, encoder, server, max_query_chars)
    default: Mode = snapshot.modes[0]
    systems = {
        mode: Query("", TOP_K, mode=mode) for mode in get_args(Mode) if mode in snapshot.modes
    }
    reranked = ""
    if server or snapshot.late:
        reranked = f"{default} + {'server' if server else 'late interaction'}"
        systems[reranked] = Query("", RERANKED, mode=default, rerank=RERANKED)
    runs = {name: searcher.run(judged, how, name) for name, how in systems.items()}
    if reranked:
        first = runs[reranked]
        runs[reranked] = {id_: _reranked(runs[default][id_], first[id_]) for id_ in first}
    timed = list(judged.values())[:: math.ceil(len(judged) / _TIMED)]
    times = searcher.times(timed, {name: replace(q, top_k=10) for name, q in systems.items()})
    found = searcher.channels(judged, DEPTH) if weights else {}
    documents = snapshot.segment.documents
    for analyzer, label in LABELS.items():
        runs[label] = bm25_run(documents, judged, TOP_K, analyzer)
    for name, run in (others or {}).items():
        runs[name] = run(documents, judged, judgements)
    compared = compare_runs(judgements, runs, "dense")
    gain = (compared.ndcg(reranked), compared.ndcg(default)) if reranked else None
    return IndexEvaluation(
        index=manifest.name,
        version=manifest.version,
        pair=pair,
        factory=manifest.factory,
        documents=manifest.corpus.documents,
        queries=len(judged),
        mode=default,
        comparison=compared,
        rerank_gain=paired_difference(*gain) if gain else None,
        speeds={name: Speed.of(taken) for name, taken in times.items()},
        timed=len(timed),
        coverage=judgement_coverage(judgements, documents),
        min_score=suggest_min_score(judgements, runs[default]),
        bytes_per_passage=bytes_per_passage(manifest),
        weights=compare_weights(judgements, found, weights) if weights else [],
        facts={
            "encoder": manifest.encoder.model_dump(),
            "corpus_checksum": manifest.corpus.checksum,
            "queries_sha256": sha256_file(queries),
            "qrels_sha256": sha256_file(qrels),
            "top_k": TOP_K,
            "commit": commit(),
            **environment("faiss", "onnxruntime", "tokenizers"),
            **hardware(),
        },
    )


def _reranked(hits: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """Returns hits, scores by document, with `first` ranked again before all others."""
    order = [id_ for id_, _ in sorted(first.items(), key=lambda hit: -hit[1])]
    order += [id_ for id_, _ in sorted(hits.items(), key=lambda hit: -hit[1]) if id_ not in first]
    return {id_: -float(rank) for rank, id_ in enumerate(order)}


def bytes_per_passage(manifest: IndexManifest) -> dict[str, float]:
    """Returns the size of vectors and components of a version, divided by its rows."""
    records = {name: list(part.files.values()) for name, part in manifest.components.items()}
    if vectors := manifest.files.get(VECTORS_FILE):
        records = {"vectors": [vectors], **records}
    return {
        name: sum(record.bytes for record in found) / manifest.count
        for name, found in records.items()
    }


def judgement_coverage(qrels: Qrels, chunks: Iterable[Document]) -> JudgementCoverage:
    """Counts the judged documents that an index lacks, given its documents or chunks."""
    indexed = {chunk.parent or chunk.id for chunk in chunks}
    judged = {id_ for grades in qrels.values() for id_ in grades}
    return JudgementCoverage(
        judged_documents=len(judged),
        judged_documents_not_indexed=len(judged - indexed),
        queries_without_indexed_answer=sum(
            not any(grade > 0 and id_ in indexed for id_, grade in grades.items())
            for grades in qrels.values()
        ),
        relevant_documents=len(
            {id_ for grades in qrels.values() for id_, grade in grades.items() if grade > 0}
        ),
    )
