"""Builds a benchmark from a corpus and questions: cleaning, pooling, judging, voting."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal

from core.files import write_text
from core.records import write_json, write_jsonl
from core.types import Document
from curation.agreement import agreement, summary
from curation.cleaning import clean_inputs
from curation.common import (
    markdown_table,
    output_folder,
    sample_queries,
    shuffled,
    split_queries,
)
from curation.config import TRAIN, BenchmarkConfig, Rerank
from curation.judging import Judged, judge_candidates
from evaluation.beir import (
    Qrels,
    document_texts,
    read_documents,
    read_queries,
    write_beir,
    write_documents,
    write_queries,
)
from evaluation.metrics import EXCLUDED

STATISTICS, CORPUS = "statistics.json", "corpus.jsonl"


def build_benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Writes a retrieval set, a rerank set and statistics; returns the statistics.

    `statistics.json` is written last: a folder without it is incomplete.
    """
    raw_documents, raw_queries = read_documents(config.corpus), read_queries(config.queries)
    with output_folder(config.output) as folder:
        (folder / STATISTICS).unlink(missing_ok=True)
        documents, queries, counts = clean_inputs(raw_documents, raw_queries, config.cleaning)
        sample = sample_queries(queries, config.query_limit, config.seed)
        splits = split_queries(sample, config.splits, config.seed)
        queries = {id_: queries[id_] for ids in splits.values() for id_ in ids}
        write_queries(folder / "queries.jsonl", queries)
        write_documents(folder / CORPUS, documents)
        judged = judge_candidates(config, documents, queries)
        qrels, removed = refined(judged, splits, config.disputed)
        left = [document for document in documents if document.id not in removed]
        answered = set().union(*qrels.values())
        texts = {query: text for query, text in queries.items() if query in answered}
        (folder / "rerank").mkdir(exist_ok=True)
        statistics = agreement(list(judged.judgements.values()), config.method) | {
            "cleaning": counts,
            "pool": _counts([len(pool) for pool in judged.pools.values()]),
            "corpus": {"documents": len(left), "removed": len(removed)},
            "splits": {},
        }
        for split, ids in splits.items():
            write_beir(folder / "retrieval", split, left, texts, qrels[split])
            of_split = {query: queries[query] for query in ids}
            rerank = rerank_set(judged, of_split, left, config.rerank, config.seed)
            write_jsonl(folder / "rerank" / f"{split}.jsonl", rerank)
            grades = [list(grades.values()) for grades in qrels[split].values()]
            statistics["splits"][split] = {
                "judged": len(ids),
                "retrieval": _counts([found.count(1) for found in grades]),
                "excluded_pairs": sum(found.count(EXCLUDED) for found in grades),
                "rerank": _counts([len(row["positives"]) for row in rerank]),
            }
        main = summary(statistics) | {
            f"{split}: queries of the {name} set": found[name]["queries"]
            for split, found in statistics["splits"].items()
            for name in ("retrieval", "rerank")
        }
        main["documents removed from the corpus"] = len(removed)
        write_text(folder / "statistics.md", markdown_table(("", ""), main.items()))
        write_json(folder / STATISTICS, statistics)
    return statistics


def refined(
    judged: Judged,
    splits: Mapping[str, Sequence[str]],
    disputed: Literal["exclude", "drop", "keep"],
) -> tuple[dict[str, Qrels], set[str]]:
    """Returns the judgements of each split, and the documents that leave the corpus.

    A pair without agreement is neither relevant nor not relevant: it must not be scored. For the
    queries of all splits but `train`, `disputed` says how:

    - `exclude`: the document leaves the corpus if it is positive for no query; otherwise the pair
      gets the grade -1, which scorers exclude from the hits of this query alone;
    - `drop`: the document leaves the corpus, even if it is positive for other queries;
    - `keep`: it stays, and counts as not relevant.

    Positives have the grade 1. Queries without one are omitted.
    """
    positives = {query: judged.of(query, "positive") for ids in splits.values() for query in ids}
    unsettled = {
        query: judged.of(query, "disputed") + judged.of(query, "incomplete")
        for split, ids in splits.items()
        for query in ids
        if split != TRAIN and disputed != "keep"
    }
    removed = set().union(*unsettled.values())
    if disputed == "exclude":
        removed -= set().union(*positives.values())
    qrels: dict[str, Qrels] = {split: {} for split in splits}
    for split, ids in splits.items():
        for query in ids:
            grades = dict.fromkeys(positives[query], 1)
            grades |= dict.fromkeys(unsettled.get(query, ()), EXCLUDED)
            left = {id_: grades[id_] for id_ in sorted(grades) if id_ not in removed}
            if 1 in left.values():
                qrels[split][query] = left
    return qrels, removed


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
    """Returns queries with samples of their positives and negatives, which both are in `documents`.

    Queries without a positive or without a negative are omitted.
    """
    texts = document_texts(documents)
    rows = []
    for query, text in queries.items():
        row: dict[str, Any] = {"_id": query, "query": text}
        for verdict, size in (("positive", sizes.positives), ("negative", sizes.negatives)):
            agreed = (id_ for id_ in judged.of(query, verdict) if id_ in texts)
            ids = shuffled(agreed, seed, "rerank", query)
            row[f"{verdict}s"] = [texts[id_] for id_ in ids[:size]]
        if row["positives"] and row["negatives"]:
            rows.append(row)
    return rows
