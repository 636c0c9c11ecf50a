"""Near-duplicates among the hard negatives of queries, before and after the diversity filter.

The filter compares vectors. This measurement compares characters, so that it is independent of the
filter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.files import write_text
from core.records import write_json
from core.text import normalize_text
from core.types import Document, RowArray
from curation.common import CACHE, markdown_table, sample_queries
from curation.diversity import DiversityOptions, DiversityRule, diversify
from evaluation.beir import (
    beir_paths,
    check_judged,
    document_texts,
    read_documents,
    read_qrels,
    read_queries,
)
from evaluation.dense import encode
from models.pairs import load_pair
from stores.exact import exact_search
from tests.conftest import write_jsonl
from tests.long.curation.conftest import Settings, provenance

SEEDS = 1000
THRESHOLDS = (0.98, 0.96, 0.94, 0.92, 0.90)
# Jaccard index of trigrams from which two texts are near-duplicates.
_ALIKE = 0.4


def trigrams(text: str) -> frozenset[str]:
    """Returns the character trigrams of a text without white space."""
    text = "".join(normalize_text(text).split())
    return frozenset(text[at : at + 3] for at in range(max(1, len(text) - 2)))


def near_duplicates(first: frozenset[str], second: frozenset[str]) -> bool:
    """Returns whether the Jaccard index of two sets of trigrams reaches the limit."""
    # The ratio of sizes is an upper bound of the index, which excludes most pairs quickly.
    small, large = sorted((len(first), len(second)))
    if small < _ALIKE * large:
        return False
    common = len(first & second)
    return common >= _ALIKE * (small + large - common)


def measure_diversity(
    settings: Settings, thresholds: Sequence[float] = THRESHOLDS, seeds: int = SEEDS
) -> dict[str, Any]:
    """Counts near-duplicates among hard negatives before and after the filter.

    Hard negatives of a query are the `depth` best documents that are not judged relevant.
    Writes diversity.json and diversity.md.
    """
    paths = beir_paths(settings.data, settings.split)
    documents, every = read_documents(paths.corpus), read_queries(paths.queries)
    qrels = read_qrels(paths.qrels)
    check_judged(paths.qrels, qrels, every, {document.id for document in documents})
    asked = sample_queries({id_: every[id_] for id_ in qrels}, settings.queries, settings.seed)
    settings.output.mkdir(parents=True, exist_ok=True)
    texts = {
        "document": list(document_texts(documents).values()),
        "query": [normalize_text(text) for text in asked.values()],
    }
    pair, cache = load_pair(settings.pair), settings.output / CACHE
    vectors, query_vectors = (
        encode(pair, role, side, cache, threads=settings.threads)  # type: ignore[arg-type]
        for role, side in texts.items()
    )
    rules = [None, *(DiversityRule(5, threshold, 1) for threshold in thresholds)]
    rows = []
    for rule in rules:
        kept = np.ones(len(vectors), dtype=np.bool_)
        if rule:
            kept = diversify(vectors, rule, DiversityOptions(seeds), settings.threads).kept
        found = np.flatnonzero(kept)
        most = min(len(found), settings.depth + max(map(len, qrels.values())))
        _, hits = exact_search(query_vectors, vectors[found], most)
        counts = _count(documents, found[hits], list(asked), qrels, settings.depth)
        rows.append({"t": rule.t if rule else None, "documents": int(kept.sum()), **counts})
    facts = asdict(settings)
    result = {
        "data": {name: facts[name] for name in ("split", "depth", "seed")}
        | {"queries": len(asked)},
        "pair": settings.pair,
        "rule": {"k": 5, "near": 1, "seeds": seeds},
        "jaccard": _ALIKE,
        **provenance(paths),
        "rows": rows,
    }
    write_json(settings.output / "diversity.json", result)
    header = (
        *("t", "documents kept", "hard negatives", "near-duplicate pairs"),
        *("negatives with a near-duplicate", "share", "queries with any"),
    )
    table = [["–" if value is None else value for value in row.values()] for row in rows]
    write_text(settings.output / "diversity.md", markdown_table(header, table))
    return result


def _count(
    documents: Sequence[Document],
    hits: RowArray,
    queries: Sequence[str],
    qrels: Mapping[str, Mapping[str, int]],
    depth: int,
) -> dict[str, Any]:
    grams: dict[int, frozenset[str]] = {}
    negatives = pairs = touched = affected = 0
    for query, found in zip(queries, hits.tolist(), strict=True):
        hard = [row for row in found if documents[row].id not in qrels[query]][:depth]
        for row in hard:
            grams.setdefault(row, trigrams(documents[row].text))
        close = [(a, b) for a, b in combinations(hard, 2) if near_duplicates(grams[a], grams[b])]
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


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("高血压患者应当少盐", "高血压患者应当少盐", True),
        ("高血压患者应当少盐饮食", "高血压患者应当少油饮食", True),
        ("高血压患者应当少盐", "骨折以后要固定", False),
        # 4 of 10 trigrams are shared.
        ("abcdefghi", "abcdefxyz", True),
        ("abcdefghij", "abcdefxyz", False),
    ],
)
def test_near_duplicates_are_detected_by_trigrams(first: str, second: str, expected: bool) -> None:
    sets = trigrams(first), trigrams(second)
    assert near_duplicates(*sets) is expected
    assert (len(sets[0] & sets[1]) >= 0.4 * len(sets[0] | sets[1])) is expected


def test_the_filter_removes_duplicates_from_hard_negatives(
    settings: Settings, tmp_path: Path
) -> None:
    subjects = (
        "高血压患者每天测量血压，少盐饮食，坚持服药",
        "骨折后固定受伤的肢体，尽快到医院拍片",
        "孩子发烧先物理降温，超过三十八度五再用药",
        "糖尿病要控制主食，定期检查血糖和眼底",
        "失眠时睡前不看手机，白天多做运动",
        "湿疹部位保持干燥，外用激素软膏",
    )
    texts = [subject + end for subject in subjects for end in ("", "。", "！", "。谢谢")]
    write_jsonl(
        tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "text": t} for i, t in enumerate(texts)]
    )
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "高血压要注意什么"}])
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("q\td0\t1\n", encoding="utf-8")
    few = replace(settings, data=tmp_path, split="test", depth=6, output=tmp_path / "out")
    before, after = measure_diversity(few, thresholds=[0.97], seeds=1)["rows"]
    assert before["documents"] == len(texts) > after["documents"]
    assert before["near_duplicate_pairs"] > after["near_duplicate_pairs"]
    assert before["negatives"] == after["negatives"] == 6


@pytest.mark.timeout(3600)
def test_near_duplicates(settings: Settings) -> None:
    before, *after = measure_diversity(settings)["rows"]
    print((settings.output / "diversity.md").read_text("utf-8"))
    kept = [before["documents"], *(row["documents"] for row in after)]
    assert kept == sorted(kept, reverse=True)
    assert after[0]["near_duplicate_pairs"] <= before["near_duplicate_pairs"]
