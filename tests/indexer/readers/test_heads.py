"""Headers and footers of PDF files whose text varies, and text at the same places."""

from pathlib import Path

import pytest

from tests.indexer.readers.reading import read
from tests.indexer.readers.written_pdf import Text, write_pdf

_CHAPTERS = ("高血压", "糖尿病", "失眠", "发热")


def body(number: int, first: float = 760) -> list[Text]:
    """Returns lines of text that fill a page: each has other words."""
    return [
        (60, first - 16 * line, 11, f"甲{chr(0x4E00 + 60 * number + line)}，每天饮水，按时服药。")
        for line in range(42)
    ]


def text_of(path: Path) -> str:
    return "".join(read(path).texts).replace("\n", "")


def expected(pages: int) -> str:
    return "".join(text for number in range(pages) for *_, text in body(number))


@pytest.mark.parametrize("opening", [False, True])
def test_heads_that_vary_by_chapter_are_dropped_and_text_stays(
    tmp_path: Path, opening: bool
) -> None:
    """Books leave the head out where a chapter begins: each head then occurs once."""
    pages = []
    for number in range(8):
        chapter = f"第{number // 2 + 1}章{_CHAPTERS[number // 2]}"
        opens = opening and number % 2 == 0
        page = [*body(number, 700 if opens else 760), (290, 30, 9, f"{number + 1}")]
        if opens:
            page.insert(0, (60, 740, 20, chapter))
        else:
            page.insert(0, (60, 800, 9, chapter))
            page.insert(1, (480, 800, 9, f"手册{number + 1}"))
        pages.append(page)
    path = write_pdf(tmp_path / "book.pdf", pages)
    assert text_of(path) == expected(8)
    if opening:
        titles = dict.fromkeys(read(path).titles)
        assert list(titles) == [f"第{n}章{name}" for n, name in enumerate(_CHAPTERS, start=1)]


def test_a_page_without_its_head_keeps_its_text(tmp_path: Path) -> None:
    """The text of one page begins where other pages have their head."""
    heads = [(60, 800, 9, _CHAPTERS[number // 2]) for number in range(8)]
    pages = [[head, *body(number)] for number, head in enumerate(heads)]
    pages[5] = body(5, 800)
    assert text_of(write_pdf(tmp_path / "book.pdf", pages)) == expected(8)


def test_text_that_begins_each_page_stays(tmp_path: Path) -> None:
    pages = [body(number, 800) for number in range(6)]
    assert text_of(write_pdf(tmp_path / "text.pdf", pages)) == expected(6)


def test_rows_that_begin_each_page_of_a_table_stay(tmp_path: Path) -> None:
    """The cells of the first column repeat, as the names of departments do."""
    pages = [
        [
            text
            for row in range(40)
            for text in (
                (60.0, 800.0 - 18 * row, 11.0, "内科" if number % 2 else "外科"),
                (300.0, 800.0 - 18 * row, 11.0, f"药{chr(0x4E00 + 50 * number + row)}"),
            )
        ]
        for number in range(6)
    ]
    found = "\n".join(read(write_pdf(tmp_path / "table.pdf", pages)).texts)
    cells = [text for page in pages for *_, text in page]
    assert found.replace(" | ", "\n").split("\n") == cells


def test_numbered_questions_with_a_page_each_stay(tmp_path: Path) -> None:
    """Apart from the answer, and numbered as the pages are."""
    questions = ["感冒能运动吗", "头痛怎么办", "几天换药", "咳嗽多久就诊", "何时复查"]
    pages = [
        [(60, 800, 11, f"{number + 1}、{question}"), *body(number)]
        for number, question in enumerate(questions)
    ]
    text = text_of(write_pdf(tmp_path / "faq.pdf", pages))
    assert text == "".join(text for page in pages for *_, text in page)
