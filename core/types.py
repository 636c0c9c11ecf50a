"""Documents, queries and hits; types of arrays of vectors and rows."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from core.choices import Mode as Mode

FloatArray = NDArray[np.float32]
RowArray = NDArray[np.int64]
# Scores, float32 [m], descending, and rows, int64 [m].
ScoredRows = tuple[FloatArray, RowArray]

FilterValue = str | int | float | bool
# A value and the number of its rows.
CountedValue = tuple[FilterValue, int]
# A value, a list of accepted values, or an object: numbers by `gt`, `gte`, `lt` and `lte`, and a
# value or a list of values by `not`. `core/conditions.py` checks it.
FilterCondition = (
    FilterValue | Sequence[FilterValue] | Mapping[str, FilterValue | Sequence[FilterValue]]
)
Filter = Mapping[str, FilterCondition]


@dataclass(frozen=True, slots=True)
class Condition:
    """What is required of one metadata field; all parts that are given must hold."""

    # One of the document's values must be among them; None if any may be.
    accepted: tuple[FilterValue, ...] | None = None
    # Pairs of `gt`, `gte`, `lt` or `lte` and a number; one of the document's numbers must satisfy
    # all.
    bounds: tuple[tuple[str, float], ...] = ()
    excluded: tuple[FilterValue, ...] = ()  # none of the document's values may be among them

    def as_json(self) -> dict[str, Any]:
        """Returns the parts as JSON: equal conditions have equal JSON."""
        return {"in": self.accepted, "bounds": self.bounds, "not": self.excluded}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the condition that `as_json` has written."""
        accepted = None if value["in"] is None else tuple(value["in"])
        bounds = tuple((comparison, number) for comparison, number in value["bounds"])
        return cls(accepted, bounds, tuple(value["not"]))


@dataclass(frozen=True, slots=True)
class Conjunction:
    """Conditions that must all hold, in one order whatever they were made from.

    A field may have several conditions: those of a user's filter and others that bound the rows.
    It is true if it has a condition.
    """

    conditions: tuple[tuple[str, Condition], ...] = ()  # pairs of a field and a condition

    @classmethod
    def of(cls, conditions: Iterable[tuple[str, Condition]]) -> Self:
        """Returns the conjunction of conditions in any order, with or without repetitions."""
        texts = {json.dumps([field, one.as_json()]): (field, one) for field, one in conditions}
        return cls(tuple(texts[text] for text in sorted(texts)))

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def __and__(self, other: "Conjunction") -> "Conjunction":
        return Conjunction.of((*self.conditions, *other.conditions))

    def as_json(self) -> list[Any]:
        """Returns the conditions as JSON: equal conjunctions have equal JSON."""
        return [[field, one.as_json()] for field, one in self.conditions]

    @classmethod
    def from_json(cls, value: Iterable[Any]) -> Self:
        """Returns the conjunction that `as_json` has written."""
        return cls.of((field, Condition.from_json(one)) for field, one in value)


# Conditions that every row meets.
NO_CONDITIONS = Conjunction()
# Characters of its text that the representation of a hit has.
_SHOWN = 40
# Called between the steps of a search; raises an exception to stop the search.
Check = Callable[[], None]


def no_check() -> None:
    """Stops no search."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus, or a chunk of one."""

    id: str  # unique in an index
    text: str
    title: str = ""
    # JSON object; its strings, numbers and booleans can be used in filters.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # In an index of chunks, the id of the chunk's document; otherwise None.
    parent: str | None = None
    chunk: int = 0  # number of the chunk, from 0, of `chunks` in the document
    chunks: int = 1


# The `field` of a limit that counts the hits of a document; all others are metadata fields.
DOCUMENT = "_document"


class HitLimit(NamedTuple):
    """At most `hits` hits of each value of a metadata field, or of each document."""

    field: str
    hits: int


@dataclass(frozen=True, slots=True)
class Query:
    """A search query."""

    text: str  # as the user typed it
    top_k: int = 10
    # Conditions by metadata field, as the user has written them; all fields must match.
    filter: Filter = field(default_factory=dict)
    # Lowest score of a hit (less 1e-6, which scores may vary by), or None.
    min_score: float | None = None
    collapse: bool = False  # whether to return only the best chunk of each document
    mode: Mode | None = None  # how documents are found; None for the default of the index
    explain: bool = False  # whether hits say what each channel contributes to their scores
    evidence: bool = False  # whether hits have their best sentence
    limit_per: HitLimit | None = None  # the limit of hits per document or metadata value, if any
    # How many of the first hits are ranked again; 0 for none, None for the default.
    rerank: int | None = 0
    # What the query is searched with instead of `filter`, once it is checked (`search/query.py`).
    conditions: Conjunction = NO_CONDITIONS


@dataclass(frozen=True, slots=True)
class Evidence:
    """The sentence of a hit that answers the query best.

    Attributes:
        start: Where it starts in the text of the hit [characters].
        end: Where it ends.
        text: The sentence, `hit.text[start:end]`.
        certain: Whether it is certain enough to be pointed out.
    """

    start: int
    end: int
    text: str
    certain: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Hit:
    """A retrieved document or, in an index of chunks, a chunk.

    Attributes:
        id: Id of the document or chunk.
        score: Score of the mode: the cosine similarity of query and document (dense), the share of
            the highest possible BM25 score (lexical), or their weighted sum (hybrid).
        rank: Position in the hits, from 1.
        title: Title of the document.
        text: Text of the document or chunk.
        metadata: Metadata of the document.
        parent: Id of the chunk's document; None without chunks.
        chunk: Number of the chunk in its document, from 0.
        chunks: Number of chunks of the document.
        explain: For each channel, the rank and score that it gave the hit (None if it did not find
            it) and its weight; None unless asked for.
        evidence: Its best sentence; None unless asked for, or if the text has no letter or digit.
    """

    id: str
    score: float
    rank: int
    title: str
    text: str
    metadata: Mapping[str, Any]
    parent: str | None = None
    chunk: int = 0
    chunks: int = 1
    explain: Mapping[str, Any] | None = None
    evidence: Evidence | None = None

    def __repr__(self) -> str:
        """Returns the fields that tell hits apart, with the beginning of the text."""
        text = self.text[:_SHOWN] + "…" * (len(self.text) > _SHOWN)
        found = f"rank={self.rank}, score={self.score:.3f}, id={self.id!r}"
        return f"Hit({found}, title={self.title!r}, text={text!r})"
