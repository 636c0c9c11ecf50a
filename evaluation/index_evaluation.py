"""The score of an index over HTTP, beside BM25 on the same documents."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core import documents
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.files import sha256_file
from core.provenance import environment
from core.service_process import running_service
from core.types import Document
from core.versions import current_version, index_folder, read_manifest
from evaluation.beir import Qrels, read_judged_queries
from evaluation.bm25 import K1, B, bm25_run
from evaluation.http import search_run, served_version
from evaluation.metrics import score
from evaluation.thresholds import MinScoreSuggestion, suggest_min_score
from models.pairs import load_pair

TOP_K = 100


@dataclass(frozen=True, slots=True)
class JudgementCoverage:
    """How many of the judged documents an index holds."""

    judged_documents: int
    judged_documents_not_indexed: int
    queries_without_indexed_answer: int  # no relevant document is indexed: they can only score 0

    def warning(self, index: str) -> str | None:
        """Returns a sentence about judged documents that the index lacks, or None."""
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
class IndexEvaluation:
    """Scores of an index and of BM25, and what they were measured on."""

    index: str
    version: str
    documents: int  # in the index
    queries: int  # judged
    index_scores: dict[str, float]  # by the names of `evaluation.metrics.MEASURES`
    bm25_scores: dict[str, float]
    index_label: str  # pair and index type, for a table
    bm25_label: str
    coverage: JudgementCoverage
    min_score: MinScoreSuggestion | None
    queries_per_second: float  # one client, batches of 32
    facts: dict[str, Any]  # encoder, checksums, versions of libraries

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """The scores of the index and of BM25, by label."""
        return {self.index_label: self.index_scores, self.bm25_label: self.bm25_scores}

    @property
    def warning(self) -> str | None:
        """A sentence about judged documents that the index lacks, or None if it lacks none."""
        return self.coverage.warning(self.index)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as a JSON object, as `--output` and `--json` write it."""
        return {
            "scores": self.scores,
            "coverage": asdict(self.coverage),
            "min_score": asdict(self.min_score) if self.min_score else None,
            "index": {"name": self.index, "version": self.version, "documents": self.documents},
            "queries": self.queries,
            "queries_per_second": self.queries_per_second,
            **self.facts,
        }


def evaluate_index(
    indexes: Path | str, index: str, pair: str, queries: Path, qrels: Path
) -> IndexEvaluation:
    """Starts the service on the active version of an index and scores its hits, and BM25's.

    The service runs as a child process on a free port, without the caller's `CARE_*` settings.
    Only judged queries are searched. An index of chunks is scored by documents.

    Args:
        indexes: Folder of the indexes.
        index: Name of the index.
        pair: Pair whose query encoder the service loads: a name or the path of a pair's TOML
            file.
        queries: JSONL with `_id` and `text`.
        qrels: TSV with query-id, corpus-id and score.

    Raises:
        CareError: If the index does not exist or is damaged, or the service does not start.
        DataError: If a file is wrong, or the judgements reference an unknown query.
    """
    judged, judgements = read_judged_queries(queries, qrels)
    root = Path(indexes)
    folder = index_folder(root, index) / current_version(root, index)
    manifest = read_manifest(folder)
    chunks = DocumentReader(folder / documents.FILE_NAME)
    with running_service(indexes, index, pair, WATCH_SECONDS="0") as server:
        if (served := served_version(server.url)) != manifest.version:
            message = (
                f"the active version {manifest.version} of index '{index}' is damaged, and the "
                f"service serves {served}: run care versions verify --index {index}"
            )
            raise IndexVersionError(message, code="version_not_served", version=manifest.version)
        started = time.perf_counter()
        run = search_run(server.url, judged, TOP_K)
        seconds = time.perf_counter() - started
    return IndexEvaluation(
        index=manifest.name,
        version=manifest.version,
        documents=manifest.corpus.documents,
        queries=len(judged),
        index_scores=score(judgements, run),
        bm25_scores=score(judgements, bm25_run(chunks, judged, TOP_K)),
        index_label=f"{load_pair(pair).name}, {manifest.factory}, HTTP",
        bm25_label=f"BM25 (bm25s, jieba, k1 {K1}, b {B})",
        coverage=judgement_coverage(judgements, chunks),
        min_score=suggest_min_score(judgements, run),
        queries_per_second=len(judged) / seconds,
        facts={
            "encoder": manifest.encoder.model_dump(),
            "corpus_checksum": manifest.corpus.checksum,
            "queries_sha256": sha256_file(queries),
            "qrels_sha256": sha256_file(qrels),
            "top_k": TOP_K,
            **environment("faiss", "onnxruntime", "tokenizers"),  # those of the service
        },
    )


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
    )
