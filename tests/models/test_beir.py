from pathlib import Path

import pytest

from core.errors import CareError
from models.evaluation.beir import read_qrels, read_queries


def test_queries_and_judgements_are_read(tmp_path: Path) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"_id": "q1", "text": "头痛"}\n', encoding="utf-8")
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t1\n", encoding="utf-8")
    assert read_queries(queries) == {"q1": "头痛"}
    assert read_qrels(qrels) == {"q1": {"d1": 2, "d2": 1}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"_id": "q1"}\n', "line 1 is not JSON with _id and text"),
        (b'{"_id": "q1", "text": "a"}\n[]\n', "line 2 is not JSON with _id and text"),
        (b'{"_id": "q1", "text": "a"}\n{"_id": "q1", "text": "b"}\n', "line 2: _id 'q1' is a dup"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_bad_queries_are_refused_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_bytes(content)
    with pytest.raises(CareError, match=message):
        read_queries(path)


@pytest.mark.parametrize("line", ["q1\td1", "q1\td1\tgood", "q1 d1 1"])
def test_bad_judgements_are_refused_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "qrels.tsv"
    path.write_text(f"query-id\tcorpus-id\tscore\n{line}\n", encoding="utf-8")
    with pytest.raises(CareError, match=r"qrels\.tsv line 2"):
        read_qrels(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CareError, match=r"none\.jsonl cannot be read"):
        read_queries(tmp_path / "none.jsonl")
