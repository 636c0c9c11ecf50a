import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from core.types import Document
from evaluation.beir import (
    beir_paths,
    check_judged,
    read_documents,
    read_judged_queries,
    read_qrels,
    read_queries,
    write_beir,
)
from tests.conftest import write_jsonl
from tests.errors import raises


def test_queries_and_judgements_are_read(tmp_path: Path) -> None:
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q1", "text": "头痛"}])
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t1\n", encoding="utf-8")
    assert read_queries(queries) == {"q1": "头痛"}
    assert read_qrels(qrels) == {"q1": {"d1": 2, "d2": 1}}


def test_a_written_folder_is_read_again(tmp_path: Path) -> None:
    documents = [Document("d1", "文", "题", {"department": "内科"}), Document("d2", "字")]
    queries, qrels = {"q1": "问", "q2": "答"}, {"q2": {"d2": 2, "d1": 0}}
    paths = write_beir(tmp_path, "dev", documents, queries, qrels)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        *("corpus.jsonl", "queries.jsonl", "qrels/dev.tsv")
    ]
    assert paths == beir_paths(tmp_path, "dev")
    assert read_documents(paths.corpus) == documents
    assert (read_queries(paths.queries), read_qrels(paths.qrels)) == (queries, qrels)


def test_whole_numbers_are_ids(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"_id": 7, "text": "文"}])
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": 0, "text": "问"}])
    (tmp_path / "qrels.tsv").write_text("0\t7\t1\n", encoding="utf-8")
    assert [document.id for document in read_documents(corpus)] == ["7"]
    assert read_queries(queries) == {"0": "问"}
    assert read_qrels(tmp_path / "qrels.tsv") == {"0": {"7": 1}}


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([{"_id": "q1"}], "bad_field", 1),
        ([{"_id": "q1", "text": "a"}, []], "not_json", 2),
        ([{"_id": "q1", "text": "a"}, {"_id": "q1", "text": "b"}], "duplicate_id", 2),
    ],
)
def test_a_wrong_query_is_named_by_its_line(
    tmp_path: Path, rows: list[Any], code: str, line: int
) -> None:
    path = write_jsonl(tmp_path / "queries.jsonl", rows)
    with raises(DataError, code=code, path=path, line=line):
        read_queries(path)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"_id": ["d"]}, "_id"), ({"text": 3}, "text"), ({"metadata": "x"}, "metadata")],
)
def test_a_wrong_field_of_a_document_is_named(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", [{"_id": "d", "text": "a"} | change])
    with raises(DataError, code="bad_field", path=path, line=1, field=field):
        read_documents(path)


def test_a_file_without_queries_is_an_error(tmp_path: Path) -> None:
    with raises(DataError, code="no_queries", path=write_jsonl(tmp_path / "queries.jsonl", [])):
        read_queries(tmp_path / "queries.jsonl")


@pytest.mark.parametrize(
    ("lines", "code", "place"),
    [
        (["q1\td1"], "not_qrels", {"line": 2}),
        (["q1\td1\tgood"], "not_qrels", {"line": 2}),
        (["q1 d1 1"], "not_qrels", {"line": 2}),
        (["q1\td1\t99999999999999999999"], "not_qrels", {"line": 2}),
        (["q1\td1\t1", "q1\td2\t-300000000"], "not_qrels", {"line": 3}),
        (["q1\td1\t1", "q2\td1\t0", "q1\td1\t0"], "contradiction", {"line": 4}),
        ([], "no_judgements", {}),
    ],
)
def test_wrong_judgements_are_named_by_their_line(
    tmp_path: Path, lines: list[str], code: str, place: dict[str, int]
) -> None:
    path = tmp_path / "qrels.tsv"
    path.write_text("\n".join(["query-id\tcorpus-id\tscore", *lines, ""]), encoding="utf-8")
    with raises(DataError, code=code, path=path, **place):
        read_qrels(path)


def test_judgements_of_unknown_queries_and_documents(tmp_path: Path) -> None:
    path = tmp_path / "qrels.tsv"
    check_judged(path, {"q": ["d"]}, {"q"}, {"d"})
    with raises(DataError, code="unknown_query", path=path, id="q"):
        check_judged(path, {"q": ["d"]}, {}, {"d"})
    with raises(DataError, code="unknown_document", path=path, id="d"):
        check_judged(path, {"q": ["d"]}, {"q"}, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with raises(DataError, code="unreadable", path=tmp_path / "none.jsonl"):
        read_queries(tmp_path / "none.jsonl")
    path = tmp_path / "queries.jsonl"
    path.write_bytes(json.dumps({"_id": "q", "text": "文"}, ensure_ascii=False).encode("gb18030"))
    with raises(DataError, code="not_utf8", path=path):
        read_queries(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_judgements_may_have_a_mark_blank_lines_and_quotes(tmp_path: Path, suffix: str) -> None:
    content = '\ufeffquery-id\tcorpus-id\tscore\r\n\r\nq1\t"d1\t1\r\nq1\td2\t0\n\nq1\t"d1\t1\n\n'
    path = tmp_path / f"qrels.tsv{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix else content.encode())
    assert read_qrels(path) == {"q1": {'"d1': 1, "d2": 0}}


@pytest.mark.parametrize(
    ("text", "code"), [("痛" * 11, "text_too_long"), (" \u200b", "empty_text"), ("", "empty_text")]
)
def test_a_query_that_cannot_be_searched_is_named_if_it_is_judged(
    tmp_path: Path, text: str, code: str
) -> None:
    records = [{"_id": "q1", "text": "头痛" * 5}, {"_id": "q2", "text": text}]
    queries = write_jsonl(tmp_path / "queries.jsonl", records)
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("q1\td1\t1\n")
    assert read_judged_queries(queries, qrels, 10)[0] == {"q1": "头痛" * 5}
    qrels.write_text("q1\td1\t1\nq2\td1\t1\n")
    with raises(DataError, code, path=queries, line=2, field="text"):
        read_judged_queries(queries, qrels, 10)
