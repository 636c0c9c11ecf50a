"""The hits of a query: read from the documents of an index version, and as JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, overload

from pydantic_core import to_json

from core.documents import DocumentReader, JsonDocument
from core.types import Check, Document, Evidence, Hit, no_check
from search.evidence import Asked, best_sentence
from search.fusion import Channel
from stores.base import ScoredRows
from stores.order import rounded

# The documents of a result with more hits are read when they are accessed. In memory all at once,
# those of a large batch would hold up the process for each garbage collection.
_FEW_HITS = 64
# Most bytes of a character in UTF-8.
_UTF8_BYTES = 4
# Hits that are read together, and of one piece of JSON.
_HITS = 16


class CacheEntry(NamedTuple):
    """What caches keep of a result: scored rows in the order of hits, and the answerable score."""

    rows: ScoredRows
    answerable: float | None = None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of one query; times in seconds."""

    entry: CacheEntry
    hits: "Hits"
    fetch: float  # time to read the documents, or the ids of many
    search: float = 0.0  # time to find the rows
    cached: bool = False  # whether the rows come from a cache
    overflow: bool = False  # whether the query was encoded by the encoder for a full queue
    failed: tuple[Channel, ...] = ()  # channels of a hybrid search that failed or were late
    # Time of each channel of a hybrid search that answered.
    channel_seconds: Mapping[Channel, float] = field(default_factory=dict)
    # Whether more rows than are compared have the score of the last one of a channel.
    cut: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """How the hits were found, as the answer of a search says it."""
        how = {"cached": self.cached, "overflow": self.overflow, "failed": self.failed}
        return how | {"answerable": self.entry.answerable}


class Hits(Sequence[Hit]):
    """The hits of a query.

    The documents of a few hits are read at once, those of many when they are accessed.

    Args:
        rows: Scores and rows, in the order of hits.
        explain: Explains the score of a row, if hits are explained.
        question: What sentences are compared with, if hits have evidence.
        check: Called before a text is split into sentences; stops it by an exception.
    """

    def __init__(
        self,
        documents: DocumentReader,
        rows: ScoredRows,
        explain: Callable[[int], dict[str, Any]] | None = None,
        question: Asked | None = None,
        check: Check = no_check,
    ) -> None:
        self._documents = documents
        self._explain = explain
        self._question = question
        scores: list[float] = rounded(rows[0]).tolist()
        self._found = list(zip(scores, rows[1].tolist(), strict=True))
        self._read: list[JsonDocument] | None = None
        self._sentences: list[Evidence | None] | None = None
        if len(self._found) <= _FEW_HITS:
            stored = documents.read(rows[1].tolist())
            self._read = [one.json() for one in stored]
            if question is not None:
                self._sentences = []
                for one in stored:
                    check()
                    self._sentences.append(best_sentence(question, one.text))

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, at: int) -> Hit: ...
    @overload
    def __getitem__(self, at: slice) -> list[Hit]: ...
    def __getitem__(self, at: int | slice) -> Hit | list[Hit]:
        if not isinstance(at, slice):
            return self[at : at + 1 or None][0]
        places = range(len(self))[at]
        stored = self._documents.read([self._found[i][1] for i in places])
        return [self._hit(i, one.document()) for i, one in zip(places, stored, strict=True)]

    def __iter__(self) -> Iterator[Hit]:
        for first in range(0, len(self), _HITS):
            yield from self[first : first + _HITS]

    def _hit(self, at: int, d: Document) -> Hit:
        score, row = self._found[at]
        why = self._explain(row) if self._explain else None
        more = d.parent, d.chunk, d.chunks, why, self._evidence(at, d.text)
        return Hit(d.id, score, at + 1, d.title, d.text, d.metadata, *more)

    def _evidence(self, at: int, text: str) -> Evidence | None:
        if self._sentences:
            return self._sentences[at]
        return best_sentence(self._question, text) if self._question else None

    @property
    def text_bytes(self) -> int | None:
        """Size of texts and evidence as JSON [bytes], or None if they are still to be read."""
        if self._read is None:
            return None
        quoted = sum(_UTF8_BYTES * len(one.text) for one in self._sentences or () if one)
        return quoted + sum(len(d.text) for d in self._read)

    def json(self, include: Sequence[str]) -> Iterator[bytes]:
        """Yields the hits as JSON, separated by commas, several at a time.

        `include` has the optional fields that are wanted, of `text` and `metadata`.
        """
        form = b'{"id":%b,"score":%b,"rank":%d,"title":%b'
        form += b"".join(b',"%b":%%b' % name.encode() for name in include) + b"%b}"
        others = attrgetter("title", *include, "chunk")
        for first in range(0, len(self), _HITS):
            hits = []
            found = self._found[first : first + _HITS]
            stored = [] if self._read else self._documents.read([row for _, row in found])
            for at, (score, row) in enumerate(found, first):
                d = self._read[at] if self._read else stored[at - first].json()
                hit = form % (d.id, to_json(score), at + 1, *others(d))
                if self._explain:
                    hit = b'%b,"explain":%b}' % (hit[:-1], to_json(self._explain(row)))
                if self._question is not None:
                    text = "" if self._sentences else stored[at - first].text
                    hit = b'%b,"evidence":%b}' % (hit[:-1], to_json(self._evidence(at, text)))
                hits.append(hit)
            yield (b"," if first else b"") + b",".join(hits)
