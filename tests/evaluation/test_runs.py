from pathlib import Path

import numpy as np
import pytest
import pytrec_eval

from core.errors import CareError
from core.types import Document
from models.evaluation.bm25 import Bm25Index
from models.evaluation.scores import MAP, MAP_10, NDCG_10, score_queries
from models.evaluation.trec import read_run, write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = {"q1": {"a": 0.25, "b": 0.1 + 0.2}, "q2": {"c": -1.5}}
    write_run(tmp_path / "run.trec", run, "care-mini")
    assert read_run(tmp_path / "run.trec") == run
    first = (tmp_path / "run.trec").read_text("utf-8").splitlines()[0]
    assert first == "q1 Q0 b 1 0.30000000000000004 care-mini"


@pytest.mark.parametrize("words", [("a b", "d", "x"), ("q", "a b", "x"), ("q", "d", "a b")])
def test_white_space_in_a_name_is_refused(tmp_path: Path, words: tuple[str, str, str]) -> None:
    query, document, system = words
    with pytest.raises(CareError, match="'a b' cannot stand in a TREC run"):
        write_run(tmp_path / "run.trec", {query: {document: 1.0}}, system)
    assert not list(tmp_path.iterdir())


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.trec"
    path.write_text("q Q0 a 1 0.5 x\nq Q0 a\n", "utf-8")
    with pytest.raises(CareError, match=r"run\.trec line 2"):
        read_run(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CareError, match=r"run\.trec is not UTF-8"):
        read_run(path)


def test_map_at_10_divides_by_all_relevant_documents() -> None:
    qrels = {"q": {f"d{i}": 1 for i in range(20)}}
    run = {"q": {f"d{i}": 1 - i / 100 for i in range(20)}}
    assert score_queries(MAP_10, qrels, run) == {"q": pytest.approx(0.5)}
    assert score_queries(MAP, qrels, run) == {"q": pytest.approx(1)}


def test_map_matches_a_hand_computed_value() -> None:
    qrels = {"q": {"a": 1, "b": 1, "x": 0}}
    run = {"q": {"x": 0.9, "a": 0.8, "y": 0.7, "b": 0.6}}
    assert score_queries(MAP_10, qrels, run)["q"] == pytest.approx((1 / 2 + 2 / 4) / 2)


def test_documents_without_a_word_have_no_index() -> None:
    with pytest.raises(CareError, match="BM25 finds no word in any document"):
        Bm25Index([Document("a", " "), Document("b", "")])


def test_a_query_without_results_scores_zero() -> None:
    assert score_queries(NDCG_10, {"p": {"a": 1}, "q": {"a": 1}}, {"q": {"a": 1.0}}) == {
        "p": 0,
        "q": 1,
    }


def test_measures_are_those_of_trec_eval() -> None:
    rng = np.random.default_rng(5)
    ids = [f"d{i}" for i in range(60)]
    qrels = {f"q{q}": {i: int(rng.integers(0, 3)) for i in ids[:30]} for q in range(20)}
    # Rounded, so that there are ties.
    run = {q: {i: round(float(rng.random()), 1) for i in ids} for q in qrels}
    oracle = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.10", "map"})
    expected = oracle.evaluate(run)
    for measure, name in ((NDCG_10, "ndcg_cut_10"), (MAP_10, "map_cut_10"), (MAP, "map")):
        values = score_queries(measure, qrels, run)
        assert values == pytest.approx({query: expected[query][name] for query in qrels})
