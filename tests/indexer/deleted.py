"""What deleted documents, which count in BM25 until they are merged away, do to hits.

`python -m tests.indexer.deleted` prints the table of docs/live-documents.md: random documents of
data/sample are deleted, and hits are compared with those after a merge.
"""

import json
import shutil
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory

from care.indexing import build_index, merge_index
from care.search import open_index
from core.writes import Write, Written
from evaluation.beir import read_qrels
from evaluation.metrics import score
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from models.pairs import write_pair
from tests.encoders import BigramEncoder, make_pair
from tests.failpoints import use_test_encoder, without_pandas

_SAMPLE = Path(__file__).parents[2] / "data" / "sample"
_SHARES, _TRIALS = (0.01, 0.1, 0.3), 5
_TOP = 10

# Scores by id, the best first, of each query.
_Run = dict[str, dict[str, float]]


def lines(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (_SAMPLE / name).read_text("utf-8").splitlines()]


def search(indexes: Path, pair: str, queries: dict[str, str]) -> _Run:
    with open_index("sample", indexes=indexes, pair=pair) as index:
        found = index.search_many(list(queries.values()), _TOP, mode="lexical")
    return {
        id_: {hit.id: hit.score for hit in hits} for id_, hits in zip(queries, found, strict=True)
    }


def changes(before: _Run, after: _Run) -> tuple[float, float, float]:
    """Returns the shares of queries whose first hit, and whose order of hits, differ.

    The third is the largest difference of a score, as a share of it.
    """
    pairs = [(before[id_], after[id_]) for id_ in before]
    first = fmean(list(a)[:1] != list(b)[:1] for a, b in pairs)
    order = fmean(list(a) != list(b) for a, b in pairs)
    scores = max(abs(a[id_] / b[id_] - 1) for a, b in pairs for id_ in a.keys() & b.keys())
    return first, order, scores


def trial(built: Path, pair: str, share: float, seed: int) -> tuple[float, ...]:
    """Deletes a share of the documents; returns what `changes` does, and nDCG before and after."""
    ids = [one["_id"] for one in lines("corpus.jsonl")]
    gone = set(Random(seed).sample(ids, round(share * len(ids))))
    queries = {one["_id"]: one["text"] for one in lines("queries.jsonl")}
    qrels = {}
    for path in sorted((_SAMPLE / "qrels").glob("*.tsv")):
        for query, grades in read_qrels(path).items():
            left = {id_: grade for id_, grade in grades.items() if id_ not in gone}
            qrels |= {query: left} if any(left.values()) else {}
    with TemporaryDirectory() as folder:
        indexes = Path(shutil.copytree(built, Path(folder, "indexes")))
        index = IndexWriter(indexes, "sample")
        live = LiveIndex(index, BigramEncoder("document"))
        (written,) = live.commit([Write("sample", delete=tuple(sorted(gone)))])
        assert isinstance(written, Written) and written.deleted == len(gone)
        before = search(indexes, pair, queries)
        merge_index("sample", indexes=indexes, builds=Path(folder, "builds"), pair=pair)
        after = search(indexes, pair, queries)
    ndcg = [score(qrels, run)["nDCG@10"] for run in (before, after)]
    return (*changes(before, after), *ndcg)


def main() -> None:
    without_pandas()
    with TemporaryDirectory() as name, use_test_encoder():
        folder = Path(name)
        built, pair = folder / "indexes", str(folder / "pair.toml")
        write_pair(make_pair(folder=folder), Path(pair))
        files = {"indexes": built, "builds": folder / "builds", "pair": pair}
        build_index("sample", _SAMPLE / "corpus.jsonl", **files)
        print("| deleted | first hit | order | score | nDCG@10 | merged |")
        print("|---|---|---|---|---|---|", flush=True)
        for share in _SHARES:
            rows = [trial(built, pair, share, seed) for seed in range(_TRIALS)]
            first, order, scores, before, after = map(fmean, zip(*rows, strict=True))
            figures = f"{first:.1%} | {order:.1%} | {scores:.1%} | {before:.4f} | {after:.4f}"
            print(f"| {share:.0%} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
