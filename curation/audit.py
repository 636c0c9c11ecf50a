"""Judges an existing benchmark again: its false positives and false negatives."""

from typing import Any

from core.files import write_text
from core.records import write_csv, write_json, write_jsonl
from curation.agreement import agreement, summary
from curation.common import markdown_table, output_folder, sample_queries
from curation.config import AuditConfig
from curation.judging import judge_candidates
from evaluation.beir import (
    check_judged,
    document_texts,
    read_documents,
    read_qrels,
    read_queries,
)

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
