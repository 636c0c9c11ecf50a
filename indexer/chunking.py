"""Long documents to chunks: as many whole sentences as fit, each chunk with the title."""

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from core.encoders import Encoder, OffsetTokenizer
from core.errors import CareError
from core.manifest import Chunking
from core.text import document_text, normalize_text
from core.types import Document
from indexer.corpus import Reject

Span = tuple[int, int]

_CLOSING = r"\"'”’」』》〉）)】〕〗］\]｝}»"
# A full stop ends a sentence before white space alone: not in 3.5 mg.
_SENTENCE_END = re.compile(
    rf"(?:(?:[。！？；…!?;]|(?<!\.)\.++(?=[{_CLOSING}]*(?:\s|\Z)))+[{_CLOSING}]*)+\s*|\n\s*"
)
# A text apart can have fewer tokens than it had within the whole.
_SLACK = 8


class Chunker:
    """Cuts documents that are longer than a chunk may be.

    Raises:
        CareError: If the document encoder cannot count tokens or reads fewer than a chunk may have,
            or chunks would be nothing but overlap.
    """

    def __init__(self, encoder: Encoder, chunking: Chunking) -> None:
        try:
            if not isinstance(encoder, OffsetTokenizer):
                raise CareError(f"that of {encoder.spec.model} does not")
            # Some look for their tokenizer only now.
            encoder.token_offsets("")
        except CareError as error:
            message = f"chunks need a document encoder that shows its tokens: {error}"
            raise CareError(message, code="no_token_offsets") from error
        tokens, overlap = chunking.tokens, chunking.overlap
        model, most = encoder.spec.model, encoder.spec.max_length
        if tokens > most:
            message = f"chunks of {tokens} tokens are longer than the {most} that {model} reads"
            raise CareError(message, code="chunks_too_long", tokens=tokens, max_length=most)
        if overlap >= tokens:
            message = (
                f"an overlap of {overlap} tokens leaves no room for text in chunks of {tokens}"
            )
            raise CareError(message, code="overlap_too_long", tokens=tokens, overlap=overlap)
        self._tokenizer: OffsetTokenizer = encoder
        self._chunking = chunking

    def cut(self, document: Document) -> list[Document] | Reject:
        """Returns the chunks of a document in order; one that fits is its own only chunk."""
        text = document.text

        @cache
        def count(start: int, end: int) -> int:
            chunk = document_text(document.title, text[start:end])
            return len(self._tokenizer.token_offsets(chunk))

        if count(0, len(text)) <= self._chunking.tokens:
            return [replace(document, parent=document.id)]
        starts = token_starts(self._tokenizer.token_offsets(text))
        limit, overlap = self._chunking.tokens, self._chunking.overlap
        spans = chunk_spans(text, count, starts, limit=limit, overlap=overlap)
        if not spans:
            return Reject(f"beside its title no text fits into {limit} tokens")
        return [
            replace(
                document,
                id=f"{document.id}#{position}",
                text=text[start:end],
                parent=document.id,
                chunk=position,
                chunks=len(spans),
            )
            for position, (start, end) in enumerate(spans)
        ]


def cut(record: Document | Reject, chunker: Chunker | None) -> list[Document] | Reject:
    """Returns the chunks of a document or, without a chunker, itself alone; a reject as it is."""
    if isinstance(record, Reject):
        return record
    return chunker.cut(record) if chunker else [record]


def token_starts(offsets: Iterable[Span]) -> list[int]:
    """Returns where each token of a text begins, ascending; those of one character where it does.

    Tokens that stand for no part of the text are left out.
    """
    starts: list[int] = []
    reached = 0
    for start, end in offsets:
        if start < end:
            starts.append(start if start >= reached else starts[-1])
            reached = max(reached, end)
    return starts


def chunk_spans(
    text: str, count: Callable[[int, int], int], starts: Sequence[int], *, limit: int, overlap: int
) -> list[Span]:
    """Cuts a text with a visible character into chunks that fit; no character is left out.

    A chunk is as many whole sentences as fit. A sentence that does not fit alone is cut
    between tokens; the rest of it is followed by the next sentences. The last whole
    sentences of a chunk, up to `overlap` tokens, begin the next one as well, unless the
    sentence that follows would not fit behind them. No chunk begins with white space, an
    invisible character or a combining mark.

    What fits into `limit` tokens is decided by `count`: the tokens of a chunk that is this span of
    the text, with all that is read beside it. Where each token of the whole text begins, ascending,
    is in `starts`: with them chunks are estimated, so that few spans are counted.

    Returns:
        Start and end of each chunk, in order; none if not even one character fits.
    """
    whole = count(0, len(text))
    if whole <= limit:
        return [(0, len(text))]
    cutter = _Cutter(text, count, starts, limit, overlap, room=limit - whole + len(starts))
    spans: list[Span] = [(0, 0)]
    while spans[-1][1] < len(text):
        spans.append(cutter.after(*spans[-1]))
        if not spans[-1][1]:
            return []
    return spans[1:]


@dataclass
class _Cutter:
    """Finds one chunk after the other; see `chunk_spans`."""

    text: str
    count: Callable[[int, int], int]
    starts: Sequence[int]
    limit: int
    overlap: int
    room: int

    def __post_init__(self) -> None:
        self.first = _visible(self.text, 0)
        ends = (match.end() for match in _SENTENCE_END.finditer(self.text))
        self.sentence_ends = [*self._cuts(ends), len(self.text)]

    def after(self, start: int, end: int) -> Span:
        """Returns the chunk that follows the chunk [start, end); if none fits it ends at 0."""
        for begin in self._overlaps(start, end):
            if stop := self._whole_sentences(begin, end, self.room):
                return begin, stop
        stop = (
            self._whole_sentences(end, end, self.room)
            or self._whole_sentences(end, end, self.room + _SLACK)
            or self._tokens(end)
            or self._characters(end)
        )
        return end, stop

    def _overlaps(self, start: int, end: int) -> list[int]:
        """Returns where the sentences begin that may be repeated behind [start, end)."""
        ends, starts = self.sentence_ends, self.starts
        at = bisect_left(ends, end)
        if not self.overlap or ends[at] != end:
            return []
        earliest = bisect_left(starts, end) - self.overlap
        sentences = ends[bisect_right(ends, start) : at]
        return [begin for begin in sentences if bisect_left(starts, begin) >= earliest]

    def _whole_sentences(self, begin: int, past: int, room: int) -> int:
        """Returns the last sentence end beyond `past` that fits, or 0."""
        ends = self.sentence_ends
        low, high = bisect_right(ends, past), bisect_right(ends, self._reach(begin, room))
        return self._last_that_fits(begin, ends[low:high])

    def _tokens(self, begin: int) -> int:
        """Returns the last end of a token that fits, or 0."""
        first = bisect_right(self.starts, begin)
        last = bisect_right(self.starts, self._reach(begin, self.room))
        return self._last_that_fits(begin, self._cuts(self.starts[first:last]))

    def _characters(self, begin: int) -> int:
        """Returns the last end of a character that fits, or 0: estimates can be far off."""
        near, length = begin + self.limit, len(self.text)
        end = [length] if near >= length else []
        return self._last_that_fits(begin, self._cuts(range(begin + 1, near + 1)) + end)

    def _reach(self, begin: int, room: int) -> int:
        """Returns up to where `room` tokens from `begin` on go."""
        token = bisect_left(self.starts, begin) + max(room, 0)
        return self.starts[token] if token < len(self.starts) else len(self.text)

    def _last_that_fits(self, begin: int, ends: Sequence[int]) -> int:
        low, high, middle = -1, len(ends), len(ends) - 1
        while high - low > 1:
            if self.count(begin, ends[middle]) <= self.limit:
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        return ends[low] if low >= 0 else 0

    def _cuts(self, places: Iterable[int]) -> list[int]:
        """Returns where a chunk may begin at these ascending places or next behind them."""
        cuts: list[int] = []
        at = 0
        for place in places:
            if place < at:
                continue  # there is nothing to see from here to the last one
            at = _visible(self.text, place)
            if (
                self.first < at < len(self.text)
                and not unicodedata.category(self.text[at]).startswith("M")
                and cuts[-1:] != [at]
            ):
                cuts.append(at)
        return cuts


def _visible(text: str, at: int) -> int:
    """Returns the place of the first character from `at` on that the text rules keep."""
    while at < len(text) and not normalize_text(text[at]):
        at += 1
    return at
