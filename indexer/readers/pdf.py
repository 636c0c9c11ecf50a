"""PDF: text by pages, without headers and footers; with OCR also that of scanned pages.

Titles are the entries of the outline or, without one, lines in larger letters.
"""

import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any

from indexer import limits
from indexer.readers.heads import drop_heads
from indexer.readers.layout import (
    CELL_GAP,
    CELLS,
    LATIN_GAP,
    Line,
    columns,
    join_pieces,
    joined,
    paragraphs,
)
from indexer.readers.ocr import images, recognize
from indexer.readers.passages import Section, passages, title_path
from indexer.readers.source import Item, Report, Source, UnreadableError

# A page with fewer characters on an image of at least this part of it is a scan with a stamp.
_FEW_CHARS, _SCANNED = 40, 0.5
# Part of the height of a page, at its top and bottom, where headers and footers are.
_OUTER = 0.12
# A heading is this much higher than most lines, and short; few lines are headings.
_HEADING, _HEADING_CHARS, _MOST_HEADINGS = 1.25, 40, 0.2
_BULLETS = tuple("·•●■▪-–—*")
_SENTENCE_END = tuple("。！？；，,.;|")
# Characters without meaning, which fonts without a map to Unicode give.
_PRIVATE = re.compile("[\ue000-\uf8ff\ufffd\ufffe\uffff\0]")
_MOST_PRIVATE = 0.2
# Line ends, and the mark of a hyphenated one.
_BREAKS = {0, 0x0A, 0x0D, 0x02, 0xFFFE}


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
    pages: list[list[Line]] = []
    rejects: list[Item] = []
    recognized: set[int] = set()
    has_garbled = False
    for number in range(1, count + 1):
        page = document[number - 1]
        lines = _lines(page, _pieces(page))
        garbled = _is_garbled(lines)
        has_garbled = has_garbled or garbled
        if source.ocr and (garbled or _is_scan(page, lines)):
            source.more_time()
            try:
                lines = _lines(page, recognize(page))
                recognized.add(number)
            except UnreadableError as error:
                rejects.append((number, f"page {number} {error}"))
                lines = []
        elif garbled:
            reason = f"the fonts of page {number} do not say what its characters are: {_use_ocr()}"
            rejects.append((number, reason))
            lines = []
        elif not lines and _has_images(page):
            rejects.append((number, f"page {number} {_no_text()}"))
        pages.append(lines)
    if not any(pages):
        if source.ocr and not rejects:
            raise UnreadableError("has no page on which OCR finds text")
        if not source.ocr and not has_garbled:
            raise UnreadableError(_no_text(), "needs_ocr")
        yield from rejects
        return
    larger = _larger(pages)
    outline = _outline(document) or _headings(pages, larger)
    titles = [(page, title) for page, entries in outline.items() for _, title in entries]
    top = PurePosixPath(source.name).stem
    path: list[tuple[int, str]] = []
    sections: list[Section] = []
    for number, lines in enumerate(drop_heads(pages, larger, titles), start=1):
        entries = outline.get(number, [])
        metadata = {"page": number} | ({"ocr": True} if number in recognized else {})
        section = Section(title_path(t for _, t in path) or top, [], f"page={number}")
        found: list[Line] = []
        for line in lines:
            heading = _condensed(line.text)
            at = next((i for i, (_, t) in enumerate(entries) if _condensed(t) == heading), None)
            if at is not None:
                _close(sections, section, found, metadata)
                for level, title in entries[: at + 1]:
                    path = [*((depth, t) for depth, t in path if depth < level), (level, title)]
                entries = entries[at + 1 :]
                section = Section(title_path(t for _, t in path), [], f"page={number}")
                found = []
            else:
                found.append(line)
        # Entries whose headings are not found as a line begin at the next page.
        _close(sections, section, found, metadata)
        for level, title in entries:
            path = [*((depth, t) for depth, t in path if depth < level), (level, title)]
    yield from rejects
    for number, record in passages(source.name, sections):
        page = record["metadata"]["page"] if isinstance(record, dict) else number
        yield page, record


def _close(
    sections: list[Section], section: Section, lines: list[Line], metadata: dict[str, Any]
) -> None:
    section.blocks = list(paragraphs(lines))
    section.metadata = metadata
    if section.blocks:
        sections.append(section)


def _lines(page: Any, pieces: list[Line]) -> list[Line]:
    """Returns the lines of a page from top to bottom, one column after the other."""
    ordered: list[Line] = []
    height = page.get_height()
    for column in columns(pieces, page.get_width()):
        lines = join_pieces(column)
        edge = max((line.right for line in lines), default=0.0)
        for line in lines:
            line.edge = edge
            if line.bottom > (1 - _OUTER) * height:
                line.outer = max(height - line.top, 0.01)
            elif line.top < _OUTER * height:
                line.outer = -max(line.bottom, 0.01)
        ordered += lines
    return ordered


def _pieces(page: Any) -> list[Line]:
    """Returns the runs of characters without a wide gap, in the order of the file."""
    from pypdfium2.raw import FPDFText_GetUnicode, FPDFText_IsGenerated

    text = page.get_textpage()
    pieces: list[Line] = []
    is_space = False  # whether the library sees a space between two words
    for index in range(text.count_chars()):
        code = FPDFText_GetUnicode(text, index)
        if FPDFText_IsGenerated(text, index) == 1:
            is_space = chr(code) == " "
            continue
        after_space, is_space = is_space, False
        if code in _BREAKS:
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
            if shared > 0.5 * min(last.height, top - bottom) and -height < gap < CELL_GAP * height:
                share = gap / height
                if after_space and last.text[-1].isascii() and chr(code).isascii():
                    share = max(share, LATIN_GAP)  # justified lines have narrow spaces
                last.text = joined(last.text, chr(code), share)
                last.right = max(last.right, right)
                last.bottom, last.top = min(last.bottom, bottom), max(last.top, top)
                continue
        pieces.append(Line(chr(code), left, bottom, right, top))
    for piece in pieces:
        # Characters beyond 16 bits come in halves; white space can be doubled.
        whole = piece.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        piece.text = " ".join(whole.split())
    return [piece for piece in pieces if piece.text]


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


def _larger(pages: list[list[Line]]) -> set[int]:
    """Returns the sizes that are larger than that of most characters, if few lines have them."""
    sizes: Counter[int] = Counter()
    for line in (line for lines in pages for line in lines):
        sizes[line.size] += len(line.text)
    body = sizes.most_common(1)[0][0]
    larger = {size for size in sizes if size >= _HEADING * body}
    few = sum(sizes[size] for size in larger) <= _MOST_HEADINGS * sizes.total()
    return larger if few else set()


def _headings(pages: list[list[Line]], larger: set[int]) -> dict[int, list[tuple[int, str]]]:
    """Returns short lines in larger letters as an outline."""
    levels = {size: level for level, size in enumerate(sorted(larger, reverse=True))}
    return {
        number: [
            (levels[line.size], line.text)
            for line in lines
            if line.size in levels
            and len(line.text) <= _HEADING_CHARS
            and not line.text.startswith(_BULLETS)
            and not line.text.endswith(_SENTENCE_END)
        ]
        for number, lines in enumerate(pages, start=1)
    }


def _condensed(text: str) -> str:
    """Returns a heading without white space and without its number, which an outline can lack."""
    text = "".join(text.replace(CELLS, "").split())
    return re.sub(r"^[\d.．、]+(?=.)", "", text)


def _use_ocr() -> str:
    """Returns what to do so that pages without text are read."""
    if find_spec("rapidocr"):
        return "use --ocr"
    return "pip install 'care-retrieval[files,ocr]', then use --ocr"


def _no_text() -> str:
    return f"has no text, as scanned pages have: {_use_ocr()}"


def _is_garbled(lines: list[Line]) -> bool:
    """Returns whether the fonts of a page do not say what its characters are."""
    text = "".join(line.text for line in lines)
    return len(_PRIVATE.findall(text)) > _MOST_PRIVATE * len(text)


def _is_scan(page: Any, lines: list[Line]) -> bool:
    """Returns whether a page is an image, perhaps with a line of text that a scanner has added."""
    if not lines:
        return next(page.get_objects(max_depth=2), None) is not None
    if sum(len(line.text) for line in lines) >= _FEW_CHARS:
        return False
    least = _SCANNED * page.get_width() * page.get_height()
    return any(
        (right - left) * (top - bottom) > least
        for left, bottom, right, top in (image.get_bounds() for image in images(page))
    )


def _has_images(page: Any) -> bool:
    return next(images(page), None) is not None
