"""What judged candidates make: benchmarks, audits of benchmarks, and training triples."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal

from core.files import write_text
from core.records import write_csv, write_json, write_jsonl
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
from curation.config import TRAIN, AnnotationConfig, AuditConfig, BenchmarkConfig, Rerank
from curation.judging import Judged, judge_candidates
from evaluation.beir import (
    Qrels,
    check_judged,
    document_texts,
    read_documents,
    read_qrels,
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


# Lists of document ids for each query: positives of the benchmark; positives of the vote; positives
# of the benchmark that the vote calls negative; positives of the vote that the benchmark lacks;
# disputed and incomplete pairs.
LISTS = "original_positives", "judged_positives", "false_positives", "false_negatives", "disputed"
FALSE_NEGATIVES = "false-negatives.jsonl"


def audit(config: AuditConfig) -> dict[str, Any]:
    """Judges the first candidates and all positives of each query of a benchmark.

    Writes a row per query to audit.csv and audit.jsonl, the texts of false negatives, and
    statistics, which are returned. Those hold for each list its mean size per query, over all
    judged pairs (`means`) and over the pools alone (`means_of_pools`), as the paper counts in its
    Table 13.
    """
    documents = read_documents(config.corpus)
    every = read_queries(config.queries)
    relevant = {
        query: sorted(id_ for id_, grade in grades.items() if grade > 0)
        for query, grades in read_qrels(config.qrels).items()
    }
    check_judged(config.qrels, relevant, every, {document.id for document in documents})
    queries = sample_queries(
        {id_: text for id_, text in every.items() if relevant.get(id_)},
        config.query_limit,
        config.seed,
    )
    with output_folder(config.output) as folder:
        (folder / "statistics.json").unlink(missing_ok=True)
        judged = judge_candidates(
            config, documents, queries, {query: relevant[query] for query in queries}
        )
        rows: list[dict[str, Any]] = []
        table: list[list[object]] = [
            ["query_id", "query", *(f"{name}_count" for name in LISTS), *LISTS]
        ]
        sizes = {name: [0, 0] for name in LISTS}
        for query, text in queries.items():
            original, positives = relevant[query], sorted(judged.of(query, "positive"))
            negatives = set(judged.of(query, "negative"))
            lists = (
                original,
                positives,
                [id_ for id_ in original if id_ in negatives],
                [id_ for id_ in positives if id_ not in original],
                sorted(judged.of(query, "disputed") + judged.of(query, "incomplete")),
            )
            rows.append({"query_id": query, "query": text, **dict(zip(LISTS, lists, strict=True))})
            table.append([query, text, *map(len, lists), *map(" ".join, lists)])
            pool = set(judged.pools[query][: judged.found[query]])
            for size, ids in zip(sizes.values(), lists, strict=True):
                size[0] += len(ids)
                size[1] += len(pool.intersection(ids))
        write_csv(folder / "audit.csv", table)
        write_jsonl(folder / "audit.jsonl", rows)
        texts = document_texts(documents)
        write_jsonl(
            folder / FALSE_NEGATIVES,
            (
                {"query-id": row["query_id"], "query": row["query"], "corpus-id": id_}
                | {"text": texts[id_]}
                for row in rows
                for id_ in row["false_negatives"]
            ),
        )
        labels = agreement(list(judged.judgements.values()), config.method)
        statistics: dict[str, Any] = {
            "queries": len(rows),
            "queries_with_false_negatives": sum(bool(row["false_negatives"]) for row in rows),
            **{name: whole for name, (whole, _) in sizes.items()},
        }
        means, of_pools = (
            {name: size[place] / len(rows) for name, size in sizes.items()} for place in (0, 1)
        )
        names = {f"{name} per query": mean for name, mean in means.items()}
        names |= {f"{name} per query, in the pool": mean for name, mean in of_pools.items()}
        main = [*statistics.items(), *names.items(), *summary(labels).items()]
        statistics |= {"means": means, "means_of_pools": of_pools}
        write_text(folder / "statistics.md", markdown_table(("", ""), main))
        statistics["agreement"] = labels
        write_json(folder / "statistics.json", statistics)
    return statistics


def annotate(config: AnnotationConfig) -> dict[str, Any]:
    """Writes triples.jsonl: `query`, `positives`, `negatives`, in the order of the pool's ranks.

    Positives are graded S or A, or classified as positive. A text that several documents share is
    written once, as a positive if one of the documents is positive, because training needs disjoint
    lists. Queries without a positive or without a negative are omitted and counted. Returns the
    statistics, as written to statistics.json.
    """
    documents, queries = read_documents(config.corpus), read_queries(config.queries)
    cleaned: dict[str, Any] = {}
    if config.cleaning:
        documents, queries, counts = clean_inputs(documents, queries, config.cleaning)
        cleaned = {"cleaning": counts}
    queries = sample_queries(queries, config.query_limit, config.seed)
    texts = document_texts(documents)
    with output_folder(config.output) as folder:
        judged = judge_candidates(config, documents, queries)
        triples = []
        lacking = {"no_positive": 0, "no_negative": 0}
        for query, text in queries.items():
            positives, others = (
                dict.fromkeys(texts[id_] for id_ in judged.of(query, verdict) if texts[id_])
                for verdict in ("positive", "negative")
            )
            negatives = [text for text in others if text not in positives]
            lacking["no_positive"] += not positives
            lacking["no_negative"] += bool(positives) and not negatives
            if positives and negatives:
                most = negatives[: config.max_negatives]
                triples.append({"query": text, "positives": list(positives), "negatives": most})
        write_jsonl(folder / "triples.jsonl", triples)
        labels = agreement(list(judged.judgements.values()), config.method)
        statistics = {
            "queries": len(queries),
            "triples": len(triples),
            **lacking,
            "positives": sum(len(triple["positives"]) for triple in triples),
            "negatives": sum(len(triple["negatives"]) for triple in triples),
            "grades": labels["grades"],
            "verdicts": labels["verdicts"],
            **cleaned,
        }
        write_json(folder / "statistics.json", statistics)
    return statistics
