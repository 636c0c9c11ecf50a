"""Training triples: the first candidates of each query, labelled by one language model."""

from typing import Any

from core.records import write_json, write_jsonl
from curation.agreement import agreement
from curation.cleaning import clean_inputs
from curation.common import output_folder, sample_queries
from curation.config import AnnotationConfig
from curation.judging import judge_candidates
from evaluation.beir import document_texts, read_documents, read_queries


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
