"""HTML, and what is turned into it: Markdown and Word. Headings become titles."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import BytesIO
from pathlib import PurePosixPath

from indexer.readers.office import check_package
from indexer.readers.passages import CHINESE, Section, passages, title_path
from indexer.readers.source import Item, Report, Source
from indexer.readers.text import read_text, shown

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
# Never text of the page.
_SKIPPED = {
    "script",
    "style",
    "noscript",
    "template",
    "svg",
    "iframe",
    "object",
    "select",
    "button",
}
# Around the text of a page.
_FRAME = {"nav", "footer", "aside", "header"}
_FRAME_CLASSES = {"navbar", "navheader", "navfooter", "navigation", "breadcrumb", "breadcrumbs"}
_MAIN = {"main", "article"}
_VOID = {
    "br",
    "hr",
    "img",
    "input",
    "meta",
    "link",
    "wbr",
    "col",
    "source",
    "area",
    "base",
    "embed",
}
_INLINE = {
    *("a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i"),
    *("ins", "kbd", "label", "mark", "q", "ruby", "s", "samp", "small", "span", "strong", "sub"),
    *("sup", "time", "tt", "u", "var", "img", "wbr"),
}
# Elements that end where the next block begins.
_UNCLOSED = {"p", "li", "dt", "dd", "tr", "td", "th"}
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_SPACE = re.compile(r"\s+")
# A line end between Chinese characters is none of the text.
_WRAPPED = re.compile(rf"(?<=[{CHINESE}])[ \t]*\r?\n[ \t]*(?=[{CHINESE}])")
_CELLS = " | "


@dataclass(slots=True)
class _Block:
    text: str
    is_main: bool
    level: int = 0  # of a heading; 0 for a paragraph or table
    anchor: str = ""


@dataclass(slots=True)
class _Table:
    rows: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    cell: list[str] | None = None  # texts of the open cell

    def end_cell(self) -> None:
        if self.cell is not None:
            self.cells.append(" ".join(self.cell))
            self.cell = None

    def end_row(self) -> None:
        self.end_cell()
        if any(self.cells):
            self.rows.append(_CELLS.join(self.cells))
        self.cells = []


class _Blocks(HTMLParser):
    """Collects headings, paragraphs and tables; a table has a line per row."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[_Block] = []
        self.title = ""
        self._text: list[str] = []
        self._open: list[str] = []  # elements whose text is skipped, from the outermost
        self._main = 0
        self._pre = 0
        self._heading = ""
        self._anchor = ""
        self._in_title = False
        self._tables: list[_Table] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._open and self._open[0] in _UNCLOSED and tag not in _INLINE:
            self._open = []
        if self._open:
            if tag == self._open[0]:
                self._open.append(tag)
            return
        given = dict(attrs)
        hidden = "hidden" in given or _HIDDEN.search(given.get("style") or "")
        framed = (
            (tag in _FRAME and not (tag == "header" and self._main))
            or given.get("role") == "navigation"
            or not _FRAME_CLASSES.isdisjoint((given.get("class") or "").split())
        )
        if tag in _SKIPPED or ((framed or hidden) and tag not in _VOID):
            self._end_block()
            self._open.append(tag)
            return
        if tag == "title":
            self._in_title = True
        elif tag == "br":
            self._text.append("\n")
        elif tag not in _INLINE:
            self._end_block()
        if tag in _MAIN:
            self._main += 1
        elif tag == "pre":
            self._pre += 1
        elif tag == "li":
            self._text.append("- ")
        elif tag == "table":
            self._tables.append(_Table())
        elif self._tables and tag in ("tr", "td", "th"):
            self._tables[-1].end_row() if tag == "tr" else self._tables[-1].end_cell()
            self._tables[-1].cell = None if tag == "tr" else []
        elif tag in _HEADINGS:
            self._heading = tag
        if anchor := given.get("id") or (given.get("name") if tag == "a" else None):
            self._anchor = anchor

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            if tag == self._open[0]:
                self._open.pop()
            return
        if tag == "title":
            self._in_title = False
            return
        if tag not in _INLINE:
            self._end_block()
        if tag in _MAIN:
            self._main = max(self._main - 1, 0)
        elif tag == "pre":
            self._pre = max(self._pre - 1, 0)
        elif tag == self._heading:
            self._heading = ""
        elif self._tables:
            if tag in ("td", "th"):
                self._tables[-1].end_cell()
            elif tag == "tr":
                self._tables[-1].end_row()
            elif tag == "table":
                self._end_table()

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._open:
            self._text.append(data if self._pre else _SPACE.sub(" ", _WRAPPED.sub("", data)))

    def _end_block(self) -> None:
        text = "".join(self._text)
        self._text = []
        lines = (line.rstrip() if self._pre else line.strip() for line in text.split("\n"))
        text = "\n".join(line for line in lines if line.strip())
        if text.strip("- \n"):
            self._add(text)

    def _end_table(self) -> None:
        table = self._tables.pop()
        table.end_row()
        self._add("\n".join(table.rows))

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._tables:
            table = self._tables[-1]
            # A caption is in no cell.
            (table.rows if table.cell is None else table.cell).append(" ".join(text.split()))
            return
        level = _HEADINGS.get(self._heading, 0)
        anchor = self._anchor if level else ""
        if level:
            text, self._anchor = " ".join(text.split()), ""
        self.blocks.append(_Block(text, bool(self._main), level, anchor))

    def close(self) -> None:
        super().close()
        self._end_block()
        while self._tables:
            self._end_table()


def html_sections(html: str, name: str) -> list[Section]:
    """Returns the sections of a page: those of its main part, if it has one.

    The title of a section is the path of its headings; without any it is that of the page, or the
    name of the file.
    """
    page = _Blocks()
    page.feed(html)
    page.close()
    blocks = page.blocks
    if any(block.is_main and not block.level for block in blocks):
        blocks = [block for block in blocks if block.is_main]
    top = " ".join(page.title.split()) or PurePosixPath(name).stem
    path: list[tuple[int, str]] = []
    sections = [Section(top)]
    for block in blocks:
        if not block.level:
            sections[-1].blocks.append(block.text)
            continue
        path = [(level, title) for level, title in path if level < block.level]
        path.append((block.level, block.text))
        metadata = {"anchor": block.anchor} if block.anchor else {}
        title = title_path(title for _, title in path)
        sections.append(Section(title, anchor=block.anchor, metadata=metadata))
    return [section for section in sections if section.blocks]


def read_html(source: Source) -> Iterator[Item]:
    text, encoding = read_text(source, html=True)
    source.report(Report(source.name, "HTML", shown(encoding)))
    yield from passages(source.name, html_sections(text, source.name))


def read_markdown(source: Source) -> Iterator[Item]:
    """Reads Markdown with tables; raw HTML in it is read as text of the page."""
    from markdown_it import MarkdownIt

    text, encoding = read_text(source)
    source.report(Report(source.name, "Markdown", shown(encoding)))
    # Front matter of site generators is no text of the page.
    text = re.sub(r"\A---\r?\n.*?\r?\n---\r?\n", "", text, count=1, flags=re.DOTALL)
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    sections = html_sections(parser.render(text), source.name)
    for section in sections:
        heading = section.title.rpartition(" › ")[2]
        section.anchor = section.metadata["anchor"] = section.anchor or _slug(heading)
    yield from passages(source.name, sections)


def _slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading of Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def read_word(source: Source) -> Iterator[Item]:
    """Reads .docx: headings, paragraphs, lists and tables; no images, macros or linked files."""
    import mammoth

    check_package(source.stream)
    source.report(Report(source.name, "Word"))
    levels = {"Title": 1, "标题": 1}
    for level in range(1, 6):  # below the title
        levels |= {f"{name} {level}": level + 1 for name in ("heading", "Heading", "标题")}
    styles = "\n".join(f"p[style-name='{name}'] => h{n}:fresh" for name, n in levels.items())
    source.stream.seek(0)
    converted = mammoth.convert_to_html(
        BytesIO(source.stream.read()),  # the library would take the name of a member of an archive
        style_map=styles,
        include_embedded_style_map=False,
        convert_image=lambda _: [],
        external_file_access=False,
    )
    sections = html_sections(converted.value, source.name)
    for section in sections:
        # Bookmarks that the library numbers are no addresses.
        section.anchor, section.metadata = "", {}
    yield from passages(source.name, sections)
