import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import CareError
from core.types import FloatArray
from curation.diversity import (
    THRESHOLDS,
    DiversityOptions,
    DiversityRule,
    GrowingIndex,
    distinct_threshold,
    diversify,
    diversify_file,
)
from evaluation.beir import read_queries
from evaluation.dense import encode
from models.pairs import load_pair
from tests.conftest import write_jsonl
from tests.errors import raises

DIMENSION = 16
SAMPLE = Path(__file__).parents[2] / "data" / "sample"
RULE = DiversityRule(k=3, t=0.8, near=1)


def vectors(count: int = 600, seed: int = 0) -> FloatArray:
    """Unit vectors in clusters of about ten."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((count // 10, DIMENSION))
    found = centres[draw.integers(0, len(centres), count)]
    found = found + 0.35 * draw.standard_normal((count, DIMENSION))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def one_by_one(texts: FloatArray, rule: DiversityRule, options: DiversityOptions) -> list[bool]:
    """A direct implementation of the rule, for one text at a time."""
    shuffled = np.random.default_rng(options.seed).permutation(len(texts)).tolist()
    kept = sorted(shuffled[: options.seeds])
    for row in sorted(shuffled[options.seeds :]):
        nearest = np.sort(texts[kept] @ texts[row])[-rule.k :]
        if (nearest > rule.t).sum() <= rule.near:
            kept.append(row)
    chosen = set(kept)
    return [row in chosen for row in range(len(texts))]


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("rule", [RULE, DiversityRule(5, 0.7, 0), DiversityRule(2, 0.85, 1)])
@pytest.mark.parametrize("seeds", [0, 50])
def test_the_block_size_does_not_change_the_result(
    rule: DiversityRule, block: int, seeds: int
) -> None:
    texts = vectors()
    options = DiversityOptions(seeds=seeds, block=block)
    kept = diversify(texts, rule, options).kept
    expected = one_by_one(texts, rule, options)
    assert kept.tolist() == expected
    assert 0 < sum(expected) < len(expected)


def test_vectors_are_scaled_first() -> None:
    texts = vectors()
    longer = texts * np.linspace(0.1, 9, len(texts), dtype=np.float32)[:, None]
    options = DiversityOptions(seeds=50)
    assert (diversify(longer, RULE, options).kept == diversify(texts, RULE, options).kept).all()


def test_seeds_are_kept_and_depend_on_the_seed() -> None:
    texts = np.repeat(vectors(10), 10, axis=0)
    one, two = (diversify(texts, RULE, DiversityOptions(seeds=20, seed=s)).kept for s in (1, 2))
    assert one.sum() >= 20
    assert (one != two).any()


def test_hnsw_replaces_flat_and_does_not_depend_on_threads() -> None:
    texts = vectors(3000)
    exact = diversify(texts, RULE, DiversityOptions(seeds=50, block=128))
    small = DiversityOptions(seeds=50, block=128, flat_limit=200)
    first, second = (diversify(texts, RULE, small, threads) for threads in (1, 2))
    assert (exact.index, first.index) == ("Flat", "HNSW32")
    assert (first.kept == second.kept).all()
    assert (first.kept == exact.kept).mean() > 0.97


def test_vectors_are_found_after_the_change_to_hnsw() -> None:
    texts = vectors(500)
    index = GrowingIndex(DIMENSION, flat_limit=300)
    for start in range(0, 500, 100):
        index.add(texts[start : start + 100])
    assert (index.search(texts, 1)[:, 0] > 0.9999).mean() > 0.98
    assert (index.kind, len(index)) == ("HNSW32", 500)


def test_missing_neighbours_are_never_near() -> None:
    index = GrowingIndex(DIMENSION, flat_limit=10)
    index.add(vectors(20)[:2])
    assert index.search(vectors(20)[:1], 5)[0, 2:].tolist() == [-np.inf] * 3


KILLED = """
import sys
import tracemalloc
from pathlib import Path
from curation.diversity import DiversityOptions, GrowingIndex, diversify
from tests.curation.test_diversity import RULE, vectors
search, calls = GrowingIndex.search, []
def held(self, texts, k):
    calls.append(1)
    if len(calls) == 10:
        print("held", flush=True)
        sys.stdin.read()
    return search(self, texts, k)
GrowingIndex.search = held
path, options = Path(sys.argv[1]), DiversityOptions(50, 0, 200, 128)
diversify(vectors(3000), RULE, options, 1, path, checkpoint_seconds=0)
"""


@pytest.mark.e2e
def test_a_killed_filter_resumes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "checkpoint", DiversityOptions(50, 0, 200, 128)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    searched = 0
    search = GrowingIndex.search

    def counted(self: GrowingIndex, texts: FloatArray, k: int) -> FloatArray:
        nonlocal searched
        searched += len(texts)
        return search(self, texts, k)

    texts = vectors(3000)
    with monkeypatch.context() as patch:
        patch.setattr(GrowingIndex, "search", counted)
        resumed = diversify(texts, RULE, options, 1, path)
    # It was killed after nine blocks.
    assert searched == 3000 - 9 * 128
    assert (resumed.kept == diversify(texts, RULE, options).kept).all()
    assert not path.exists()


def test_a_checkpoint_of_another_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GrowingIndex, "add", interrupted(3))
        diversify(vectors(), RULE, DiversityOptions(50, block=64), 1, path, checkpoint_seconds=0)
    with raises(CareError, code="other_checkpoint", path=path):
        diversify(vectors(), DiversityRule(2, 0.8, 1), DiversityOptions(50, block=64), 1, path)


def interrupted(calls: int) -> Any:
    """Adds some blocks, then is interrupted."""
    add, left = GrowingIndex.add, iter(range(calls))

    def run(self: GrowingIndex, texts: FloatArray) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        add(self, texts)

    return run


@pytest.mark.parametrize(("k", "near"), [(1, 1), (5, -1)])
def test_an_invalid_rule(k: int, near: int) -> None:
    with raises(CareError, code="bad_rule", k=k, n=near):
        DiversityRule(k, 0.8, near)


def test_thresholds_belong_to_an_encoder(tmp_path: Path) -> None:
    # Table 10 of the paper.
    assert THRESHOLDS["gte-multilingual-base"] == {"queries": 0.85, "documents": 0.78}
    queries = read_queries(SAMPLE / "queries.jsonl").values()
    found = distinct_threshold(encode(load_pair("care-mini"), "query", list(queries), tmp_path))
    assert THRESHOLDS["care-mini"]["queries"] == pytest.approx(found + 0.005, abs=0.005)
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "甲"}])
    with raises(CareError, code="no_threshold", pair="bge-m3"):
        diversify_file(texts, tmp_path / "out", "queries", DiversityOptions(), pair="bge-m3")


def test_a_threshold_from_texts_that_differ() -> None:
    texts = vectors(300, seed=3)
    t = distinct_threshold(2 * texts)
    cosines = texts @ texts.T - 2 * np.eye(len(texts), dtype=np.float32)
    assert 0.945 <= (cosines.max(axis=1) <= t).mean() <= 0.955


def test_small_files_have_few_seeds() -> None:
    texts = np.repeat(vectors(10), 10, axis=0)
    kept = diversify(texts, RULE).kept
    assert 10 <= kept.sum() <= 30


def test_files_with_vectors_and_with_a_pair(tmp_path: Path) -> None:
    texts = vectors(200)
    corpus = write_jsonl(
        tmp_path / "corpus.jsonl",
        [{"_id": f"d{i}", "text": f"第{i}段", "x": i} for i in range(200)],
    )
    np.save(tmp_path / "vectors.npy", texts)
    output, options = tmp_path / "out" / "kept.jsonl", DiversityOptions(seeds=20)
    file = tmp_path / "vectors.npy"
    report = diversify_file(
        corpus, output, "documents", options, k=RULE.k, t=RULE.t, near=RULE.near, vectors=file
    )
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    expected = np.flatnonzero(diversify(texts, RULE, options).kept)
    assert [row["x"] for row in rows] == expected.tolist()
    assert (report["kept"], report["dropped"]) == (len(rows), 200 - len(rows))
    assert json.loads((tmp_path / "out" / "kept.jsonl.report.json").read_text("utf-8")) == report

    similar = ["高血压能吃党参吗", "高血压能吃党参吗？", "高血压能吃党参么", "骨折"]
    few = write_jsonl(tmp_path / "few.jsonl", [{"text": text} for text in similar])
    diversify_file(few, output, "queries", DiversityOptions(1), t=0.97, pair="care-mini")
    kept = [json.loads(line)["text"] for line in output.read_text("utf-8").splitlines()]
    assert len(kept) == 3 and "骨折" in kept


def test_the_lines_of_a_file_are_never_all_in_memory(tmp_path: Path) -> None:
    records = [{"text": f"{i}" + "头痛" * 1_000, "note": "发烧" * 1_000} for i in range(1_500)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    del records
    np.save(tmp_path / "vectors.npy", vectors(1_500))
    path = tmp_path / "vectors.npy"
    options = DiversityOptions(seeds=1_500)
    tracemalloc.start()
    diversify_file(corpus, tmp_path / "kept.jsonl", "documents", options, t=0.8, vectors=path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.read_bytes() == (tmp_path / "kept.jsonl").read_bytes()
    assert peak < corpus.stat().st_size / 10


@pytest.mark.parametrize("wrong", [np.zeros((3, 4)), np.zeros((2, 4), np.float32)])
def test_vectors_that_do_not_fit(tmp_path: Path, wrong: Any) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": "甲"}] * 3)
    np.save(tmp_path / "vectors.npy", wrong)
    options, path = DiversityOptions(1), tmp_path / "vectors.npy"
    with raises(CareError, code="bad_vectors", path=path, rows=3, shape=list(wrong.shape)):
        diversify_file(corpus, tmp_path / "kept.jsonl", "documents", options, t=0.8, vectors=path)
