import json
from pathlib import Path
from typing import Any

import pytest

from core.documents import DocumentReader
from core.errors import CorpusError
from core.filters import FilterReader
from core.manifest import Chunking
from indexer.chunking import Chunker
from indexer.staging import (
    SUMMARY,
    StagedCorpus,
    read_chunks,
    stage,
    unique_text_rows,
    vector_of_row,
)
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return tmp_path / "corpus.jsonl"


def run(corpus: Path, max_reject_rate: float = 0.0, chunk_tokens: int = 0) -> StagedCorpus:
    chunker = Chunker(BigramEncoder(), Chunking(tokens=chunk_tokens)) if chunk_tokens else None
    return stage(
        read_chunks([corpus], chunker),
        corpus.parent,
        files=[corpus.name],
        checksum="checksum",
        chunked=chunker is not None,
        max_reject_rate=max_reject_rate,
        progress=False,
    )


def staged_texts(folder: Path) -> list[str]:
    return [document.text for document in DocumentReader(folder / "documents.arrow")]


def with_bad(good: int, bad: int) -> list[dict[str, Any]]:
    return make_records(good) + [{"_id": f"bad{i}"} for i in range(bad)]


def test_documents_filters_and_counts_are_staged(corpus: Path) -> None:
    records = make_records(20)
    staged = run(write_jsonl(corpus, records))
    assert (staged.documents, staged.unique_texts, staged.rejected) == (20, 20, 0)
    assert (staged.checksum, staged.files) == ("checksum", ["corpus.jsonl"])
    documents = list(DocumentReader(corpus.parent / "documents.arrow"))
    assert [d.id for d in documents] == [record["_id"] for record in records]
    assert [d.metadata for d in documents] == [record["metadata"] for record in records]
    reader = FilterReader(corpus.parent / "filters.arrow", staged.filter_fields, len(documents))
    rows = reader.rows(reader.check({"rare": [True]}))
    assert rows.tolist() == [10]


def test_equal_texts_share_a_vector_unless_titles_differ(corpus: Path) -> None:
    contents = [("", "甲"), ("", "乙"), ("", " 甲\u200b"), ("题", "甲"), ("", "乙"), ("题", "甲")]
    records = [{"_id": i, "title": t, "text": x} for i, (t, x) in enumerate(contents)]
    staged = run(write_jsonl(corpus, records))
    assert (staged.documents, staged.unique_texts) == (6, 3)
    assert unique_text_rows(corpus.parent).tolist() == [0, 1, 3]
    assert vector_of_row(corpus.parent).tolist() == [0, 1, 0, 2, 1, 2]


def test_a_duplicate_id_is_an_error_that_names_both_locations(corpus: Path) -> None:
    records = make_records(6)
    records[4]["_id"] = records[1]["_id"]
    records[5]["_id"] = records[1]["_id"]
    fields = {"path": corpus, "line": 5, "id": "d0001", "count": 2}
    with raises(CorpusError, "duplicate_id", **fields) as caught:
        run(write_jsonl(corpus, records))
    assert f"{corpus} line 2" in str(caught.value)


def test_rejects_are_listed_with_their_location_and_all_others_are_staged(corpus: Path) -> None:
    write_jsonl(corpus, with_bad(98, 2))
    staged = run(corpus, max_reject_rate=0.02)
    assert (staged.documents, staged.rejected) == (98, 2)
    assert staged_texts(corpus.parent) == [record["text"] for record in make_records(98)]
    lines = (corpus.parent / "rejects.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file": str(corpus), "line": line, "reason": "text is missing"} for line in (99, 100)
    ]


def test_too_many_rejects_are_an_error_that_names_the_first(corpus: Path) -> None:
    write_jsonl(corpus, with_bad(97, 3))
    with raises(CorpusError, "too_many_rejects", rejected=3, total=100) as caught:
        run(corpus, max_reject_rate=0.02)
    assert f"{corpus} line 98" in str(caught.value)
    assert str(corpus.parent / "rejects.jsonl") in str(caught.value)
    with raises(CorpusError, "too_many_rejects", rejected=2, total=2):
        run(write_jsonl(corpus, with_bad(0, 2)), max_reject_rate=1)


def test_a_later_run_may_allow_fewer_rejects_or_more(corpus: Path) -> None:
    write_jsonl(corpus, with_bad(9, 1))
    staged = run(corpus, max_reject_rate=0.1)
    with raises(CorpusError, "too_many_rejects", rejected=1, total=10):
        run(corpus, max_reject_rate=0.05)
    assert run(corpus, max_reject_rate=0.2) == staged


def test_too_many_different_fields_are_an_error_that_names_the_record(corpus: Path) -> None:
    records = [{"_id": i, "text": f"{i}", "metadata": {f"f{i}": 1}} for i in range(1001)]
    assert len(run(write_jsonl(corpus, records[:1000])).filter_fields) == 1000
    (corpus.parent / SUMMARY).unlink()
    with raises(CorpusError, "too_many_fields", path=corpus, line=1001, limit=1000):
        run(write_jsonl(corpus, records))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_corpus_is_an_error(corpus: Path, content: str) -> None:
    corpus.write_text(content)
    with raises(CorpusError, "empty_corpus", files=[corpus.name]):
        run(corpus, max_reject_rate=1)


def test_a_completed_pass_is_not_repeated(corpus: Path) -> None:
    staged = run(write_jsonl(corpus, make_records(5)))
    corpus.unlink()
    assert run(corpus) == staged


@pytest.mark.parametrize(
    ("name", "content"),
    [(SUMMARY, '{"checksum": "checksum", "documen'), ("documents.arrow", "half")],
)
def test_an_incomplete_pass_is_repeated(corpus: Path, name: str, content: str) -> None:
    staged = run(write_jsonl(corpus, make_records(5)))
    (corpus.parent / SUMMARY).unlink()
    (corpus.parent / name).write_text(content)
    assert run(corpus) == staged
    assert staged_texts(corpus.parent) == [record["text"] for record in make_records(5)]


def long_record(id_: str, sentences: int = 3, **fields: Any) -> dict[str, Any]:
    return {"_id": id_, "text": f"{id_}一二三四五六。" * sentences} | fields


def test_chunks_are_rows_with_the_metadata_of_their_document(corpus: Path) -> None:
    metadata = {"department": "骨科"}
    write_jsonl(
        corpus,
        [long_record("a", metadata=metadata), {"_id": "b", "text": "短。"}, long_record("c", 2)],
    )
    staged = run(corpus, chunk_tokens=10)
    assert (staged.documents, staged.chunks, staged.unique_texts) == (3, 6, 3)
    rows = list(DocumentReader(corpus.parent / "documents.arrow"))
    assert [(row.id, row.parent, row.chunk, row.chunks) for row in rows] == [
        ("a#0", "a", 0, 3),
        ("a#1", "a", 1, 3),
        ("a#2", "a", 2, 3),
        ("b", "b", 0, 1),
        ("c#0", "c", 0, 2),
        ("c#1", "c", 1, 2),
    ]
    reader = FilterReader(corpus.parent / "filters.arrow", staged.filter_fields, len(rows))
    passing = reader.rows(reader.check({"department": ["骨科"]}))
    assert passing.tolist() == [0, 1, 2]
    assert run(corpus, chunk_tokens=10) == staged


@pytest.mark.parametrize("order", [1, -1])
def test_an_id_that_is_also_a_chunk_id_is_an_error_that_names_both_locations(
    corpus: Path, order: int
) -> None:
    write_jsonl(corpus, [long_record("a"), long_record("a#1", 1)][::order])
    own, chunked = (2, 1) if order == 1 else (1, 2)
    with raises(CorpusError, "id_is_a_chunk", path=corpus, line=own, id="a#1") as caught:
        run(corpus, chunk_tokens=12)
    assert f"{corpus} line {chunked}" in str(caught.value)


@pytest.mark.parametrize(
    "records",
    [
        [{"_id": 1, "text": "a"}, {"_id": "1", "text": "b"}],
        *([long_record("1", a), long_record("1", b)] for a, b in ((3, 3), (1, 3), (3, 1))),
    ],
    ids=["number", "chunks", "then chunks", "chunks before"],
)
def test_a_duplicate_id_is_an_error_also_as_a_number_or_in_chunks(
    corpus: Path, records: list[dict[str, Any]]
) -> None:
    write_jsonl(corpus, records)
    with raises(CorpusError, "duplicate_id", line=2, id="1"):
        run(corpus, chunk_tokens=10)


def test_a_document_whose_title_fills_a_chunk_is_rejected(corpus: Path) -> None:
    write_jsonl(corpus, [long_record("a"), long_record("b", title="长" * 20)])
    staged = run(corpus, 0.5, chunk_tokens=10)
    assert (staged.documents, staged.rejected, staged.chunks) == (1, 1, 3)
    (line,) = (corpus.parent / "rejects.jsonl").read_text("utf-8").splitlines()
    assert "10 tokens" in json.loads(line)["reason"]


def test_texts_may_be_longer_if_they_are_split_into_chunks(corpus: Path) -> None:
    write_jsonl(corpus, [{"_id": "a", "text": "一二三四五六七八九。" * 10_001}])
    with raises(CorpusError, "too_many_rejects", rejected=1):
        run(corpus)
    assert run(corpus, chunk_tokens=200).chunks == 501


def test_files_whose_documents_are_missing_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    whole.write_text("id,text\n1,头痛的人应多休息\n2,\n", encoding="utf-8")
    broken.write_text('id,text\n3,发热的人应多喝水\n4,"腹泻的人\n', encoding="utf-8")
    assert [place.line for place, _ in read_chunks([whole], None)] == [2, 3]
    assert not caplog.messages
    assert len(list(read_chunks([broken, whole], None))) == 3
    (message,) = caplog.messages
    assert str(broken) in message
    assert str(whole) not in message
