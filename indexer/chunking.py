"""Splits long documents into chunks of whole sentences, each with the document's title."""

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from core.encoders import Encoder, OffsetTokenizer
from core.errors import CareError
from core.manifest import Chunking
from core.sentences import Span, sentence_ends
from core.text import document_text, normalize_text
from core.types import Document
from indexer.records import Reject

# A span can have fewer tokens than its part of the tokenized document.
_SLACK = 8


class Chunker:
    """Splits documents that exceed the maximum length of a chunk.

    The encoder must be an `OffsetTokenizer` of at least that maximum length, else CareError.
    """

    def __init__(self, encoder: Encoder, chunking: Chunking) -> None:
        try:
            if not isinstance(encoder, OffsetTokenizer):
                raise CareError(f"the encoder of {encoder.spec.model} has no tokenizer")
            # Some encoders load their tokenizer at the first call.
            encoder.token_offsets("")
        except CareError as error:
            message = f"chunking needs a document encoder that returns token offsets: {error}"
            raise CareError(message, code="no_token_offsets") from error
        tokens, overlap = chunking.tokens, chunking.overlap
        model, most = encoder.spec.model, encoder.spec.max_length
        if tokens > most:
            message = (
                f"chunks of {tokens} tokens exceed the maximum length of {model}, {most} tokens"
            )
            raise CareError(message, code="chunks_too_long", tokens=tokens, max_length=most)
        if overlap >= tokens:
            message = f"an overlap of {overlap} tokens is too long for chunks of {tokens} tokens"
            raise CareError(message, code="overlap_too_long", tokens=tokens, overlap=overlap)
        self._tokenizer: OffsetTokenizer = encoder
        self._chunking = chunking

    def split(self, document: Document) -> list[Document] | Reject:
        """Returns the chunks of a document, in order; a document that fits is one chunk.

        Returns a reject if the title is so long that no text fits into a chunk.
        """
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
            return Reject(f"the title is too long: no text fits into a chunk of {limit} tokens")
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


def split_record(record: Document | Reject, chunker: Chunker | None) -> list[Document] | Reject:
    """Returns the chunks of a document or, without a chunker, the document; rejects unchanged."""
    if isinstance(record, Reject):
        return record
    return chunker.split(record) if chunker else [record]


def token_starts(offsets: Iterable[Span]) -> list[int]:
    """Returns the start of each token of a text, ascending.

    Several tokens of one character have the same start. Tokens with an empty span, which are those
    of the prompt and special tokens, are omitted.
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
    """Splits a text with at least one visible character into chunks that cover all of it.

    A chunk has as many whole sentences as fit. A sentence that does not fit into a chunk is split
    between tokens; the next sentences follow its last part. The last whole sentences of a chunk,
    up to `overlap` tokens, are repeated at the start of the next chunk, unless the next sentence
    then does not fit. No chunk starts with white space, an invisible character or a combining
    mark.

    Args:
        count: Returns the tokens of a chunk with the span [start, end) of the text, including
            prompt, title and special tokens. It decides whether a span fits.
        starts: Start of each token of the whole text, ascending. The length of spans is estimated
            from it, so that `count` is called rarely.
        limit: Maximum tokens of a chunk.
        overlap: Maximum tokens that consecutive chunks share.

    Returns:
        Start and end of each chunk, in order; empty if not even one character fits.
    """
    whole = count(0, len(text))
    if whole <= limit:
        return [(0, len(text))]
    splitter = _Splitter(text, count, starts, limit, overlap, room=limit - whole + len(starts))
    spans: list[Span] = [(0, 0)]
    while spans[-1][1] < len(text):
        spans.append(splitter.after(*spans[-1]))
        if not spans[-1][1]:
            return []
    return spans[1:]


@dataclass
class _Splitter:
    """Finds the chunks of one text in order; see `chunk_spans`."""

    text: str
    count: Callable[[int, int], int]
    starts: Sequence[int]
    limit: int
    overlap: int
    room: int  # estimate of the tokens of the text that fit into a chunk

    def __post_init__(self) -> None:
        self.first = _visible(self.text, 0)
        ends = self._boundaries(sentence_ends(self.text))
        self.sentence_ends = [*ends, len(self.text)]

    def after(self, start: int, end: int) -> Span:
        """Returns the chunk after the chunk [start, end); its end is 0 if nothing fits."""
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
        """Returns the starts of trailing sentences of [start, end) that may be repeated."""
        ends, starts = self.sentence_ends, self.starts
        at = bisect_left(ends, end)
        if not self.overlap or ends[at] != end:
            return []
        earliest = bisect_left(starts, end) - self.overlap
        sentences = ends[bisect_right(ends, start) : at]
        return [begin for begin in sentences if bisect_left(starts, begin) >= earliest]

    def _whole_sentences(self, begin: int, past: int, room: int) -> int:
        """Returns the last sentence end after `past` that fits, or 0."""
        ends = self.sentence_ends
        low, high = bisect_right(ends, past), bisect_right(ends, self._reach(begin, room))
        return self._last_that_fits(begin, ends[low:high])

    def _tokens(self, begin: int) -> int:
        """Returns the last token end that fits, or 0."""
        first = bisect_right(self.starts, begin)
        last = bisect_right(self.starts, self._reach(begin, self.room))
        return self._last_that_fits(begin, self._boundaries(self.starts[first:last]))

    def _characters(self, begin: int) -> int:
        """Returns the last character position that fits, or 0; used if the estimate fails."""
        near, length = begin + self.limit, len(self.text)
        end = [length] if near >= length else []
        return self._last_that_fits(begin, self._boundaries(range(begin + 1, near + 1)) + end)

    def _reach(self, begin: int, room: int) -> int:
        """Returns the estimated end of a span of `room` tokens from `begin`."""
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

    def _boundaries(self, positions: Iterable[int]) -> list[int]:
        """Returns the positions, ascending, at or after the given ones where a chunk may start."""
        boundaries: list[int] = []
        at = 0
        for position in positions:
            if position < at:
                continue  # no visible character between this position and the last boundary
            at = _visible(self.text, position)
            if (
                self.first < at < len(self.text)
                and not unicodedata.category(self.text[at]).startswith("M")
                and boundaries[-1:] != [at]
            ):
                boundaries.append(at)
        return boundaries


def _visible(text: str, at: int) -> int:
    """Returns the position of the first character from `at` on that normalisation keeps."""
    while at < len(text) and not normalize_text(text[at]):
        at += 1
    return at
