import csv
import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import CorpusError
from core.types import Document
from indexer import limits
from indexer.readers.fields import FieldNames, guess_fields
from tests.errors import raises
from tests.indexer.readers.reading import read

COLUMNS = ("编号", "标题", "内容", "科室")
ROWS = (
    ("a1", "高血压", "每天食盐不超过五克，多吃蔬菜。", "心血管科"),
    ("a2", "失眠", "睡前少看手机，\n按时起床。", "神经科"),
)
DOCUMENTS = [
    Document(id_, text, title, {"科室": department}) for id_, title, text, department in ROWS
]


def write_csv(
    path: Path, rows: Sequence[Sequence[Any]], encoding: str = "utf-8", delimiter: str = ","
) -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def write_excel(path: Path, **sheets: Sequence[Sequence[Any]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


ENCODINGS = {
    "utf-8": "",
    "utf-8-sig": "UTF-8 with byte order mark",
    "gbk": "GB18030",
    "gb18030": "GB18030",
    "utf-16": "UTF-16",
    "utf-16-le": "UTF-16-LE",
}


def test_encoding_and_delimiter_of_a_table_are_found_and_the_encoding_is_said(
    tmp_path: Path,
) -> None:
    shown = []
    names = {"a.csv": ",", "b.tsv": "\t", "c.CSV": ",", "d.csv": ";", "e.csv": "\t", "f.csv": "|"}
    for name, delimiter in names.items():
        for encoding, expected in ENCODINGS.items():
            write_csv(tmp_path / f"{encoding}-{name}", [COLUMNS, *ROWS], encoding, delimiter)
            shown.append(expected)
    found = read(tmp_path)
    assert (found.documents, found.rejects) == (DOCUMENTS * len(shown), {})
    assert Counter(report.encoding for report in found.reports) == Counter(shown)
    assert all(report.guessed for report in found.reports)
    fields = FieldNames("编号", "标题", "内容", ("科室",))
    assert all(report.fields == fields for report in found.reports)


def test_given_fields_are_used_and_others_left_out(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "faq.csv", [COLUMNS, *ROWS])
    found = read(path, FieldNames("标题", "科室", "内容", ()))
    assert found.documents[0] == Document("高血压", ROWS[0][2], "心血管科", {})
    assert not found.reports[0].guessed
    with raises(CorpusError, "unknown_field", path=path):
        read(path, FieldNames(text="正文"))


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        (("question", "answer"), [("怎么办", "休息")], FieldNames(None, "question", "answer", ())),
        (("ID", "Title", "Text"), [("1", "a", "b")], FieldNames("ID", "Title", "Text", ())),
        # Without a known name the longest texts.
        (("x", "y"), [("甲", "很长的一段文字，超过十个字")], FieldNames(None, None, "y", ("x",))),
        # An id that occurs twice, or is missing, is none.
        (("id", "text"), [("1", "甲"), ("1", "乙")], FieldNames(None, None, "text", ("id",))),
        (("id", "text"), [("1", "甲"), ("", "乙")], FieldNames(None, None, "text", ("id",))),
        (("x", "y"), [("1", "2")], None),
    ],
)
def test_fields_are_guessed(
    columns: tuple[str, ...], rows: list[tuple[str, ...]], expected: FieldNames | None
) -> None:
    values = [dict(zip(columns, row, strict=True)) for row in rows]
    assert guess_fields(FieldNames(), columns, values) == expected


def test_a_row_with_other_fields_than_the_header_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("id,text,科室\n1,头痛,神经科\n2,发热\n\n3,咳,嗽,呼吸科\n4,腹泻,消化科\n")
    found = read(path)
    assert found.ids == ["1", "4"]
    assert list(found.rejects) == [f"{path} line 3", f"{path} line 5"]


def test_rows_without_ids_are_named_by_file_and_line(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [("标题", "内容"), ("一", "甲"), ("二", "乙")])
    (tmp_path / "deep").mkdir()
    write_csv(tmp_path / "deep" / "b.csv", [("标题", "内容"), ("一", "甲")])
    assert read(tmp_path).ids == ["a.csv#2", "a.csv#3", "deep/b.csv#2"]
    assert read(f"{tmp_path}/*.csv").ids == ["a.csv#2", "a.csv#3"]
    assert read(tmp_path / "deep" / "b.csv").ids == ["b.csv#2"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\xef\xbb\xbf\n \n", "empty_file"),
        (b'id,text\n1,"open quote\n2,b\n', "not_csv"),
        (b"id,text\n1,a\x00b\n", "not_text"),
        (b"id,text\n1,caf\xe9 au lait\n", "unknown_encoding"),
        ("id,text\n1,頭痛的時候應該多休息，發燒的人要喝水\n".encode("big5"), "unknown_encoding"),
        (b"a,b\n1,2\n", "no_text_field"),
        (b",".join([b"c"] * (limits.MAX_COLUMNS + 1)) + b"\n1\n", "too_many_columns"),
    ],
)
def test_csv_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "faq.csv"
    path.write_bytes(content)
    with raises(CorpusError, code, path=path):
        read(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_bytes("id,text\n1,头痛\n2,发热".encode() + b"\xff\n3,a\n")
    with raises(CorpusError, "unknown_encoding") as caught:
        read(path)
    assert "line 3" in str(caught.value)


def test_a_field_beyond_the_limit_is_an_error(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "faq.csv", [("text",), ("长" * (limits.MAX_RECORD_BYTES + 1),)])
    with raises(CorpusError, "not_csv", path=path):
        read(path)


def test_excel_gives_its_visible_sheets(tmp_path: Path) -> None:
    rows = [
        ["2023年常见问题"],  # a title above the header
        ["编号", "标题", "内容", "日期", "年份"],
        [1, "高血压", "少吃盐", date(2023, 1, 31), 2023],
        [],
        [2.0, "失眠", None, None, None],
    ]
    path = write_excel(tmp_path / "faq.xlsx", 门诊=rows, 空白=[], 住院=[["text"], ["按时服药"]])
    found = read(path)
    assert found.documents == [
        Document(
            "1", "少吃盐", "高血压", {"sheet": "门诊", "日期": "2023-01-31T00:00:00", "年份": 2023}
        ),
        Document("faq.xlsx#住院!2", "按时服药", "", {"sheet": "住院"}),
    ]
    assert list(found.rejects) == [f"{path} row 5"]
    book = openpyxl.load_workbook(path)
    book["门诊"].sheet_state = "hidden"
    book.save(path)
    assert read(path).texts == ["按时服药"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"title": "甲", "content": "乙"}], [("a.json#1", "甲", "乙")]),
        ({"n": 1, "data": [{"id": 5, "content": "乙"}]}, [("5", "", "乙")]),
        ({"title": "甲", "content": "乙"}, [("a.json#1", "甲", "乙")]),
        (["甲", "乙"], [("a.json#1", "", "甲"), ("a.json#2", "", "乙")]),
    ],
)
def test_json_gives_its_objects_or_texts(
    tmp_path: Path, value: Any, expected: list[tuple[str, str, str]]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    found = read(path).documents
    assert [(document.id, document.title, document.text) for document in found] == expected


def test_metadata_of_json_stay_as_they_are(tmp_path: Path) -> None:
    record = {
        "_id": "1",
        "text": "甲",
        "metadata": {"年份": 2020},
        "标签": ["一", "二"],
        "空": None,
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps([record, 5]), encoding="utf-8")
    found = read(path)
    assert found.documents == [Document("1", "甲", "", {"年份": 2020, "标签": ["一", "二"]})]
    assert list(found.rejects) == [f"{path} item 2"]


@pytest.mark.parametrize("content", ["[{", '"text"', "[]", "5", "[" * 100_000])
def test_json_without_records_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with raises(CorpusError, "not_json", path=path):
        read(path)


RECORDS = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_records_with_other_fields_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    table = pa.Table.from_pylist(RECORDS)
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "a.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    found = read(path)
    assert found.documents == DOCUMENTS
    assert found.reports[0].guessed


def test_jsonl_in_gb18030_is_read_if_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    path.write_text("\n".join([*lines, "{"]), encoding="gb18030")
    found = read(path, FieldNames(text="内容"))
    assert found.documents == DOCUMENTS
    assert list(found.rejects) == [f"{path} line 3"]


def test_a_data_set_on_disk_is_read(tmp_path: Path) -> None:
    """As `datasets` writes it: rows in Arrow streams, beside JSON that is none of the rows."""
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(RECORDS)
    for name in ("data-00000-of-00001.arrow", "cache-12ab.arrow"):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    for name in ("dataset_info.json", "state.json", "../dataset_dict.json"):
        (folder / name).write_text('{"splits": ["train"]}')
    assert read(tmp_path / "set").documents == DOCUMENTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_fields_that_the_first_records_lack_become_metadata(tmp_path: Path, name: str) -> None:
    records = [{"内容": f"头痛的人应多休息 {n}"} for n in range(250)] + [RECORDS[0]]
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    metadata = {"编号": "a1", "标题": "高血压", "科室": "心血管科"}
    assert read(path).documents[-1].metadata == metadata
    named = FieldNames(text="内容", metadata=())
    assert read(path, named).documents[-1].metadata == {}


def test_ids_that_are_not_used_are_said(tmp_path: Path) -> None:
    rows = [("id", "title", "text"), ("1", "一", "甲"), ("", "二", "乙")]
    path = write_csv(tmp_path / "a.csv", rows)
    found = read(path)
    assert found.ids == ["a.csv#2", "a.csv#3"]
    assert found.reports[0].guessed
    assert not read(write_csv(path, rows[:2])).reports[0].guessed
    assert not read(write_csv(path, [row[1:] for row in rows])).reports[0].guessed


def test_jsonl_may_begin_with_an_empty_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n" + "\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    assert read(path).documents == DOCUMENTS


@pytest.mark.parametrize("title", [["常见问题"], ["常见问题", "2023年", "第一版"]])
def test_a_note_beside_a_table_does_not_make_its_row_the_header(
    tmp_path: Path, title: list[str]
) -> None:
    rows = [title, COLUMNS, ROWS[0], [*ROWS[1], "已复核", "王"]]
    path = write_excel(tmp_path / "a.xlsx", Sheet=rows)
    assert read(path).documents == DOCUMENTS
