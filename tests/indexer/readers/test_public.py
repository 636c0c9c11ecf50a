"""Documents that others wrote, with what wrote them: see files/public/README.md."""

import re
import shutil
from pathlib import Path

from indexer.readers.fields import FieldNames
from tests.indexer.readers.reading import FILES, read

PUBLIC = FILES / "public"


def test_a_manual_as_pdf_keeps_titles_pages_and_words_without_its_varying_heads() -> None:
    """Its heads name chapter and section, in letters as large as those of the text."""
    found = read(PUBLIC / "debmake.pdf")
    first = {}
    for document in found.documents:
        first.setdefault(document.title, document.metadata["page"])
    society, tools = "Debian 的社会驱动力", "工具的配置"
    assert first == {
        society: 1,
        f"{society} › 技术提醒": 1,
        f"{society} › Debian 文档": 2,
        f"{society} › 帮助资源": 2,
        f"{society} › 仓库状况": 3,
        f"{society} › 贡献流程": 4,
        f"{society} › 新手贡献者和维护者": 5,
        tools: 6,
        f"{tools} › 电子邮件地址": 6,
        f"{tools} › mc": 6,
        f"{tools} › git": 7,
        f"{tools} › quilt": 7,
        f"{tools} › devscripts": 7,
        f"{tools} › sbuild": 8,
        f"{tools} › git-buildpackage": 9,
        f"{tools} › HTTP 代理": 9,
        f"{tools} › 私有 Debian 仓库": 10,
        f"{tools} › Virtual machines": 10,
        f"{tools} › Local network with virtual machines": 10,
    }
    text = "\n".join(found.texts)
    assert "CHAPTER" not in text
    assert not re.search(r"^\d+$", text, re.MULTILINE)
    # Body lines next to heads and footers: the first and the last of a page.
    assert "如今git命令已成为管理带历史的源码树的必要工具。" in text
    assert "Please make yourself ready to read the pertinent part" in text


def test_a_chapter_as_html_keeps_its_anchor_without_navigation() -> None:
    found = read(PUBLIC / "debmake.html")
    assert {document.metadata["anchor"] for document in found.documents} == {"overview"}
    assert set(found.titles) == {"Chapter 1. 概览"}
    text = "\n".join(found.texts)
    assert "$ tar -xvzf package-1.0.tar.gz" in text
    assert "Prev" not in text and "Next" not in text


def test_a_page_of_markdown_keeps_title_paths_and_tables() -> None:
    found = read(PUBLIC / "guidelines.markdown")
    assert "中文文案排版指北 › 空格 › 中英文之间需要增加空格" in found.titles
    tables = {document.id: document.text for document in found.documents}
    assert tables["guidelines.markdown#谁在这样做"].startswith(
        "网站 | 文案 | UGC\nApple 中国 | 是 | N/A\n"
    )


def test_questions_as_csv_in_gbk_have_titles_answers_and_departments() -> None:
    found = read(PUBLIC / "dialogue.csv")
    assert [report.encoding for report in found.reports] == ["GB18030"]
    assert len(found.documents) == 20
    document = found.documents[0]
    assert document.title == "高血压患者能吃党参吗？"
    assert document.text.startswith("高血压病人可以口服党参的。")
    assert document.metadata["department"] == "心血管科"
    assert {d.metadata["department"] for d in found.documents} >= {"内分泌科", "消化科", "神经科"}


def test_documents_of_word_keep_levels_tables_and_footnotes() -> None:
    found = read(PUBLIC / "swagger.docx")
    paths = [title.split(" › ") for title in found.titles]
    assert [path[1:] for path in paths[:4]] == [
        ["概览", "描述"],
        ["概览", "版本"],
        ["概览", "联系人"],
        ["概览", "许可证"],
    ]
    assert max(map(len, paths)) == 5 and paths[-1][1:] == ["关于文档"]
    parameters = next(d.text for d in found.documents if d.title.endswith("参数"))
    assert "参数类型 | 参数名 | 描述 | 数据类型\n" in parameters
    notes = read(PUBLIC / "notes.docx").texts
    assert "你好[1]" in notes[0] and "世界地图" in notes[0]


def test_a_workbook_gives_rows_of_all_sheets_with_dates() -> None:
    fields = FieldNames(text="字符串标题")
    found = read(PUBLIC / "demo.xlsx", fields)
    assert found.texts == [f"{sheet}字符串{n}" for sheet in ("", "表2") for n in range(10)]
    assert found.documents[0].metadata == {
        "sheet": "Sheet1",
        "日期标题": "2020-01-01T01:01:01",
        "数字标题": 1,
    }


def test_an_archive_gives_what_its_files_give(tmp_path: Path) -> None:
    names = ("debmake.pdf", "debmake.html", "guidelines.markdown", "dialogue.csv", "swagger.docx")
    (tmp_path / "in").mkdir()
    for name in names:
        shutil.copy(PUBLIC / name, tmp_path / "in")
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "in")
    found = read(archive)
    assert not found.rejects
    alone = [text for name in sorted(names) for text in read(PUBLIC / name).texts]
    assert sorted(found.texts) == sorted(alone)
