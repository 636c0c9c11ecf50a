import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import BudgetError, CareError, LanguageModelError
from core.types import Document
from models.curation import prompts
from models.curation.annotation import annotate
from models.curation.audit import audit
from models.curation.benchmark import build_benchmark, rerank_set
from models.curation.config import AnnotationConfig, AuditConfig, BenchmarkConfig, Rerank
from models.curation.judging import Judgement
from models.curation.scripted import scripted_server
from models.curation.work import Judged, sample_queries
from models.evaluation.beir import read_qrels, read_queries
from models.evaluation.cmedteb.data import read_reranking, read_retrieval
from models.training.data import Example, read_examples
from models.training.recipe import DataEntry
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import Recorder, endpoint, grader

# What answers what; the third judge doubts d5.
ANSWERS = {("q1", "d1"), ("q1", "d5"), ("q2", "d4")}
IDS = {text: id_ for id_, text in (DOCUMENTS | QUERIES).items()}


def grade(model: str, query: str, text: str) -> str:
    pair = IDS[query], IDS[text]
    if model == "third" and pair == ("q1", "d5"):
        return "B"
    return "A" if pair in ANSWERS else "C"


def run(
    kind: type, command: Callable[[Any], dict[str, Any]], facts: dict[str, Any], *judges: str
) -> tuple[dict[str, Any], Recorder]:
    recorder = Recorder(grader(grade))
    with scripted_server(recorder) as url:
        endpoints = [endpoint(url, name) for name in judges]
        statistics = command(kind.model_validate(facts | {"judges": endpoints}))
    return statistics, recorder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    """Everything that must be the same on each run."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "cache" not in path.parts and path.name not in ("cost.json", ".lock")
    }


THREE = ("first", "second", "third")


def test_a_benchmark_from_end_to_end(facts: dict[str, Any]) -> None:
    statistics, recorder = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    out = facts["output"]
    assert read_qrels(out / "retrieval/test.qrels.tsv") == {"q1": {"d1": 1}, "q2": {"d4": 1}}
    assert read_queries(out / "retrieval/test.queries.jsonl") == QUERIES
    # As the benchmark's own tasks read them.
    assert read_retrieval(out / "retrieval", "test").corpus == DOCUMENTS
    assert list(read_reranking(out / "rerank/test.jsonl").queries) == ["q1"]
    assert {row["_id"]: row["text"] for row in lines(out / "retrieval/corpus.jsonl")} == DOCUMENTS
    rerank = {row["_id"]: row for row in lines(out / "rerank/test.jsonl")}
    assert rerank["q1"]["query"] == QUERIES["q1"]
    assert rerank["q1"]["positives"] == [DOCUMENTS["d1"]]
    # Neither the disputed d5 nor what BM25 does not find.
    assert rerank["q1"]["negatives"] == [DOCUMENTS["d2"]]
    judged = {(row["query-id"], row["corpus-id"]): row for row in lines(out / "judgements.jsonl")}
    assert judged["q1", "d5"]["verdict"] == "disputed"
    assert judged["q1", "d5"]["grades"] == {"first": "A", "second": "A", "third": "B"}
    assert statistics["dropped"] == statistics["verdicts"]["disputed"] == 1
    assert statistics["pairs"] == len(judged)
    assert statistics == json.loads((out / "statistics.json").read_text("utf-8"))
    costs = json.loads((out / "cost.json").read_text("utf-8"))
    assert costs["all"]["calls"] == costs["all"]["answered"] == len(recorder.bodies)
    assert (out / "set-aside.jsonl").read_text("utf-8") == ""


def test_two_builds_are_equal_and_the_second_asks_nothing(
    facts: dict[str, Any], tmp_path: Path
) -> None:
    run(BenchmarkConfig, build_benchmark, facts, *THREE)
    before = files(facts["output"])
    _, again = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    assert not again.bodies
    assert files(facts["output"]) == before
    run(BenchmarkConfig, build_benchmark, facts | {"output": tmp_path / "other"}, *THREE)
    assert files(tmp_path / "other") == before


def test_a_build_without_budget_leaves_no_statistics_but_the_costs(facts: dict[str, Any]) -> None:
    with pytest.raises(BudgetError):
        run(BenchmarkConfig, build_benchmark, facts | {"budget": {"calls": 2}}, *THREE)
    out = facts["output"]
    assert json.loads((out / "cost.json").read_text("utf-8"))["all"]["calls"] == 2
    assert not (out / "statistics.json").exists()
    _, recorder = run(BenchmarkConfig, build_benchmark, facts, *THREE)
    assert max(recorder.asked.values()) == 1
    costs = json.loads((out / "cost.json").read_text("utf-8"))
    assert costs["all"]["calls"] == len(recorder.bodies) + 2


def test_a_pool_from_a_run_file_and_a_pair(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 d3 1 9.5 x\nq1 Q0 gone 2 9.0 x\nq1 Q0 d2 3 8.0 x\n", encoding="utf-8")
    retrievers = [
        {"kind": "run", "name": "other", "path": path},
        {"kind": "pair", "pair": "care-mini"},
    ]
    statistics, _ = run(
        BenchmarkConfig,
        build_benchmark,
        facts | {"retrievers": retrievers, "depth": 2},
        *THREE,
    )
    judged = lines(facts["output"] / "judgements.jsonl")
    assert {"d3", "d2", "d1"} <= {row["corpus-id"] for row in judged if row["query-id"] == "q1"}
    assert len({row["corpus-id"] for row in judged if row["query-id"] == "q2"}) == 2
    assert statistics["pool"]["queries"] == 2


def test_the_rerank_set_is_a_sample_of_what_is_agreed() -> None:
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


def test_a_sample_of_queries_keeps_their_order() -> None:
    queries = {f"q{i}": str(i) for i in range(20)}
    first, other = (list(sample_queries(queries, 5, seed)) for seed in (0, 1))
    assert len(first) == 5 and first == sorted(first, key=list(queries).index)
    assert first != other
    assert sample_queries(queries, None, 0) == queries


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


def test_a_run_of_other_queries_is_refused(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 gone 1 9.5 x\nq7 Q0 d1 1 9.5 x\n", encoding="utf-8")
    retrievers = [{"kind": "run", "name": "other", "path": path}]
    with pytest.raises(CareError, match=r"other.trec has no document of the corpus for any"):
        run(BenchmarkConfig, build_benchmark, facts | {"retrievers": retrievers}, "first")


def test_an_audit_finds_both_kinds_of_errors(facts: dict[str, Any], data: Path) -> None:
    facts |= {"qrels": data / "test.qrels.tsv"}
    statistics, _ = run(AuditConfig, audit, facts, "first", "second")
    rows = {row["query_id"]: row for row in lines(facts["output"] / "audit.jsonl")}
    # d3 shares no word with q1: it is judged because the benchmark calls it relevant.
    assert rows["q1"]["original_positives"] == ["d1", "d3"]
    assert rows["q1"]["judged_positives"] == ["d1", "d5"]
    assert rows["q1"]["false_positives"] == ["d3"]
    assert rows["q1"]["false_negatives"] == ["d5"]
    assert rows["q2"]["false_negatives"] == []
    assert (statistics["false_positives"], statistics["false_negatives"]) == (1, 1)
    with (facts["output"] / "audit.csv").open(encoding="utf-8-sig", newline="") as file:
        table = {row["query_id"]: row for row in csv.DictReader(file)}
    assert table["q1"]["false_negatives_count"] == "1"
    assert table["q1"]["original_positives"] == "d1 d3"


def test_an_audit_leaves_what_judges_dispute_open(facts: dict[str, Any], data: Path) -> None:
    facts |= {"qrels": data / "test.qrels.tsv"}
    run(AuditConfig, audit, facts, *THREE)
    rows = {row["query_id"]: row for row in lines(facts["output"] / "audit.jsonl")}
    assert rows["q1"]["false_negatives"] == []
    assert rows["q1"]["disputed"] == ["d5"]


def test_an_audit_names_what_the_corpus_lacks(facts: dict[str, Any], data: Path) -> None:
    path = data / "test.qrels.tsv"
    path.write_text("q1\td9\t1\n", encoding="utf-8")
    with pytest.raises(CareError, match=r"test.qrels.tsv judges document 'd9', which is not there"):
        run(AuditConfig, audit, facts | {"qrels": path}, "first")


def test_annotation_makes_triples(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IDS, "党参", "q3")
    texts = QUERIES | {"q3": "党参"}
    write_jsonl(facts["queries"], [{"_id": id_, "text": text} for id_, text in texts.items()])
    statistics, _ = run(AnnotationConfig, annotate, facts, "first")
    (triple,) = lines(facts["output"] / "triples.jsonl")
    assert triple["query"] == QUERIES["q1"]
    assert set(triple["positives"]) == {DOCUMENTS["d1"], DOCUMENTS["d5"]}
    assert triple["negatives"] == [DOCUMENTS["d2"]]
    # BM25 finds nothing for q2 but its answer, and nothing answers q3.
    assert (statistics["no_negative"], statistics["no_positive"]) == (1, 1)
    assert (statistics["queries"], statistics["triples"], statistics["negatives"]) == (3, 1, 1)


def test_training_reads_triples_of_a_corpus_that_says_things_twice(facts: dict[str, Any]) -> None:
    texts = DOCUMENTS | {"d6": DOCUMENTS["d1"], "d7": DOCUMENTS["d2"]}
    write_jsonl(facts["corpus"], [{"_id": id_, "text": text} for id_, text in texts.items()])

    def respond(body: Any, *_: object) -> str:
        """Calls the same text an answer once, and no answer the next time."""
        _, passages = prompts.read_judge_question(body["messages"][1]["content"])
        first = {text: name for name, text in reversed(passages.items())}
        answers = first.get(DOCUMENTS["d1"])
        return json.dumps({name: "A" if name == answers else "C" for name in passages})

    with scripted_server(respond) as url:
        facts |= {"judges": [endpoint(url)], "passages_per_call": 10}
        annotate(AnnotationConfig.model_validate(facts))
    path = facts["output"] / "triples.jsonl"
    examples, _ = read_examples([DataEntry(triples=str(path))], frozenset(), {})
    (example,) = examples
    assert example.positives == (DOCUMENTS["d1"],)
    assert set(example.negatives) == {DOCUMENTS["d2"], DOCUMENTS["d5"]}
    (row,) = lines(path)
    assert Example(row["query"], tuple(row["positives"]), tuple(row["negatives"])) == example


def test_a_missing_key_shows_before_anything_is_encoded(facts: dict[str, Any]) -> None:
    judges = [endpoint("http://localhost:9/v1", api_key_env="NO_SUCH_KEY")]
    facts |= {"judges": judges, "retrievers": [{"kind": "pair", "pair": "care-mini"}]}
    with pytest.raises(LanguageModelError, match="variable NO_SUCH_KEY, the key of judge, is not"):
        build_benchmark(BenchmarkConfig.model_validate(facts))
    assert not (facts["output"] / "cache" / "vectors").exists()
