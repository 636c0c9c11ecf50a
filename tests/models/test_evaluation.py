import json
import sys
from pathlib import Path

import pytest

from core.types import Document
from indexer.__main__ import main
from models.evaluation import __main__ as evaluation
from models.evaluation.chunks import chunk_depth, document_run
from tests.conftest import make_records, write_jsonl

CHUNKS = [Document(f"a#{i}", "t", parent="a", chunk=i, chunks=3) for i in range(3)] + [
    Document("b", "t", parent="b"),
    Document("c", "t"),
]


def test_a_document_is_found_by_its_best_chunk() -> None:
    run = {"q": {"a#1": 0.5, "b": 0.7, "a#2": 0.9, "a#0": 0.8, "c": 0.6}, "none": {}}
    assert document_run(run, CHUNKS, 2) == {"q": {"a": 0.9, "b": 0.7}, "none": {}}
    assert document_run(run, CHUNKS, 9)["q"] == {"a": 0.9, "b": 0.7, "c": 0.6}


def test_a_run_of_chunks_is_deep_enough_for_the_documents() -> None:
    depth = chunk_depth(CHUNKS, 2)
    best = dict.fromkeys(["a#0", "a#1", "a#2", "b", "c"][:depth], 0.5)
    assert len(document_run({"q": best}, CHUNKS, 2)["q"]) == 2


def test_an_index_of_chunks_is_scored_by_judgements_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subjects = make_records(4)
    # Each document is of its subject in the last sentences alone.
    fill = "今天天气很好，大家一起出去散步。" * 12
    records = [r | {"title": "", "text": fill + r["text"] * 4} for r in subjects]
    queries = [{"_id": r["_id"], "text": r["text"]} for r in subjects]
    judged = "".join(f"{r['_id']}\t{r['_id']}\t1\n" for r in subjects)
    (tmp_path / "qrels.tsv").write_text(judged, encoding="utf-8")
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    places = ["--index", "long", "--indexes", str(tmp_path / "indexes")]
    build = ["build", "--corpus", str(corpus), "--builds", str(tmp_path / "builds"), *places]
    assert main([*build, "--chunk-tokens", "48"]) == 0
    assert "4 documents in " in capsys.readouterr().out

    arguments = ["--queries", str(write_jsonl(tmp_path / "queries.jsonl", queries))]
    arguments += ["--qrels", str(tmp_path / "qrels.tsv"), "--output", str(tmp_path / "scores.json")]
    monkeypatch.setattr(sys, "argv", ["evaluation", *places, *arguments])
    assert evaluation.main() == 0
    assert "4 judged queries, 4 documents" in capsys.readouterr().out
    scores = json.loads((tmp_path / "scores.json").read_text("utf-8"))["scores"]
    assert [values["nDCG@10"] for values in scores.values()] == [1, 1]
