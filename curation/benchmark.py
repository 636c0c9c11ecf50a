"""Builds a benchmark from a corpus and questions: cleaning, pooling, judging, voting."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from core.files import write_text
from core.records import write_json, write_jsonl
from core.types import Document
from curation.agreement import agreement, summary
from curation.cleaning import clean_inputs
from curation.common import markdown_table, output_folder, sample_queries, shuffled
from curation.config import BenchmarkConfig, Rerank
from curation.judging import Judged, judge_candidates
from evaluation.beir import document_texts, read_documents, read_queries, write_beir, write_queries

STATISTICS = "statistics.json"


def build_benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Writes a retrieval set, a rerank set and statistics; returns the statistics.

    `statistics.json` is written last: a folder without it is incomplete.
    """
    raw_documents, raw_queries = read_documents(config.corpus), read_queries(config.queries)
    with output_folder(config.output) as folder:
        (folder / STATISTICS).unlink(missing_ok=True)
        documents, queries, counts = clean_inputs(raw_documents, raw_queries, config.cleaning)
        queries = sample_queries(queries, config.query_limit, config.seed)
        write_queries(folder / "queries.jsonl", queries)
        judged = judge_candidates(config, documents, queries)
        positives = {query: judged.of(query, "positive") for query in queries}
        write_beir(
            folder / "retrieval",
            config.split,
            documents,
            {query: text for query, text in queries.items() if positives[query]},
            {query: dict.fromkeys(sorted(ids), 1) for query, ids in positives.items() if ids},
        )
        rerank = rerank_set(judged, queries, documents, config.rerank, config.seed)
        (folder / "rerank").mkdir(exist_ok=True)
        write_jsonl(folder / "rerank" / f"{config.split}.jsonl", rerank)

        statistics = agreement(list(judged.judgements.values())) | {
            "cleaning": counts,
            "retrieval": _counts([len(ids) for ids in positives.values() if ids]),
            "rerank": _counts([len(row["positives"]) for row in rerank]),
            "pool": _counts([len(pool) for pool in judged.pools.values()]),
        }
        main = summary(statistics) | {
            "queries with a positive": statistics["retrieval"]["queries"],
            "queries of the rerank set": statistics["rerank"]["queries"],
        }
        write_text(folder / "statistics.md", markdown_table(("", ""), main.items()))
        write_json(folder / STATISTICS, statistics)
    return statistics


def _counts(sizes: Sequence[int]) -> dict[str, float]:
    spread = {"min": min(sizes), "mean": mean(sizes), "max": max(sizes)} if sizes else {}
    return {"queries": len(sizes), **spread}


def rerank_set(
    judged: Judged,
    queries: Mapping[str, str],
    documents: Sequence[Document],
    sizes: Rerank,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns the queries that have positives and negatives, with a sample of both."""
    texts = document_texts(documents)
    rows = []
    for query, text in queries.items():
        row: dict[str, Any] = {"_id": query, "query": text}
        for verdict, size in (("positive", sizes.positives), ("negative", sizes.negatives)):
            ids = shuffled(judged.of(query, verdict), seed, "rerank", query)
            row[f"{verdict}s"] = [texts[id_] for id_ in ids[:size]]
        if row["positives"] and row["negatives"]:
            rows.append(row)
    return rows
