"""Scores of an index on judged queries."""

import warnings
from pathlib import Path

from care.extras import require
from care.search import open_index
from core.choices import DEFAULT_QUERY_CHARS
from core.types import Mode


def evaluate(
    name: str,
    *,
    queries: str | Path,
    qrels: str | Path,
    pair: str | None = None,
    indexes: str | Path | None = None,
    milvus_uri: str | None = None,
    mode: Mode | None = None,
) -> dict[str, float]:
    """Scores the active version of an index on judged queries.

    An index of chunks is scored by documents. If judged documents are not in the index, a
    `UserWarning` counts them. `care evaluate` compares the modes with BM25 and suggests a
    `min_score`.

    Example:
        >>> care.evaluate("mine", queries="queries.jsonl", qrels="qrels/test.tsv")["nDCG@10"]

    Args:
        name: Name of the index.
        queries: JSONL file with `_id` and `text`.
        qrels: TSV file with query-id, corpus-id and score; only its queries are searched.
        pair: As in `open_index`.
        indexes: As in `open_index`.
        milvus_uri: As in `open_index`.
        mode: "dense", "lexical" or "hybrid"; None for the default of the index.

    Returns:
        Means over the judged queries: nDCG@10, MRR@10, Recall@10 and Recall@100.

    Raises:
        DataError: If a file is wrong, the judgements reference an unknown query, or a judged query
            is empty or has more than 2,000 characters.
        CareError: If the index cannot be opened (see `open_index`), or the packages of evaluation
            are not installed.
        QueryError: If the index has no full text, which the mode needs.
    """
    require("eval")
    from evaluation.beir import read_judged_queries
    from evaluation.index_evaluation import TOP_K, judgement_coverage
    from evaluation.metrics import score

    judged, judgements = read_judged_queries(Path(queries), Path(qrels), DEFAULT_QUERY_CHARS)
    with open_index(name, pair=pair, indexes=indexes, milvus_uri=milvus_uri) as index:
        if warning := judgement_coverage(judgements, index.documents()).warning(name):
            warnings.warn(warning, stacklevel=2)
        found = index.search_many(list(judged.values()), TOP_K, collapse=True, mode=mode)
    run = {
        id_: {hit.parent or hit.id: hit.score for hit in hits}
        for id_, hits in zip(judged, found, strict=True)
    }
    return score(judgements, run)
