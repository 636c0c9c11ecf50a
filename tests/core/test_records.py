import gzip
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from core.records import (
    MAX_LINE_BYTES,
    Triple,
    duplicate_error,
    parse_yaml,
    read_jsonl,
    read_text,
    read_triples,
    read_tsv,
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


@pytest.mark.parametrize(
    ("name", "content", "code", "place"),
    [
        ("a.jsonl", b'{"a": 1}\n[]', "not_json", {"line": 2}),
        ("a.jsonl", b"{}\n{", "not_json", {"line": 2}),
        ("a.jsonl.gz", b"no gzip", "unreadable", {}),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], "unreadable", {}),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, code: str, place: dict[str, int]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with raises(DataError, code, path=path, **place):
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


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"a": ' + b"1" * 5000 + b"}", "not_json"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not_json"),
        (b'{"a": NaN}', "not_json"),
        (b'{"a": -Infinity}', "not_json"),
        ('{"a": "高血压"}'.encode("gb18030"), "not_utf8"),
        ('{"a": "高血压"}'.encode("utf-16"), "not_utf8"),
        (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}', "line_too_long"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_cannot_be_read_is_named(
    tmp_path: Path, line: bytes, code: str, suffix: str
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    content = b'{"a": 1}\n\n' + line + b"\n"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with raises(DataError, code, path=path, line=3):
        list(read_jsonl(path))


def test_a_text_with_half_a_surrogate_pair_is_named() -> None:
    with raises(DataError, "bad_field", line=1, field="text"):
        string(Path("a.jsonl"), 1, {"text": "a\ud83d"}, "text")


def test_quotes_of_tables_have_no_meaning(tmp_path: Path) -> None:
    rows = [("a", '"b'), ('c"d"', "e "), ("'", '""')]
    write_tsv(tmp_path / "a.tsv", rows)
    assert [fields for _, fields in read_tsv(tmp_path / "a.tsv")] == [list(row) for row in rows]
    for wrong in ("a\tb", "a\nb", "a\rb"):
        with raises(DataError, "bad_record", line=1):
            write_tsv(tmp_path / "b.tsv", [(wrong, 1)])
    assert not (tmp_path / "b.tsv").exists()


def test_texts_of_triples_are_normalised_and_documents_may_have_a_title(tmp_path: Path) -> None:
    document = {"title": "题", "text": "第1段"}
    records = [{"query": " 问  题 ", "positives": [document], "negatives": ["乙"]}, {"query": "问"}]
    path = tmp_path / "t.jsonl"
    write_jsonl(path, records)
    assert list(read_triples(path)) == [
        (1, Triple("问 题", ("题\n第1段",), ("乙",))),
        (2, Triple("问", ())),
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"query": " "}, "query"),
        ({"positives": "甲"}, "positives"),
        ({"positives": [{"title": "题"}]}, "positives"),
        ({"negatives": [""]}, "negatives"),
    ],
)
def test_empty_and_other_values_of_triples_are_errors(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"query": "问", "positives": ["甲"]} | change])
    with raises(DataError, "bad_field", path=path, line=1, field=field):
        list(read_triples(path))


def test_values_of_yaml_are_plain() -> None:
    assert parse_yaml("a: [1, 头痛]\nb: {c: null}") == {"a": [1, "头痛"], "b": {"c": None}}
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2",
        "[" * 100_000,
        "1" * 10_000,
        "2026-99-99",
        "\0",
        "!!python/object/apply:os.getcwd []",
    ],
    ids=["open", "deep", "long number", "no date", "control", "object"],
)
def test_what_is_no_yaml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_yaml(text)
