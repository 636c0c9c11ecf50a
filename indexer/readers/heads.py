"""Headers and footers of a PDF: what is at the same place of most pages, also if its text varies.

The text of a running head changes with the chapter. So a line is one if it is apart from the text
and at a place where most pages have a line that repeats, names a heading or numbers the page.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from indexer.readers.layout import CELLS, Line

# Share of the pages with text that have the same line, but for numbers.
_REPEATED = 0.6
# Share of the pages with a line at a place, and share of those lines that must be known.
_PLACED, _KNOWN = 0.5, 0.7
_MIN_PAGES = 3
# Distance of a running head from the text, by its height and by the usual distance of lines.
_APART, _APART_FROM_LINES = 0.8, 1.5
# That of a line that has the page for itself.
_ALONE = 10_000.0
_NUMBERS = r"\d〇一二三四五六七八九十"


def drop_heads(
    pages: Sequence[list[Line]], larger: Iterable[int], titles: Iterable[tuple[int, str]]
) -> list[list[Line]]:
    """Returns the lines of the pages, which are from top to bottom, without headers and footers.

    `larger` are sizes of lines that are headings, as those of chapters and slides; `titles` numbers
    of pages, from 1, and titles of the outline that begin there.
    """
    with_text = sum(map(bool, pages))
    if with_text < _MIN_PAGES:
        return list(pages)
    sizes = set(larger)
    outer = [
        (number, line)
        for number, lines in enumerate(pages)
        for line in lines
        if line.outer and line.size not in sizes
    ]
    counts = Counter(key for _, key in {(number, _key(line.text)) for number, line in outer})
    repeated = {key for key, count in counts.items() if count >= _REPEATED * with_text}
    heads = {
        id(line) for lines in pages for line in lines if line.outer and _key(line.text) in repeated
    }
    # The first page on which a heading is.
    first: dict[str, int] = {}
    for number, title in (
        *((page - 1, title) for page, title in titles),
        *((n, line.text) for n, lines in enumerate(pages) for line in lines if line.size in sizes),
    ):
        core = _core(title)
        first[core] = min(number, first.get(core, number))
    spacing = _spacing(pages)
    for place in _places(outer):
        if len({number for number, _ in place}) >= max(_PLACED * with_text, _MIN_PAGES):
            heads |= _heads_at(place, pages, first, spacing)
    return [[line for line in lines if id(line) not in heads] for lines in pages]


def _heads_at(
    place: list[tuple[int, Line]],
    pages: Sequence[list[Line]],
    first: Mapping[str, int],
    spacing: float,
) -> set[int]:
    """Returns which lines at a place are running heads, by `id`; none if too few are known."""
    gaps = [_gap(line, pages[number]) for number, line in place]
    gap = statistics.median(gaps)
    height = statistics.median(line.height for _, line in place)
    if gap < max(_APART * height, _APART_FROM_LINES * spacing):
        return set()
    cores = [[_core(cell) for cell in line.text.split(CELLS)] for _, line in place]
    pages_with = Counter(
        core for core, _ in {(c, n) for own, (n, _) in zip(cores, place, strict=True) for c in own}
    )
    offset = _page_offset(place)

    def is_known(number: int, line: Line, own: list[str]) -> bool:
        on_page = {_core(other.text) for other in pages[number] if other is not line}
        return any(
            not core or pages_with[core] > 1 or first.get(core, number) < number or core in on_page
            for core in own
        ) or (offset is not None and number + offset in _page_numbers(line))

    known = sum(
        is_known(number, line, own) for (number, line), own in zip(place, cores, strict=True)
    )
    if known < _KNOWN * len(place):
        return set()
    # A page without its head can have text there.
    return {id(line) for (_, line), own in zip(place, gaps, strict=True) if own > 0.5 * gap}


def _places(outer: Iterable[tuple[int, Line]]) -> Iterator[list[tuple[int, Line]]]:
    """Yields the lines that have nearly the same distance from the edge of their page."""
    place: list[tuple[int, Line]] = []
    for number, line in sorted(outer, key=lambda one: one[1].outer):
        if place and line.outer - place[0][1].outer > 0.5 * place[0][1].height:
            yield place
            place = []
        place.append((number, line))
    if place:
        yield place


def _gap(line: Line, lines: list[Line]) -> float:
    """Returns the distance of a header or footer from the next line further inside the page."""
    if line.outer > 0:
        gaps = [line.bottom - other.top for other in lines if other.middle < line.bottom]
    else:
        gaps = [other.bottom - line.top for other in lines if other.middle > line.top]
    return min(gaps, default=_ALONE)


def _spacing(pages: Iterable[list[Line]]) -> float:
    """Returns the usual distance between lines."""
    gaps = (
        before.bottom - line.top
        for lines in pages
        for before, line in pairwise(lines)
        if line.top < before.middle
    )
    return max(statistics.median(found) if (found := list(gaps)) else 0.0, 0.0)


def _page_offset(place: list[tuple[int, Line]]) -> int | None:
    """Returns the number printed on a page minus its position, if half of the lines have one."""
    offsets = Counter(shown - number for number, line in place for shown in _page_numbers(line))
    offset, count = max(offsets.items(), key=lambda one: one[1], default=(0, 0))
    return offset if 2 * count >= len(place) else None


def _page_numbers(line: Line) -> set[int]:
    cells = line.text.split(CELLS)
    return {int(cell) for cell in cells if cell.isdecimal() and len(cell) < 6}


def _key(text: str) -> str:
    """Returns what a header or footer has on all pages: its text without numbers."""
    return re.sub(f"[{_NUMBERS}]+", "#", text.replace(" ", ""))


def _core(text: str) -> str:
    """Returns the letters of a title; empty for the number of a page."""
    letters = re.sub(rf"[\W_{_NUMBERS}]+", "", text).casefold()
    return "" if re.fullmatch("[ivxlc]*", letters) else letters
