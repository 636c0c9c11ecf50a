"""PDF: text by pages, without repeated headers and footers.

Titles are the entries of the outline or, without one, lines in larger letters.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from indexer import limits
from indexer.readers.passages import CHINESE, Section, passages, title_path
from indexer.readers.source import Item, Report, Source, UnreadableError

_OCR = "has no text, as scanned pages have: recognize it first (OCR), for example with ocrmypdf"
# A line in the outer part of a page is a header or footer if this share of the pages has it.
_REPEATED = 0.6
_OUTER = 0.12
_MIN_PAGES = 3
# Gaps between words, between Chinese words, and between the cells of a row, by the line's height.
_WORD_GAP, _CHINESE_GAP, _CELL_GAP = 0.2, 0.35, 0.7
# A heading is this much higher than most lines, and short; few lines are headings.
_HEADING, _HEADING_CHARS, _MOST_HEADINGS = 1.25, 40, 0.2
_SENTENCE_END = tuple("。！？；，,.;|")
# Characters without meaning, which fonts without a map to Unicode give.
_PRIVATE = re.compile("[\ue000-\uf8ff\ufffd\ufffe\uffff\0]")
_MOST_PRIVATE = 0.2
# Line ends, and the mark of a hyphenated one.
_BREAKS = {0, 0x0A, 0x0D, 0x02, 0xFFFE}
_CHINESE = re.compile(f"[{CHINESE}]")


@dataclass(slots=True)
class _Line:
    text: str
    left: float
    bottom: float
    right: float
    top: float
    edge: float = 0.0  # right end of the longest line of its column
    is_outer: bool = False  # whether it is where headers and footers are

    @property
    def height(self) -> float:
        return self.top - self.bottom

    @property
    def key(self) -> str:
        """What a header or footer has on all pages: its text without numbers."""
        return re.sub(r"[\d〇一二三四五六七八九十]+", "#", self.text.replace(" ", ""))


def read_pdf(source: Source) -> Iterator[Item]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(source.stream)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableError(
                "is encrypted: save it again without a password", "encrypted"
            ) from error
        raise UnreadableError(f"is damaged, or no PDF: {error}") from error
    if (count := len(document)) > limits.MAX_PAGES:
        raise UnreadableError(
            f"has {count} pages; the limit is {limits.MAX_PAGES}: split it", "file_too_large"
        )
    source.report(Report(source.name, "PDF"))
    pages = [_lines(document[number]) for number in range(count)]
    if not any(pages):
        raise UnreadableError(_OCR, "needs_ocr")
    larger = _larger(pages)
    repeated = _repeated(pages, larger)
    outline = _outline(document) or _headings(pages, larger)
    top = PurePosixPath(source.name).stem
    path: list[tuple[int, str]] = []
    sections: list[Section] = []
    rejects: list[Item] = []
    for number, lines in enumerate(pages, start=1):
        texts = "".join(line.text for line in lines)
        if not lines and _has_images(document[number - 1]):
            rejects.append((number, f"page {number} {_OCR}"))
        elif len(_PRIVATE.findall(texts)) > _MOST_PRIVATE * len(texts):
            rejects.append(
                (number, f"the fonts of page {number} do not say what its characters are: use OCR")
            )
            continue
        entries = outline.get(number, [])
        section = Section(title_path(t for _, t in path) or top, [], f"page={number}")
        body = [line for line in lines if not (line.is_outer and line.key in repeated)]
        found: list[_Line] = []
        for line in body:
            heading = _condensed(line.text)
            at = next((i for i, (_, t) in enumerate(entries) if _condensed(t) == heading), None)
            if at is not None:
                _close(sections, section, found, number)
                for level, title in entries[: at + 1]:
                    path = [*((depth, t) for depth, t in path if depth < level), (level, title)]
                entries = entries[at + 1 :]
                section = Section(title_path(t for _, t in path), [], f"page={number}")
                found = []
            else:
                found.append(line)
        # Entries whose headings are not found as a line begin at the next page.
        _close(sections, section, found, number)
        for level, title in entries:
            path = [*((depth, t) for depth, t in path if depth < level), (level, title)]
    yield from rejects
    for number, record in passages(source.name, sections):
        page = record["metadata"]["page"] if isinstance(record, dict) else number
        yield page, record


def _close(sections: list[Section], section: Section, lines: list[_Line], page: int) -> None:
    section.blocks = list(_paragraphs(lines))
    section.metadata = {"page": page}
    if section.blocks:
        sections.append(section)


def _lines(page: Any) -> list[_Line]:
    """Returns the lines of a page from top to bottom, one column after the other."""
    ordered: list[_Line] = []
    height = page.get_height()
    for column in _columns(_pieces(page), page.get_width()):
        lines = _join_pieces(column)
        edge = max((line.right for line in lines), default=0.0)
        for line in lines:
            line.edge = edge
            line.is_outer = line.bottom > (1 - _OUTER) * height or line.top < _OUTER * height
        ordered += lines
    return ordered


def _pieces(page: Any) -> list[_Line]:
    """Returns the runs of characters without a wide gap, in the order of the file."""
    from pypdfium2.raw import FPDFText_GetUnicode, FPDFText_IsGenerated

    text = page.get_textpage()
    pieces: list[_Line] = []
    for index in range(text.count_chars()):
        code = FPDFText_GetUnicode(text, index)
        if code in _BREAKS or FPDFText_IsGenerated(text, index) == 1:
            continue
        # The box of the font, not of the glyph: a full stop is as high as its line.
        left, bottom, right, top = text.get_charbox(index, loose=True)
        if right <= left or top <= bottom:
            continue
        if pieces:
            last = pieces[-1]
            height = max(last.height, top - bottom)
            shared = min(last.top, top) - max(last.bottom, bottom)
            gap = left - last.right
            if shared > 0.5 * min(last.height, top - bottom) and -height < gap < _CELL_GAP * height:
                last.text = _joined(last.text, chr(code), gap / height)
                last.right = max(last.right, right)
                last.bottom, last.top = min(last.bottom, bottom), max(last.top, top)
                continue
        pieces.append(_Line(chr(code), left, bottom, right, top))
    for piece in pieces:
        # Characters beyond 16 bits come in halves; white space can be doubled.
        whole = piece.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        piece.text = " ".join(whole.split())
    return [piece for piece in pieces if piece.text]


def _columns(pieces: list[_Line], width: float) -> list[list[_Line]]:
    """Splits the pieces of a page with two columns of text into zones and their columns.

    Pieces across the gutter (titles, wide figures) separate zones. A table has a gutter as well,
    but its cells do not fill their half of the page.
    """
    for gutter in (width * share / 100 for share in range(44, 57)):
        left = [piece for piece in pieces if piece.right < gutter]
        right = [piece for piece in pieces if piece.left > gutter]
        across = len(pieces) - len(left) - len(right)
        if min(len(left), len(right)) < 6 or across > 0.2 * len(pieces):
            continue
        halves = (
            statistics.median(piece.right - piece.left for piece in half)
            / (max(piece.right for piece in half) - min(piece.left for piece in half))
            for half in (left, right)
        )
        if min(halves) > 0.7:
            break
    else:
        return [pieces]
    zones: list[list[_Line]] = []
    sides: tuple[list[_Line], list[_Line]] = ([], [])
    for piece in sorted(pieces, key=lambda piece: -piece.top):
        if piece.right < gutter:
            sides[0].append(piece)
        elif piece.left > gutter:
            sides[1].append(piece)
        else:
            zones += [*sides, [piece]]
            sides = ([], [])
    return [zone for zone in (*zones, *sides) if zone]


def _join_pieces(pieces: list[_Line]) -> list[_Line]:
    """Joins the pieces on one line, from left to right; wide gaps are those of a table."""
    lines: list[list[_Line]] = []
    for piece in sorted(pieces, key=lambda piece: -(piece.top + piece.bottom)):
        if lines:
            last = lines[-1][0]
            shared = min(last.top, piece.top) - max(last.bottom, piece.bottom)
            if shared > 0.5 * min(last.height, piece.height):
                lines[-1].append(piece)
                continue
        lines.append([piece])
    joined = []
    for line in lines:
        line.sort(key=lambda piece: piece.left)
        text = line[0].text
        for before, piece in pairwise(line):
            gap = piece.left - before.right
            height = max(before.height, piece.height)
            text = _joined(text, piece.text, gap / height)
        joined.append(
            _Line(
                text,
                line[0].left,
                min(piece.bottom for piece in line),
                max(piece.right for piece in line),
                max(piece.top for piece in line),
            )
        )
    return joined


def _joined(text: str, more: str, gap: float) -> str:
    """Returns two parts of a line as one; `gap` is that between them by the height of the line."""
    if gap > _CELL_GAP:
        return f"{text} | {more}"
    is_word = gap > (_CHINESE_GAP if _CHINESE.search(text[-1] + more[0]) else _WORD_GAP)
    return f"{text} {more}" if is_word else text + more


def _continued(text: str, more: str) -> str:
    """Returns two lines of a paragraph as one; Chinese has no space between them."""
    if not text or _CHINESE.search(text[-1] + more[0]):
        return text + more
    if text.endswith("-") and text[-2:-1].isalpha() and more[0].islower():
        return text[:-1] + more
    return f"{text} {more}"


def _paragraphs(lines: list[_Line]) -> Iterator[str]:
    """Joins lines into paragraphs, which short lines end and indented or distant lines begin."""
    text = ""
    before: _Line | None = None
    for line in lines:
        if before is not None:
            height = max(before.height, line.height)
            is_new = (
                before.right < before.edge - 2.5 * height
                or " | " in line.text
                or " | " in before.text
                or before.left + 1.2 * height < line.left < before.edge
                or before.bottom - line.top > 1.2 * height
                or abs(before.height - line.height) > 0.3 * height
            )
            if is_new:
                yield text
                text = ""
        text = _continued(text, line.text)
        before = line
    if text:
        yield text


def _repeated(pages: list[list[_Line]], larger: set[int]) -> set[str]:
    """Returns the headers and footers: outer lines that most pages have, but for numbers.

    Lines in larger letters are headings, as those of chapters and slides.
    """
    with_text = [lines for lines in pages if lines]
    if len(with_text) < _MIN_PAGES:
        return set()
    counts = Counter(
        key
        for lines in with_text
        for key in {line.key for line in lines if line.is_outer and _size(line) not in larger}
    )
    return {key for key, count in counts.items() if count >= _REPEATED * len(with_text)}


def _outline(document: Any) -> dict[int, list[tuple[int, str]]]:
    """Returns the entries of the outline, level and title, by the number of their page."""
    entries: dict[int, list[tuple[int, str]]] = {}
    for entry in document.get_toc(max_depth=6):
        target = entry.get_dest()
        page = target.get_index() if target else None
        title = " ".join((entry.get_title() or "").split())
        if page is not None and title:
            entries.setdefault(page + 1, []).append((entry.level, title))
    return entries


def _larger(pages: list[list[_Line]]) -> set[int]:
    """Returns the sizes that are larger than that of most characters, if few lines have them."""
    sizes: Counter[int] = Counter()
    for line in (line for lines in pages for line in lines):
        sizes[_size(line)] += len(line.text)
    body = sizes.most_common(1)[0][0]
    larger = {size for size in sizes if size >= _HEADING * body}
    few = sum(sizes[size] for size in larger) <= _MOST_HEADINGS * sizes.total()
    return larger if few else set()


def _headings(pages: list[list[_Line]], larger: set[int]) -> dict[int, list[tuple[int, str]]]:
    """Returns short lines in larger letters as an outline."""
    levels = {size: level for level, size in enumerate(sorted(larger, reverse=True))}
    return {
        number: [
            (levels[_size(line)], line.text)
            for line in lines
            if _size(line) in levels
            and len(line.text) <= _HEADING_CHARS
            and not line.text.endswith(_SENTENCE_END)
        ]
        for number, lines in enumerate(pages, start=1)
    }


def _size(line: _Line) -> int:
    return round(2 * line.height)


def _condensed(text: str) -> str:
    return "".join(text.split())


def _has_images(page: Any) -> bool:
    from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE

    return any(page.get_objects(filter=[FPDF_PAGEOBJ_IMAGE], max_depth=2))
