"""Judges an existing benchmark again: its false positives and false negatives."""

from typing import Any

from core.files import write_text
from core.records import write_csv, write_json, write_jsonl
from curation.agreement import agreement, summary
from curation.common import markdown_table, output_folder, sample_queries
from curation.config import AuditConfig
from curation.judging import judge_candidates
from evaluation.beir import check_judged, read_documents, read_qrels, read_queries

# Lists of document ids for each query: positives of the benchmark; positives of the vote; positives
# of the benchmark that the vote calls negative; positives of the vote that the benchmark lacks;
# disputed and incomplete pairs.
LISTS = "original_positives", "judged_positives", "false_positives", "false_negatives", "disputed"


def audit(config: AuditConfig) -> dict[str, Any]:
    """Writes a row per query to audit.csv and audit.jsonl, and totals; returns the totals."""
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
        judged = judge_candidates(
            config, documents, queries, {query: relevant[query] for query in queries}
        )
        rows: list[dict[str, Any]] = []
        table: list[list[object]] = [
            ["query_id", "query", *(f"{name}_count" for name in LISTS), *LISTS]
        ]
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
        write_csv(folder / "audit.csv", table)
        write_jsonl(folder / "audit.jsonl", rows)
        labels = agreement(list(judged.judgements.values()), config.method)
        statistics: dict[str, Any] = {
            "queries": len(rows),
            "queries_with_false_negatives": sum(bool(row["false_negatives"]) for row in rows),
            **{name: sum(len(row[name]) for row in rows) for name in LISTS},
        }
        main = [*statistics.items(), *summary(labels).items()]
        write_text(folder / "statistics.md", markdown_table(("", ""), main))
        statistics["agreement"] = labels
        write_json(folder / "statistics.json", statistics)
    return statistics
