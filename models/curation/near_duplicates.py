"""What the diversity filter does to hard negatives: how many of a query's say nearly the same.

The filter looks at vectors. Here texts are near-duplicates by their characters, so that the
measure is not the filter's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.files import write_text
from core.text import normalize_text
from core.types import Document, FloatArray
from models.curation.diversity import DiversityOptions, DiversityRule, diversify
from models.curation.encoding import encode_pair
from models.curation.records import (
    beir_files,
    markdown_table,
    provenance,
    write_json,
)
from models.curation.vector_index import exact_search
from models.curation.work import CACHE, output_folder, sample_queries
from models.evaluation.beir import check_judged, read_documents, read_qrels, read_queries

Kept = NDArray[np.bool_]

SEEDS = 1000
THRESHOLDS = (0.98, 0.96, 0.94, 0.92, 0.90)
# Shares of characters' trigrams, of all that either text has, from which on texts are alike.
_ALIKE = 0.4


def trigrams(text: str) -> frozenset[str]:
    """Returns the runs of three characters of a text, white space left out."""
    text = "".join(normalize_text(text).split())
    return frozenset(text[at : at + 3] for at in range(max(1, len(text) - 2)))


def alike(first: frozenset[str], second: frozenset[str]) -> bool:
    """Whether the Jaccard index of two sets of trigrams reaches the limit."""
    # The index is at most the smaller size over the larger: most pairs need no more.
    small, large = sorted((len(first), len(second)))
    if small < _ALIKE * large:
        return False
    common = len(first & second)
    return common >= _ALIKE * (small + large - common)


def measure_diversity(
    data: Path,
    output: Path,
    *,
    split: str,
    queries: int,
    depth: int,
    seed: int,
    pair: str,
    threads: int,
) -> dict[str, Any]:
    """Counts near-duplicates among hard negatives before and after the filter.

    Hard negatives of a query are the `depth` best documents that are not marked relevant.

    Args:
        data: A BEIR folder: corpus.jsonl, {split}.queries.jsonl, {split}.qrels.tsv.
        output: Folder for diversity.json and diversity.md.
        split: The split.
        queries: Questions that are sampled.
        depth: Hard negatives of each.
        seed: Of the sample.
        pair: The pair that searches and whose vectors the filter sees.
        threads: Of encoder and search.

    Raises:
        CareError: If the data or the pair cannot be read.
    """
    documents = read_documents(data / "corpus.jsonl")
    path = data / f"{split}.qrels.tsv"
    qrels, every = read_qrels(path), read_queries(data / f"{split}.queries.jsonl")
    check_judged(path, qrels, every, {document.id for document in documents})
    asked = sample_queries({id_: every[id_] for id_ in qrels}, queries, seed)
    with output_folder(output):
        vectors, query_vectors = encode_pair(
            pair, documents, list(asked.values()), output / CACHE, threads=threads
        )
        grams = [trigrams(document.text) for document in documents]
        rows = [
            {
                "t": threshold,
                "documents": int(kept.sum()),
                **_count(documents, grams, kept, vectors, query_vectors, asked, qrels, depth),
            }
            for threshold, kept in _filtered(vectors, threads)
        ]
        result = {
            "data": {"split": split, "queries": len(asked), "depth": depth, "seed": seed},
            "pair": pair,
            "rule": {"k": 5, "near": 1, "seeds": SEEDS},
            "jaccard": _ALIKE,
            **provenance(beir_files(data, split)),
            "rows": rows,
        }
        write_json(output / "diversity.json", result)
        header = (
            *("t", "documents kept", "hard negatives", "near-duplicate pairs"),
            *("negatives with a near-duplicate", "share", "queries with any"),
        )
        table = [["–" if value is None else value for value in row.values()] for row in rows]
        write_text(output / "diversity.md", markdown_table(header, table))
    return result


def _filtered(vectors: FloatArray, threads: int) -> Iterator[tuple[float | None, Kept]]:
    yield None, np.ones(len(vectors), dtype=np.bool_)
    options = DiversityOptions(seeds=SEEDS)
    for threshold in THRESHOLDS:
        yield threshold, diversify(vectors, DiversityRule(5, threshold, 1), options, threads).kept


def _count(
    documents: Sequence[Document],
    grams: Sequence[frozenset[str]],
    kept: Kept,
    vectors: FloatArray,
    query_vectors: FloatArray,
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
    depth: int,
) -> dict[str, Any]:
    rows = np.flatnonzero(kept)
    most = depth + max(map(len, qrels.values()))
    hits = exact_search(np.ascontiguousarray(vectors[rows]), query_vectors, most)
    negatives = pairs = touched = affected = 0
    for query, found in zip(queries, hits.rows, strict=True):
        hard = [row for row in rows[found] if documents[row].id not in qrels[query]][:depth]
        close = [(a, b) for a, b in combinations(hard, 2) if alike(grams[a], grams[b])]
        negatives += len(hard)
        pairs += len(close)
        touched += len({row for two in close for row in two})
        affected += bool(close)
    return {
        "negatives": negatives,
        "near_duplicate_pairs": pairs,
        "negatives_with_near_duplicate": touched,
        "share": touched / negatives,
        "queries_with_any": affected,
    }
