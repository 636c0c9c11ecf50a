from pathlib import Path

import pytest

from core.errors import DataError
from core.records import (
    duplicate_error,
    read_jsonl,
    read_text,
    record_id,
    string,
    write_csv,
    write_jsonl,
    write_tsv,
)
from tests.errors import raises


def test_records_have_line_numbers_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": "二"}\n', "utf-8")
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (3, {"a": "二"})]


@pytest.mark.parametrize("content", [b'{"a": 1}\n[]', b"{}\n{"])
def test_an_invalid_line_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with raises(DataError, "not_json", path=path, line=2):
        list(read_jsonl(path))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with raises(DataError, "unreadable", path=path):
        list(read_jsonl(path))
    path.write_bytes(b"\xff\xfe")
    for read in (lambda: list(read_jsonl(path)), lambda: read_text(path)):
        with raises(DataError, "not_utf8", path=path):
            read()


def test_fields_are_strings_and_ids_may_be_integers() -> None:
    path = Path("a.jsonl")
    assert record_id(path, 1, {"_id": 7}) == "7"
    assert record_id(path, 1, {"id": "x"}) == "x"
    for record in ({}, {"_id": True}, {"_id": 1.5}, {"_id": ""}):
        with raises(DataError, "bad_field", path=path, line=1, field="_id"):
            record_id(path, 1, record)
    with raises(DataError, "bad_field", line=2, field="text"):
        string(path, 2, {"text": 1}, "text")


def test_a_duplicate_id_is_named_with_its_line() -> None:
    with raises(DataError, "duplicate_id", path="a.jsonl", line=3, field="_id", id="x"):
        raise duplicate_error(Path("a.jsonl"), 3, "x")


def test_tables_are_written_and_formulas_are_escaped(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [("a", "=1+1"), (2, "b")])
    assert (tmp_path / "a.csv").read_text("utf-8-sig").splitlines() == ["a,'=1+1", "2,b"]
    write_tsv(tmp_path / "a.tsv", [("a", "b"), (1, 2)])
    assert (tmp_path / "a.tsv").read_text("utf-8") == "a\tb\n1\t2\n"

    def fails() -> object:
        yield {"a": 1}
        raise RuntimeError

    write_jsonl(tmp_path / "a.jsonl", [{"a": "二"}])
    with pytest.raises(RuntimeError):
        write_jsonl(tmp_path / "a.jsonl", fails())  # type: ignore[arg-type]
    assert (tmp_path / "a.jsonl").read_text("utf-8") == '{"a": "二"}\n'
