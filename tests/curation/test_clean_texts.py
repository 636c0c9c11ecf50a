from pathlib import Path

from core.records import read_jsonl
from curation.clean_texts import clean_texts
from curation.cleaning import clean
from evaluation.beir import read_documents, read_queries
from tests.conftest import write_jsonl
from tests.curation.test_raw_sample import RAW


def test_questions_of_the_benchmark_are_in_no_other_file(tmp_path: Path) -> None:
    report = clean_texts(RAW / "queries.jsonl", RAW / "corpus.jsonl", tmp_path, benchmark=70)
    apart, queries = (
        read_queries(tmp_path / "cleaned" / f"{name}.jsonl") for name in ("benchmark", "queries")
    )
    assert (len(apart), len(queries)) == (report["benchmark"], report["queries"]) == (70, 97)
    assert set(apart.values()).isdisjoint(queries.values())
    pairs = [record for _, record in read_jsonl(tmp_path / "pairs.jsonl")]
    assert {pair["title"] for pair in pairs} <= set(queries.values())
    answers = {d.id: d.text for d in read_documents(RAW / "corpus.jsonl")}
    ids = {text: id_ for id_, text in queries.items()}
    for pair in pairs:
        assert pair["text"] == clean(answers[ids[pair["title"]]], anonymous=True)
    # Answers to questions of the benchmark stay in the corpus.
    assert len(read_documents(tmp_path / "cleaned" / "corpus.jsonl")) == 167
    before = (tmp_path / "cleaned" / "benchmark.jsonl").read_bytes()
    clean_texts(RAW / "queries.jsonl", RAW / "corpus.jsonl", tmp_path, benchmark=70, seed=1)
    assert (tmp_path / "cleaned" / "benchmark.jsonl").read_bytes() != before


def test_a_document_is_paired_with_its_title(tmp_path: Path) -> None:
    corpus = [
        {"_id": "a", "title": "<b>高血压怎么办</b>", "text": "按时吃药，少吃盐，多量血压。"},
        {"_id": "b", "text": "没有标题，也没有问题的一段话。"},
        {"_id": "c", "title": "骨折怎么办", "text": "按时吃药，少吃盐，多量血压。"},
    ]
    queries = [{"_id": "q", "text": "头痛怎么办"}]
    files = (
        write_jsonl(tmp_path / name, rows)
        for name, rows in (("q.jsonl", queries), ("c.jsonl", corpus))
    )
    report = clean_texts(*files, tmp_path / "out")
    pairs = [record for _, record in read_jsonl(tmp_path / "out" / "pairs.jsonl")]
    assert pairs == [{"title": "高血压怎么办", "text": "按时吃药，少吃盐，多量血压。"}]
    assert report["cleaning"]["documents"]["duplicate"] == 1
