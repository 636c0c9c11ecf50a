import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.types import Document
from curation.benchmark import build_benchmark, refined, rerank_set
from curation.config import BenchmarkConfig, Rerank
from curation.judging import Judged, Judgement
from curation.ledger import BudgetError, LanguageModelError
from evaluation.beir import read_qrels, read_queries
from evaluation.cmedteb.tasks import read_reranking, read_retrieval
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import Recorder, endpoint, grader, scripted_server
from tests.curation.judges import THREE, lines, run
from tests.errors import raises

pytestmark = pytest.mark.e2e


def files(folder: Path) -> dict[str, bytes]:
    """The files that must be equal after each run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "cache" not in path.parts and path.name not in ("cost.json", ".lock")
    }


def test_a_benchmark_from_end_to_end(facts: dict[str, Any]) -> None:
    statistics, recorder = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    out = facts["output"]
    assert read_qrels(out / "retrieval/qrels/test.tsv") == {"q1": {"d1": 1}, "q2": {"d4": 1}}
    # d5 is disputed for q1.
    refined = {id_: text for id_, text in DOCUMENTS.items() if id_ != "d5"}
    assert read_queries(out / "retrieval/queries.jsonl") == QUERIES
    # The tasks of CMedTEB read the files.
    assert read_retrieval(out / "retrieval", "test").corpus == refined
    assert list(read_reranking(out / "rerank/test.jsonl").queries) == ["q1"]
    assert {row["_id"]: row["text"] for row in lines(out / "corpus.jsonl")} == DOCUMENTS
    rerank = {row["_id"]: row for row in lines(out / "rerank/test.jsonl")}
    assert rerank["q1"]["query"] == QUERIES["q1"]
    assert rerank["q1"]["positives"] == [DOCUMENTS["d1"]]
    # Without the disputed d5 and the documents that BM25 does not retrieve.
    assert rerank["q1"]["negatives"] == [DOCUMENTS["d2"]]
    judged = {(row["query-id"], row["corpus-id"]): row for row in lines(out / "judgements.jsonl")}
    assert judged["q1", "d5"]["verdict"] == "disputed"
    assert judged["q1", "d5"]["grades"] == {"first": "A", "second": "A", "third": "B"}
    assert statistics["dropped"] == statistics["verdicts"]["disputed"] == 1
    assert statistics["pairs"] == len(judged)
    assert statistics == json.loads((out / "statistics.json").read_text("utf-8"))
    costs = json.loads((out / "cost.json").read_text("utf-8"))
    assert costs["all"]["calls"] == costs["all"]["answered"] == len(recorder.bodies)
    assert (out / "invalid-answers.jsonl").read_text("utf-8") == ""


def test_a_second_build_is_equal_and_makes_no_calls(facts: dict[str, Any], tmp_path: Path) -> None:
    run(BenchmarkConfig, build_benchmark, facts, *THREE)
    before = files(facts["output"])
    _, again = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    assert not again.bodies
    assert files(facts["output"]) == before
    run(BenchmarkConfig, build_benchmark, facts | {"output": tmp_path / "other"}, *THREE)
    assert files(tmp_path / "other") == before


def test_a_build_without_budget_writes_costs_and_no_statistics(facts: dict[str, Any]) -> None:
    with raises(BudgetError, code="budget_spent", calls=2):
        run(BenchmarkConfig, build_benchmark, facts | {"budget": {"calls": 2}}, *THREE)
    out = facts["output"]
    assert json.loads((out / "cost.json").read_text("utf-8"))["all"]["calls"] == 2
    assert not (out / "statistics.json").exists()
    _, recorder = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    assert max(recorder.asked.values()) == 1
    costs = json.loads((out / "cost.json").read_text("utf-8"))
    assert costs["all"]["calls"] == len(recorder.bodies) + 2


def test_disputed_pairs_are_not_scored() -> None:
    # d1 is positive for q1 and disputed for q2, d2 is disputed for q1 and negative for q2.
    grades = {
        ("q1", "d1"): "SS",
        ("q1", "d2"): "SB",
        ("q2", "d1"): "AC",
        ("q2", "d2"): "DD",
        ("q2", "d3"): "SS",
        ("q3", "d3"): "S?",
        ("q3", "d4"): "SS",
    }
    judgements = {
        key: Judgement(*key, {"one": first, "two": None if second == "?" else second})  # type: ignore[arg-type]
        for key, (first, second) in grades.items()
    }
    pools: dict[str, list[str]] = {}
    for query, document in grades:
        pools.setdefault(query, []).append(document)
    judged = Judged(pools, judgements)
    splits = {"test": ["q1", "q2"], "train": ["q3"]}
    test, train = {"q1": {"d1": 1}, "q2": {"d1": -1, "d3": 1}}, {"q3": {"d4": 1}}
    assert refined(judged, splits, "exclude") == ({"test": test, "train": train}, {"d2"})
    test = {"q2": {"d3": 1}}
    assert refined(judged, splits, "drop") == ({"test": test, "train": train}, {"d1", "d2"})
    test = {"q1": {"d1": 1}, "q2": {"d3": 1}}
    assert refined(judged, splits, "keep") == ({"test": test, "train": train}, set())


def test_splits_are_disjoint(facts: dict[str, Any]) -> None:
    statistics, _ = run(
        BenchmarkConfig, build_benchmark, facts | {"splits": {"test": 1, "train": None}}, "first"
    )
    assert [found["judged"] for found in statistics["splits"].values()] == [1, 1]
    test, train = (
        read_qrels(facts["output"] / f"retrieval/qrels/{split}.tsv") for split in ("test", "train")
    )
    assert test.keys() | train.keys() == QUERIES.keys()
    assert test.keys().isdisjoint(train)


def test_the_rerank_set_is_a_sample_of_agreed_pairs() -> None:
    verdicts = dict(zip((f"d{i}" for i in range(60)), "SBCSD." * 10, strict=True))
    judgements = {
        (query, id_): Judgement(query, id_, {"one": None if grade == "." else grade})  # type: ignore[arg-type]
        for query in ("q1", "q2")
        for id_, grade in verdicts.items()
    }
    judgements |= {("q3", "d1"): Judgement("q3", "d1", {"one": "B"})}
    pools = {"q1": list(verdicts), "q2": list(verdicts), "q3": ["d1"]}
    documents = [Document(id_, id_) for id_ in verdicts]
    sizes, queries = Rerank(positives=3, negatives=5), dict.fromkeys(pools, "问")
    first, again, other = (
        rerank_set(Judged(pools, judgements), queries, documents, sizes, seed) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert [row["_id"] for row in first] == ["q1", "q2"]
    for row in first:
        assert [len(row[side]) for side in ("positives", "negatives")] == [3, 5]
        assert {verdicts[id_] for id_ in row["positives"]} == {"S"}
        assert {verdicts[id_] for id_ in row["negatives"]} <= set("BCD")
    assert first[0]["negatives"] != first[1]["negatives"]
    # Others have left the corpus.
    (row, _) = rerank_set(Judged(pools, judgements), queries, documents[:6], sizes, 0)
    assert sorted(row["positives"]) == ["d0", "d3"]
    assert sorted(row["negatives"]) == ["d1", "d2", "d4"]


def test_passages_of_the_rerank_set_have_their_titles(facts: dict[str, Any]) -> None:
    title = "中药"
    rows = [{"_id": id_, "title": title, "text": text} for id_, text in DOCUMENTS.items()]
    write_jsonl(facts["corpus"], rows)
    recorder = Recorder(grader(lambda _, query, text: "A" if "可以吃党参" in text else "D"))
    with scripted_server(recorder) as url:
        build_benchmark(BenchmarkConfig.model_validate(facts | {"judges": [endpoint(url)]}))
    (row,) = lines(facts["output"] / "rerank/test.jsonl")
    assert row["positives"] == [f"{title}\n{DOCUMENTS['d1']}"]
    assert set(row["negatives"]) <= {f"{title}\n{text}" for text in DOCUMENTS.values()}


def test_a_missing_api_key_is_found_before_encoding(facts: dict[str, Any]) -> None:
    judges = [endpoint("http://localhost:9/v1", api_key_env="NO_SUCH_KEY")]
    facts |= {"judges": judges, "retrievers": [{"kind": "pair", "pair": "care-mini"}]}
    with raises(LanguageModelError, code="missing_api_key", variable="NO_SUCH_KEY"):
        build_benchmark(BenchmarkConfig.model_validate(facts))
    assert not (facts["output"] / "cache" / "vectors").exists()


def test_no_texts_after_cleaning_is_an_error(facts: dict[str, Any]) -> None:
    judges = [endpoint("http://localhost:9/v1")]
    facts |= {"judges": judges, "cleaning": {"query_chars": [100, 200]}}
    with raises(CareError, code="nothing_to_judge", queries=0, documents=len(DOCUMENTS)):
        build_benchmark(BenchmarkConfig.model_validate(facts))
