"""Training triples: the best candidates of each query, graded by one language model."""

from typing import Any

from core.records import write_json, write_jsonl
from curation.agreement import agreement
from curation.common import output_folder, sample_queries
from curation.config import AnnotationConfig
from curation.judging import judge_candidates
from evaluation.beir import document_texts, read_documents, read_queries


def annotate(config: AnnotationConfig) -> dict[str, Any]:
    """Writes triples.jsonl: `query`, `positives`, `negatives`, best ranked first.

    Positives are graded S or A. A text that several documents have stands once, and as a positive
    if one of them is; training takes no other. Queries that lack either are left out and counted.
    Returns the statistics, as written to statistics.json.
    """
    documents = read_documents(config.corpus)
    queries = sample_queries(read_queries(config.queries), config.query_limit, config.seed)
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
        labels = agreement(list(judged.judgements.values()))
        statistics = {
            "queries": len(queries),
            "triples": len(triples),
            **lacking,
            "positives": sum(len(triple["positives"]) for triple in triples),
            "negatives": sum(len(triple["negatives"]) for triple in triples),
            "grades": labels["grades"],
            "verdicts": labels["verdicts"],
        }
        write_json(folder / "statistics.json", statistics)
    return statistics
