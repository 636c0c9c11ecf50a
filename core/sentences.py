"""Sentences of Chinese medical text: where they end, and their character offsets."""

import re
from collections.abc import Iterator

Span = tuple[int, int]

MAX_CHARS = 200

_CLOSING = r"\"'”’」』》〉）)】〕〗］\]｝}»"
# A full stop ends a sentence only before white space, so that "3.5 mg" is not split.
_END = re.compile(
    rf"(?:(?:[。！？；…!?;]|(?<!\.)\.++(?=[{_CLOSING}]*(?:\s|\Z)))+[{_CLOSING}]*)+\s*|\n\s*"
)
# "Vit. C", "e.g. …"
_ABBREVIATION = re.compile(
    r"(?<![A-Za-z])(?:vit|no|fig|tab|inj|cap|vs|dr|prof|st|mr|mrs|ms|cf|ca|approx|e\.g|i\.e)"
    r"\.[^\S\n]+\Z",
    re.IGNORECASE,
)
# "H. pylori" and "E. coli": the initial of a genus before its species.
_GENUS = re.compile(r"(?<![A-Za-z])[A-Z]\.[^\S\n]+\Z")
# "1. …", "(a). …"
_LIST_NUMBER = re.compile(r"[(（\[]?(?:\d{1,3}|[A-Za-z])[)）\]]?\.[^\S\n]+")
# A comma between digits separates thousands.
_COMMA = re.compile(r"[，、]|,(?!\d)")
_WORD = re.compile(r"\w")


def sentence_ends(text: str) -> Iterator[int]:
    """Yields the positions where sentences end, ascending.

    A sentence ends after its end mark, with closing quotes, closing brackets and white space, or
    after a line break. The end of the text is yielded only if the last sentence has an end mark.
    """
    return (match.end() for match in _END.finditer(text))


def sentences(text: str, max_chars: int = MAX_CHARS) -> list[Span]:
    """Returns the offsets [start, end) of the sentences of a text, ascending and disjoint.

    A sentence has at least one letter or digit, and neither starts nor ends with white space.
    Full stops of abbreviations and list numbers do not end it. A sentence of more than `max_chars`
    characters is cut after commas, or anywhere if it has none. All letters and digits of the text
    are in a sentence.
    """
    spans: list[Span] = []
    start = len(text) - len(text.lstrip())
    for end in [*sentence_ends(text), len(text)]:
        if end < len(text) and _continues(text, start, end):
            continue
        spans += _cut(text, start, end, max_chars)
        start = end
    return spans


def _continues(text: str, start: int, end: int) -> bool:
    """Whether the full stop before `end` belongs to an abbreviation or a list number."""
    if _LIST_NUMBER.fullmatch(text, start, end):
        return True
    tail = text[max(start, end - 16) : end]
    species = text[end].isascii() and text[end].islower()
    return bool(_ABBREVIATION.search(tail) or (species and _GENUS.search(tail)))


def _cut(text: str, start: int, end: int, max_chars: int) -> Iterator[Span]:
    """Yields the parts of a sentence, of at most `max_chars`, without white space."""
    while start < end:
        while start < end and text[start].isspace():
            start += 1
        limit = min(end, start + max_chars)
        if limit < end:
            commas = [match.end() for match in _COMMA.finditer(text, start, limit)]
            limit = commas[-1] if commas else limit
        part = text[start:limit].rstrip()
        if _WORD.search(part):
            yield start, start + len(part)
        start = limit
