"""The hits of a query: read from the documents of an index version, and as JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, overload

from pydantic_core import to_json

from core.documents import DocumentReader, JsonDocument
from core.types import Hit
from service.fusion import Channel
from stores.base import ScoredRows

# The documents of a result with more hits are read when they are accessed. In memory all at once,
# those of a large batch would hold up the process for each garbage collection.
_FEW_HITS = 64
# Hits of one piece of JSON.
_HITS = 16


class Kept(NamedTuple):
    """What caches keep of a result.

    Attributes:
        rows: Scores and rows.
        answerable: The score that says whether the index answers the query, if there is one.
    """

    rows: ScoredRows
    answerable: float | None = None


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of one query.

    Attributes:
        kept: What caches keep.
        hits: The hits of the rows.
        search: Time to find the rows [s].
        fetch: Time to read the documents, or the ids of many [s].
        cached: Whether the rows come from a cache.
        overflow: Whether the query was encoded by the encoder for a full queue.
        failed: Channels of a hybrid search that failed or were late.
    """

    kept: Kept
    hits: "Hits"
    search: float
    fetch: float
    cached: bool
    overflow: bool = False
    failed: tuple[Channel, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """How the hits were found, as arguments of `service.answers.search_json`."""
        facts = {"cached": self.cached, "overflow": self.overflow, "failed": self.failed}
        return facts | {"answerable": self.kept.answerable}


class Hits(Sequence[Hit]):
    """The hits of a query, best first; equal scores are ordered by descending id.

    The documents of a few hits are read at once, those of many when they are accessed.

    Args:
        documents: The documents of the index.
        rows: Scores and rows.
        explain: Explains the score of a row, if hits are explained.
    """

    def __init__(
        self,
        documents: DocumentReader,
        rows: ScoredRows,
        explain: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        self._documents = documents
        self._explain = explain
        scores: list[float] = rows[0].tolist()
        self._found = list(zip(scores, rows[1].tolist(), strict=True))
        if any(better <= worse for better, worse in pairwise(scores)):
            self._found.sort(key=lambda hit: (hit[0], documents.id(hit[1])), reverse=True)
        self._read: list[JsonDocument] | None = None
        if len(self._found) <= _FEW_HITS:
            self._read = [documents.json(row) for _, row in self._found]

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, at: int) -> Hit: ...
    @overload
    def __getitem__(self, at: slice) -> list[Hit]: ...
    def __getitem__(self, at: int | slice) -> Hit | list[Hit]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        score, row = self._found[at]
        d = self._documents[row]
        chunk = d.parent, d.chunk, d.chunks
        why = self._explain(row) if self._explain else None
        return Hit(d.id, score, at % len(self) + 1, d.title, d.text, d.metadata, *chunk, why)

    @property
    def text_bytes(self) -> int | None:
        """Size of the texts as JSON [bytes], or None if they are still to be read."""
        return None if self._read is None else sum(len(d.text) for d in self._read)

    def json(self, include: Sequence[str]) -> Iterator[bytes]:
        """Yields the hits as JSON, separated by commas, several at a time.

        Args:
            include: The optional fields, `text` and `metadata`.
        """
        form = b'{"id":%b,"score":%b,"rank":%d,"title":%b'
        form += b"".join(b',"%b":%%b' % name.encode() for name in include) + b"%b}"
        others = attrgetter("title", *include, "chunk")
        for first in range(0, len(self), _HITS):
            hits = []
            for at in range(first, min(first + _HITS, len(self))):
                score, row = self._found[at]
                d = self._read[at] if self._read else self._documents.json(row)
                hit = form % (d.id, to_json(score), at + 1, *others(d))
                if self._explain:
                    hit = b'%b,"explain":%b}' % (hit[:-1], to_json(self._explain(row)))
                hits.append(hit)
            yield (b"," if first else b"") + b",".join(hits)
