from pathlib import Path

import docx
import pypdfium2
import pytest

from core.errors import CorpusError
from core.types import Document
from indexer.readers.passages import PASSAGE_CHARS, pack
from tests.errors import raises
from tests.indexer.readers.reading import FILES, Found, read

MARKDOWN = """---
title: 页面
---
# 感冒

多喝水，
多休息。

## 用药

| 药 | 剂量 |
|---|---|
| **对乙酰氨基酚** | 500 mg |

- 一
- [二](https://example.org)

## 用药

再次就诊。
"""
PAGE = """<html><head><meta charset="gb2312"><title>健康 网</title><style>p{}</style></head><body>
<nav><p>导航</p></nav><header><h1>网站</h1></header>
<main><header><h1 id="fever">发热</h1></header>
<p>多<b>喝</b>水&amp;休息<br>睡眠<script>alert(1)</script><p hidden>看不见
<table><caption>体温</caption><tr><th>部位<th>度数<tr><td>腋下<td>37<tr><td><td>38</table>
<h2>就诊</h2><pre>一
  二</pre><p style="display: none">看不见</p></main><footer>版权</footer>"""


def facts(found: Found) -> list[tuple[str, str, str]]:
    return [(document.id, document.title, document.text) for document in found.documents]


def test_markdown_gives_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "m.md"
    path.write_text(MARKDOWN, encoding="utf-8")
    found = read(path)
    assert facts(found) == [
        ("m.md#感冒", "感冒", "多喝水，多休息。"),
        ("m.md#用药", "感冒 › 用药", "药 | 剂量\n对乙酰氨基酚 | 500 mg\n- 一\n- 二"),
        ("m.md#用药~2", "感冒 › 用药", "再次就诊。"),
    ]
    assert found.documents[0].metadata == {"source": "m.md", "anchor": "感冒"}


@pytest.mark.parametrize("encoding", ["gb18030", "utf-8", "utf-16"])
def test_html_gives_the_sections_of_its_main_part(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "p.html"
    path.write_text(PAGE, encoding=encoding)
    found = read(path)
    assert facts(found) == [
        ("p.html#fever", "发热", "多喝水&休息\n睡眠\n体温\n部位 | 度数\n腋下 | 37\n | 38"),
        ("p.html#2", "发热 › 就诊", "一\n  二"),
    ]
    assert found.documents[0].metadata == {"source": "p.html", "anchor": "fever"}
    assert found.reports[0].encoding == {"utf-8": ""}.get(encoding, encoding.upper())


def test_html_in_big5_is_read_if_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "p.htm"
    path.write_bytes("<meta charset=big5><title>頭痛</title><p>多休息，發燒要喝水".encode("big5"))
    assert facts(read(path)) == [("p.htm#1", "頭痛", "多休息，發燒要喝水")]


def test_a_page_without_a_main_part_is_read_without_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    path.write_text("<nav>导航</nav><p>甲<p>乙<td>丙</td></table></div><footer>版权</footer>")
    assert facts(read(path)) == [("p.html#1", "p", "甲\n乙\n丙")]


def test_word_gives_headings_paragraphs_lists_and_tables(tmp_path: Path) -> None:
    document = docx.Document()
    document.sections[0].header.paragraphs[0].text = "某某医院"
    document.add_heading("糖尿病指南", 0)
    document.add_heading("诊断", 1)
    document.add_paragraph("空腹血糖升高。").add_run("复查。").bold = True
    table = document.add_table(2, 2)
    for row, texts in zip(table.rows, (("指标", "值"), ("血糖", "7.0")), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    document.add_heading("分型", 2)
    document.add_paragraph("1 型", style="List Bullet")
    document.add_paragraph("2 型", style="List Bullet")
    document.add_heading("治疗", 1)
    document.add_paragraph("运动。")
    document.save(str(tmp_path / "g.docx"))
    found = read(tmp_path / "g.docx")
    assert facts(found) == [
        ("g.docx#1", "糖尿病指南 › 诊断", "空腹血糖升高。复查。\n指标 | 值\n血糖 | 7.0"),
        ("g.docx#2", "糖尿病指南 › 诊断 › 分型", "- 1 型\n- 2 型"),
        ("g.docx#3", "糖尿病指南 › 治疗", "运动。"),
    ]
    assert found.documents[0].metadata == {"source": "g.docx"}


@pytest.mark.parametrize("encoding", ["utf-8", "gbk", "utf-16"])
def test_text_gives_passages_of_whole_paragraphs(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "头痛.txt"
    paragraphs = ["头痛时多休息。" * 40, "第二段。", "第三段。" * 100]
    path.write_text("\r\n\r\n".join(paragraphs), encoding=encoding, newline="")
    found = read(path)
    assert found.ids == ["头痛.txt#1", "头痛.txt#1/2"]
    assert found.titles == ["头痛", "头痛"]
    assert found.texts == ["\n".join(paragraphs[:2]), paragraphs[2]]


def test_long_blocks_are_cut_after_sentences_and_nothing_is_lost() -> None:
    text = "一句话。" * 500 + "没有句号" * 700
    cut = list(pack([text, "后"]))
    assert "".join(cut).replace("\n", "") == text + "后"
    assert max(map(len, cut)) <= 2 * PASSAGE_CHARS
    assert cut[0].endswith("。")


# The PDF files were printed by Chromium: see `pdfs`.
TABLE = "\n药名 | 剂量\n氨氯地平 | 5 mg"
GUIDE = [
    ("1", "高血压", "每天食盐不超过五克，" * 8 + "多吃蔬菜。" + TABLE),
    ("1~2", "高血压 › 复查", "高血压之后三个月复查。"),
    ("2", "失眠", "睡前少看手机，" * 8 + "按时起床。"),
    ("2~2", "失眠 › 复查", "失眠之后三个月复查。"),
    ("3", "发热", "多喝水，" * 14 + "注意休息。"),
    ("3~2", "发热 › 复查", "发热之后三个月复查。"),
]


@pytest.mark.parametrize("outline", [True, False])
def test_pdf_gives_pages_with_titles_and_without_headers(tmp_path: Path, outline: bool) -> None:
    """Titles are those of the outline or, if that is left out, the lines in larger letters."""
    path = FILES / "outline.pdf"
    if not outline:
        path = tmp_path / "outline.pdf"
        copy = pypdfium2.PdfDocument.new()
        copy.import_pages(pypdfium2.PdfDocument(FILES / "outline.pdf"))
        copy.save(path)
    found = read(path)
    assert facts(found) == [
        (f"outline.pdf#page={page}", title, text) for page, title, text in GUIDE
    ]
    assert [document.metadata["page"] for document in found.documents] == [1, 1, 2, 2, 3, 3]


def test_columns_of_a_pdf_are_read_one_after_the_other() -> None:
    found = read(FILES / "columns.pdf")
    text = "".join(found.texts).replace("\n", "")
    assert text == "".join(f"第{number}句话说明怎样护理病人。" for number in range(1, 80))


@pytest.mark.parametrize(
    ("name", "code"), [("scan.pdf", "needs_ocr"), ("encrypted.pdf", "encrypted")]
)
def test_a_pdf_without_text_is_an_error_that_says_what_to_do(name: str, code: str) -> None:
    with raises(CorpusError, code, path=FILES / name):
        read(FILES / name)


def test_a_scanned_page_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mixed.pdf"
    mixed = pypdfium2.PdfDocument.new()
    mixed.import_pages(pypdfium2.PdfDocument(FILES / "scan.pdf"))
    mixed.import_pages(pypdfium2.PdfDocument(FILES / "columns.pdf"))
    mixed.save(path)
    found = read(path)
    assert {document.metadata["page"] for document in found.documents} == {2}
    assert list(found.rejects) == [f"{path} page 1"]


def test_one_bad_file_of_a_folder_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes((FILES / "scan.pdf").read_bytes())
    (tmp_path / "a.txt").write_text("甲")
    (tmp_path / ".hidden.txt").write_text("乙")
    (tmp_path / "~$lock.docx").write_text("丙")
    found = read(tmp_path)
    assert found.documents == [Document("a.txt#1", "甲", "a", {"source": "a.txt"})]
    assert list(found.rejects) == [str(tmp_path / "scan.pdf")]


# LibreOffice 7.4 wrote these files, from a page with headings and a table and from a CSV file.
@pytest.mark.parametrize("name", ["libreoffice.docx", "libreoffice.pdf"])
def test_documents_of_an_office_program_keep_headings_tables_and_pages(name: str) -> None:
    found = read(FILES / name)
    guide = "高血压防治指南"
    assert found.titles == [guide, f"{guide} › 饮食", f"{guide} › 运动"]
    assert "每天食盐不超过五克" in found.texts[1] and "缬沙坦 | 80 mg 每日一次" in found.texts[1]
    assert found.texts[2].endswith("如快走、游泳、骑车。")
    pages = [document.metadata.get("page") for document in found.documents]
    assert pages == [1 if name.endswith(".pdf") else None] * 3


def test_a_table_of_an_office_program_keeps_ids_titles_and_metadata() -> None:
    found = read(FILES / "libreoffice.xlsx")
    assert (found.ids, found.titles) == (["1", "2"], ["发热", "失眠"])
    assert found.documents[0].text == "儿童发热三十八度五以上可以口服退热药。"
    assert found.documents[1].metadata == {"科室": "神经内科"}
