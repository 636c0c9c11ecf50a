import gzip
import math
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from core.errors import CareError, DataError
from evaluation.metrics import (
    MAP,
    MAP_10,
    NDCG_10,
    ranked,
    read_run,
    score,
    score_queries,
    write_run,
)
from tests.errors import raises

QRELS = {"q1": {"a": 2, "b": 1}, "q2": {"c": 1}}


def test_a_perfect_run_scores_one() -> None:
    run = {"q1": {"a": 0.9, "b": 0.8, "x": 0.1}, "q2": {"c": 0.5}}
    assert score(QRELS, run) == {"nDCG@10": 1, "MRR@10": 1, "Recall@10": 1, "Recall@100": 1}


def test_scores_match_hand_computed_values() -> None:
    run = {"q1": {"x": 0.9, "b": 0.8, "a": 0.7}, "q2": {"x": 0.9, "c": 0.5}}
    ideal = 2 + 1 / math.log2(3)
    first = (1 / math.log2(3) + 2 / math.log2(4)) / ideal
    second = 1 / math.log2(3)
    values = score(QRELS, run)
    assert values["nDCG@10"] == pytest.approx((first + second) / 2)
    assert values["MRR@10"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert values["Recall@10"] == 1


def test_a_query_without_results_scores_zero_and_stays_in_the_denominator() -> None:
    values = score(QRELS, {"q1": {"a": 0.9, "b": 0.8}})
    assert values == {"nDCG@10": 0.5, "MRR@10": 0.5, "Recall@10": 0.5, "Recall@100": 0.5}
    assert score_queries(NDCG_10, {"p": {"a": 1}, "q": {"a": 1}}, {"q": {"a": 1.0}}) == {
        "p": 0,
        "q": 1,
    }


def test_equal_scores_are_ranked_by_descending_id() -> None:
    assert ranked({"a": 0.5, "c": 0.1, "b": 0.5}) == [("b", 0.5), ("a", 0.5), ("c", 0.1)]
    assert score({"q": {"b": 1}}, {"q": {"a": 0.5, "b": 0.5}})["MRR@10"] == 1
    assert score({"q": {"a": 1}}, {"q": {"a": 0.5, "b": 0.5}})["MRR@10"] == 0.5


def test_excluded_documents_are_removed_from_the_hits_of_their_query() -> None:
    qrels = {"q1": {"a": 1, "x": -1}, "q2": {"x": 1}}
    run = {"q1": {"x": 0.9, "a": 0.8}, "q2": {"y": 0.9, "x": 0.8}}
    values = score(qrels, run)
    assert values["nDCG@10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    assert values["MRR@10"] == 0.75
    assert score_queries(MAP, qrels, run) == {"q1": 1, "q2": 0.5}
    # As in trec_eval, those of other negative grades, TREC's -2, are hits that are not relevant.
    qrels["q1"]["x"] = -2
    assert score_queries(MAP, qrels, run) == {"q1": 0.5, "q2": 0.5}


def test_recall_counts_only_the_first_hits() -> None:
    run = {"q": {f"x{i:03d}": 1 - i / 100 for i in range(50)} | {"c": 0.05}}
    values = score({"q": {"c": 1}}, run)
    assert (values["Recall@10"], values["Recall@100"]) == (0, 1)


def test_map_at_10_divides_by_all_relevant_documents() -> None:
    qrels = {"q": {f"d{i}": 1 for i in range(20)}}
    run = {"q": {f"d{i}": 1 - i / 100 for i in range(20)}}
    assert score_queries(MAP_10, qrels, run) == {"q": pytest.approx(0.5)}
    assert score_queries(MAP, qrels, run) == {"q": pytest.approx(1)}


def test_map_matches_a_hand_computed_value() -> None:
    qrels = {"q": {"a": 1, "b": 1, "x": 0}}
    run = {"q": {"x": 0.9, "a": 0.8, "y": 0.7, "b": 0.6}}
    assert score_queries(MAP_10, qrels, run)["q"] == pytest.approx((1 / 2 + 2 / 4) / 2)


def test_measures_are_those_of_trec_eval() -> None:
    rng = np.random.default_rng(5)
    ids = [f"d{i}" for i in range(60)]
    qrels = {f"q{q}": {i: int(rng.integers(0, 3)) for i in ids[:30]} for q in range(20)}
    # trec_eval counts a judged query without a relevant document too: as 0.
    qrels["none"] = dict.fromkeys(ids[:5], 0)
    # Rounded, so that there are ties.
    run = {q: {i: round(float(rng.random()), 1) for i in ids} for q in qrels}
    oracle = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.10", "map"})
    expected = oracle.evaluate(run)
    for measure, name in ((NDCG_10, "ndcg_cut_10"), (MAP_10, "map_cut_10"), (MAP, "map")):
        values = score_queries(measure, qrels, run)
        assert values == pytest.approx({query: expected[query][name] for query in qrels})


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = {"q1": {"a": 0.25, "b": 0.1 + 0.2}, "q2": {"c": -1.5}}
    write_run(tmp_path / "run.trec", run, "care-mini")
    assert read_run(tmp_path / "run.trec") == run
    first = (tmp_path / "run.trec").read_text("utf-8").splitlines()[0]
    assert first == "q1 Q0 b 1 0.30000000000000004 care-mini"


@pytest.mark.parametrize("words", [("a b", "d", "x"), ("q", "a b", "x"), ("q", "d", "a b")])
def test_a_name_with_white_space_is_an_error(tmp_path: Path, words: tuple[str, str, str]) -> None:
    query, document, system = words
    with raises(CareError, code="white_space_in_id", id="a b"):
        write_run(tmp_path / "run.trec", {query: {document: 1.0}}, system)
    assert not list(tmp_path.iterdir())


def test_a_compressed_run_is_ranked_by_scores_not_by_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.trec.gz"
    path.write_bytes(gzip.compress(b"q Q0 a 1 0.25 other\n\nq Q0 b 2 0.5 other\n"))
    assert read_run(path) == {"q": {"a": 0.25, "b": 0.5}}


@pytest.mark.parametrize("line", ["q Q0 a", "q Q0 a 2 high x", "q Q0 a 2 nan x", "q Q0 a 2 inf x"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 a 1 0.5 x\n{line}\n", "utf-8")
    with raises(DataError, code="not_run", path=path, line=2):
        read_run(path)
    path.write_text("q Q0 a 1 0.5 x\nr Q0 a 1 0.5 x\nq Q0 a 3 0.25 x\n", "utf-8")
    with raises(DataError, code="contradiction", path=path, line=3):
        read_run(path)
    path.write_bytes(b"\xff\xfe")
    with raises(DataError, code="not_utf8", path=path):
        read_run(path)
