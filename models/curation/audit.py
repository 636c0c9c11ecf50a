"""An existing benchmark judged again: what it calls relevant and is not, and what it missed."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from core.files import write_text
from models.curation.agreement import agreement, summary
from models.curation.config import AuditConfig
from models.curation.records import markdown_table, write_csv, write_json, write_jsonl
from models.curation.work import judge_candidates, output_folder, sample_queries
from models.evaluation.beir import check_judged, read_documents, read_qrels, read_queries


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One query of an audited benchmark.

    Attributes:
        query_id: The query's id.
        query: Its text.
        original_positives: Documents that the benchmark calls relevant.
        judged_positives: Documents that all judges call relevant.
        false_positives: Original positives that no judge calls relevant.
        false_negatives: Judged positives that the benchmark does not name.
        disputed: Documents on which the judges differ, or which one did not grade.
    """

    query_id: str
    query: str
    original_positives: list[str]
    judged_positives: list[str]
    false_positives: list[str]
    false_negatives: list[str]
    disputed: list[str]


def audit(config: AuditConfig) -> dict[str, Any]:
    """Writes the table as audit.csv and audit.jsonl, and totals; returns the totals.

    Raises:
        CareError: If an input is wrong, an endpoint fails, or the budget is spent.
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
        judged = judge_candidates(
            config, documents, queries, {query: relevant[query] for query in queries}
        )
        rows = []
        for query, text in queries.items():
            original, positives = relevant[query], sorted(judged.of(query, "positive"))
            negatives = set(judged.of(query, "negative"))
            rows.append(
                AuditRow(
                    query,
                    text,
                    original,
                    positives,
                    [id_ for id_ in original if id_ in negatives],
                    [id_ for id_ in positives if id_ not in original],
                    sorted(judged.of(query, "disputed") + judged.of(query, "incomplete")),
                )
            )
        lists = [field.name for field in fields(AuditRow)][2:]
        write_csv(
            folder / "audit.csv",
            [
                ("query_id", "query", *(f"{name}_count" for name in lists), *lists),
                *(
                    (
                        row.query_id,
                        row.query,
                        *(len(getattr(row, name)) for name in lists),
                        *(" ".join(getattr(row, name)) for name in lists),
                    )
                    for row in rows
                ),
            ],
        )
        write_jsonl(folder / "audit.jsonl", map(asdict, rows))
        totals = {name: sum(len(getattr(row, name)) for row in rows) for name in lists}
        statistics = {
            "queries": len(rows),
            "queries_with_false_negatives": sum(bool(row.false_negatives) for row in rows),
            **totals,
            "agreement": agreement(list(judged.judgements.values())),
        }
        main = [(key, value) for key, value in statistics.items() if key != "agreement"]
        write_text(
            folder / "statistics.md",
            markdown_table(("", ""), [*main, *summary(statistics["agreement"])]),  # type: ignore[arg-type]
        )
        write_json(folder / "statistics.json", statistics)
    return statistics
