"""A benchmark from a corpus and questions: washed, pooled, judged, voted on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from core.files import write_text
from core.text import document_text
from core.types import Document
from models.curation.agreement import agreement, summary
from models.curation.config import BenchmarkConfig, Rerank
from models.curation.records import (
    document_record,
    markdown_table,
    query_record,
    write_json,
    write_jsonl,
    write_tsv,
)
from models.curation.retrieval import sample_key
from models.curation.washing import wash_documents, wash_queries
from models.curation.work import Judged, judge_candidates, output_folder, sample_queries
from models.evaluation.beir import read_documents, read_queries

STATISTICS = "statistics.json"


def build_benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Writes a retrieval set, a rerank set and statistics; returns the statistics.

    `statistics.json` is written last: a folder without it is not whole.

    Raises:
        CareError: If an input is wrong, an endpoint fails, or the budget is spent.
    """
    washing = config.washing
    raw_documents, raw_queries = read_documents(config.corpus), read_queries(config.queries)
    with output_folder(config.output) as folder:
        (folder / STATISTICS).unlink(missing_ok=True)
        documents, document_counts = wash_documents(
            raw_documents, washing.document_chars, anonymous=washing.anonymize
        )
        queries, query_counts = wash_queries(
            raw_queries, washing.query_chars, anonymous=washing.anonymize
        )
        queries = sample_queries(queries, config.query_limit, config.seed)
        write_jsonl(folder / "queries.jsonl", map(query_record, queries.items()))
        judged = judge_candidates(config, documents, queries)
        positives = {query: judged.of(query, "positive") for query in queries}
        _write_retrieval(folder / "retrieval", config.split, documents, queries, positives)
        rerank = rerank_set(judged, queries, documents, config.rerank, config.seed)
        (folder / "rerank").mkdir(exist_ok=True)
        write_jsonl(folder / "rerank" / f"{config.split}.jsonl", rerank)

        statistics = agreement(list(judged.judgements.values())) | {
            "washing": {"documents": dict(document_counts), "queries": dict(query_counts)},
            "retrieval": _counts([len(ids) for ids in positives.values() if ids]),
            "rerank": _counts([len(row["positives"]) for row in rerank]),
            "pool": _counts([len(pool) for pool in judged.pools.values()]),
        }
        table = markdown_table(
            ("", ""),
            [
                *summary(statistics),
                ("queries with a positive", statistics["retrieval"]["queries"]),
                ("queries of the rerank set", statistics["rerank"]["queries"]),
            ],
        )
        write_text(folder / "statistics.md", table)
        write_json(folder / STATISTICS, statistics)
    return statistics


def _counts(sizes: Sequence[int]) -> dict[str, float]:
    spread = {"min": min(sizes), "mean": mean(sizes), "max": max(sizes)} if sizes else {}
    return {"queries": len(sizes), **spread}


def _write_retrieval(
    folder: Path,
    split: str,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    positives: Mapping[str, Sequence[str]],
) -> None:
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "corpus.jsonl", map(document_record, documents))
    judged = {id_: text for id_, text in queries.items() if positives[id_]}
    write_jsonl(folder / f"{split}.queries.jsonl", map(query_record, judged.items()))
    write_tsv(
        folder / f"{split}.qrels.tsv",
        [
            ("query-id", "corpus-id", "score"),
            *((query, id_, 1) for query in judged for id_ in sorted(positives[query])),
        ],
    )


def rerank_set(
    judged: Judged,
    queries: Mapping[str, str],
    documents: Sequence[Document],
    sizes: Rerank,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns queries with sampled positives and negatives; those that lack either are left out."""
    texts = {document.id: document_text(document.title, document.text) for document in documents}
    rows = []
    for query, text in queries.items():
        sampled = {
            verdict: [
                texts[id_]
                for id_ in sorted(
                    judged.of(query, verdict),
                    key=lambda id_: sample_key(seed, "rerank", query, id_),
                )[:size]
            ]
            for verdict, size in (("positive", sizes.positives), ("negative", sizes.negatives))
        }
        if all(sampled.values()):
            rows.append(
                {
                    "_id": query,
                    "query": text,
                    "positives": sampled["positive"],
                    "negatives": sampled["negative"],
                }
            )
    return rows
