"""Lines of a page: pieces of text joined into lines, columns and paragraphs."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from indexer.readers.passages import CHINESE

# Gaps between words, between Chinese words, and between the cells of a row, by the line's height;
# and the width of a space.
_WORD_GAP, _CHINESE_GAP, CELL_GAP = 0.2, 0.35, 0.7
LATIN_GAP = 0.25
CELLS = " | "
# Least part of a page that one of two columns of text is wide.
_COLUMN = 0.25
_CHINESE = re.compile(f"[{CHINESE}]")


@dataclass(slots=True)
class Line:
    text: str
    left: float
    bottom: float
    right: float
    top: float
    edge: float = 0.0  # right end of the longest line of its column
    outer: float = 0.0  # distance from the nearer edge where heads are, negative at the bottom

    @property
    def height(self) -> float:
        return self.top - self.bottom

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2

    @property
    def size(self) -> int:
        """The height of its letters in half points."""
        return round(2 * self.height)


def columns(pieces: list[Line], width: float) -> list[list[Line]]:
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
        # A column of text fills its half of the page, and its lines fill the column.
        if all(
            (extent := max(piece.right for piece in half) - min(piece.left for piece in half))
            > _COLUMN * width
            and statistics.median(piece.right - piece.left for piece in half) > 0.7 * extent
            for half in (left, right)
        ):
            break
    else:
        return [pieces]
    zones: list[list[Line]] = []
    sides: tuple[list[Line], list[Line]] = ([], [])
    for piece in sorted(pieces, key=lambda piece: -piece.top):
        if piece.right < gutter:
            sides[0].append(piece)
        elif piece.left > gutter:
            sides[1].append(piece)
        else:
            zones += [*sides, [piece]]
            sides = ([], [])
    return [zone for zone in (*zones, *sides) if zone]


def join_pieces(pieces: list[Line]) -> list[Line]:
    """Joins the pieces on one line, from left to right; wide gaps are those of a table."""
    lines: list[list[Line]] = []
    for piece in sorted(pieces, key=lambda piece: -(piece.top + piece.bottom)):
        if lines:
            last = lines[-1][0]
            shared = min(last.top, piece.top) - max(last.bottom, piece.bottom)
            if shared > 0.5 * min(last.height, piece.height):
                lines[-1].append(piece)
                continue
        lines.append([piece])
    found = []
    for line in lines:
        line.sort(key=lambda piece: piece.left)
        text = line[0].text
        for before, piece in pairwise(line):
            gap = piece.left - before.right
            height = max(before.height, piece.height)
            text = joined(text, piece.text, gap / height)
        found.append(
            Line(
                text,
                line[0].left,
                min(piece.bottom for piece in line),
                max(piece.right for piece in line),
                max(piece.top for piece in line),
            )
        )
    return found


def joined(text: str, more: str, gap: float) -> str:
    """Returns two parts of a line as one; `gap` is that between them by the height of the line."""
    if gap > CELL_GAP:
        return text + CELLS + more
    is_word = gap > (_CHINESE_GAP if _CHINESE.search(text[-1] + more[0]) else _WORD_GAP)
    return f"{text} {more}" if is_word else text + more


def _continued(text: str, more: str) -> str:
    """Returns two lines of a paragraph as one; Chinese has no space between them."""
    if not text or _CHINESE.search(text[-1] + more[0]):
        return text + more
    if text.endswith("-") and text[-2:-1].isalpha() and more[0].islower():
        return text[:-1] + more
    return f"{text} {more}"


def paragraphs(lines: list[Line]) -> Iterator[str]:
    """Joins lines into paragraphs, which short lines end and indented or distant lines begin."""
    text = ""
    before: Line | None = None
    for line in lines:
        if before is not None:
            height = max(before.height, line.height)
            is_new = (
                before.right < before.edge - 2.5 * height
                or CELLS in line.text
                or CELLS in before.text
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
