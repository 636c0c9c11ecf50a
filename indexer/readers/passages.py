"""Cuts the sections of documents into passages that encoders can read as a whole."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from core.sentences import sentence_ends
from indexer import limits
from indexer.readers.source import Item

# Longest passage if it can be cut at the ends of paragraphs, rows or sentences [characters]: less
# than the 512 tokens that small encoders read.
PASSAGE_CHARS = 600
# Characters without spaces between them: ideographs and full-width punctuation.
CHINESE = "\u3000-\u303f\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
_BETWEEN = " › "


@dataclass(slots=True)
class Section:
    """A part of a document below one heading, or a page."""

    title: str  # path of headings
    blocks: list[str] = field(default_factory=list)  # paragraphs, and tables with a row per line
    anchor: str = ""  # part of an address after "#"; empty for the number of the section
    metadata: dict[str, Any] = field(default_factory=dict)


def title_path(headings: Iterable[str]) -> str:
    """Returns the title of a section from its headings, the outermost first."""
    path = _BETWEEN.join(filter(None, headings))
    return path if len(path) <= limits.MAX_TITLE_CHARS else path[-limits.MAX_TITLE_CHARS :]


def passages(name: str, sections: Iterable[Section]) -> Iterator[Item]:
    """Yields the records of a document; the number of each is that of its section.

    The id of a passage is `name#anchor`, with `/2` for the second one of a section.
    """
    used: Counter[str] = Counter()
    for number, section in enumerate(sections, start=1):
        anchor = section.anchor or str(number)
        used[anchor] += 1
        if used[anchor] > 1:
            anchor = f"{anchor}~{used[anchor]}"
        for part, text in enumerate(pack(section.blocks), start=1):
            yield (
                number,
                {
                    "_id": f"{name}#{anchor}" + (f"/{part}" if part > 1 else ""),
                    "title": section.title,
                    "text": text,
                    "metadata": {"source": name, **section.metadata},
                },
            )


def pack(blocks: Iterable[str]) -> Iterator[str]:
    """Packs blocks into texts of up to `PASSAGE_CHARS` characters; a long block is cut."""
    packed: list[str] = []
    size = 0
    for piece in (piece for block in blocks for piece in _pieces(block)):
        if packed and size + len(piece) > PASSAGE_CHARS:
            yield "\n".join(packed)
            packed, size = [], 0
        packed.append(piece)
        size += len(piece) + 1
    if packed:
        yield "\n".join(packed)


def _pieces(block: str) -> Iterator[str]:
    """Cuts a long block after sentences or lines, or anywhere in a longer sentence."""
    block = block.strip()
    start = end = 0
    for stop in [*sentence_ends(block), len(block)]:
        if stop - start > PASSAGE_CHARS and end > start:
            yield block[start:end].strip()
            start = end
        while stop - start > 2 * PASSAGE_CHARS:
            yield block[start : start + PASSAGE_CHARS].strip()
            start += PASSAGE_CHARS
        end = stop
    if rest := block[start:].strip():
        yield rest
