"""Texts and examples of a stage, without repetitions, in memory-mapped files.

`write_texts` and `write_examples` read their data once, as a stream. Only keys of 8 bytes and rows
are in memory, so that data larger than the memory can be written.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from core.encoders import Role
from core.records import Triple
from core.rows import Rows, RowsWriter, Texts, mapped, write_selected
from core.scratch import temporary_folder
from core.types import RowArray

KeyArray = NDArray[np.uint64]

# The highest bit of a key is the role, the others are a checksum of the text.
_DOCUMENT = 1 << 63
_ROLES: tuple[Role, Role] = ("query", "document")


@dataclass(frozen=True, slots=True)
class Text:
    """A text and the role it is encoded in, query or document."""

    role: Role
    text: str

    @property
    def id(self) -> str:
        """The role and a checksum of 16 bytes."""
        return f"{self.role}-{hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()}"


def key_of(text_id: str) -> int:
    """Returns the key of a text from its id: an integer of 8 bytes.

    Two of 10^8 texts have the same key with a probability of 0.0005.
    """
    role, _, checksum = text_id.partition("-")
    return int(checksum[:16], 16) >> 1 | (_DOCUMENT if role == "document" else 0)


@dataclass(frozen=True, slots=True)
class TextSet(Sequence[Text]):
    """Distinct texts, in the order in which they were read."""

    texts: Sequence[str]
    keys: KeyArray  # uint64 [texts], by `key_of`

    @classmethod
    def open(cls, folder: Path, name: str = "texts") -> Self:
        """Maps the files that `write_texts` wrote."""
        texts = Texts(Rows.open(folder, name, np.uint8))
        return cls(texts, mapped(folder / f"{name}.keys", np.uint64))

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, index: int) -> Text: ...

    @overload
    def __getitem__(self, index: slice) -> list[Text]: ...

    def __getitem__(self, index: int | slice) -> Text | list[Text]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return Text(_ROLES[int(self.keys[index] >> 63)], self.texts[index])


def write_texts(folder: Path, texts: Iterable[Text]) -> None:
    """Writes the files of a `TextSet`, without repetitions within a role."""
    with _TextsWriter(folder, "read") as writer:
        for text in texts:
            writer.write(text)
    rows, _ = _distinct(writer.keys)
    writer.select(rows, "texts")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Examples as rows of two lists of distinct texts, so that each text is tokenized once.

    A pair is a query with one of its positives; pair i is value i of `positives`.
    """

    queries: Sequence[str]  # one query for each example
    documents: Sequence[str]  # the distinct documents of all examples
    query_keys: KeyArray  # uint64 [queries], their keys
    document_keys: KeyArray  # uint64 [documents], their keys
    positives: Rows  # for each query, rows of its positives in `documents`, int64
    negatives: Rows  # for each query, rows of its hard negatives in `documents`, int64

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Maps the files that `write_examples` wrote."""
        queries, documents = (TextSet.open(folder, name) for name in ("queries", "documents"))
        rows = (Rows.open(folder, name, np.int64) for name in ("positives", "negatives"))
        return cls(queries.texts, documents.texts, queries.keys, documents.keys, *rows)

    @classmethod
    def of(cls, examples: Iterable[Triple]) -> Self:
        """Returns the corpus of a few examples."""
        with temporary_folder() as folder:
            write_examples(folder, examples)
            # The maps outlive the names of their files.
            return cls.open(folder)

    def __len__(self) -> int:
        return len(self.queries)

    def texts(self, role: Role) -> Sequence[str]:
        return self.queries if role == "query" else self.documents

    def of_pairs(self, role: Role, values: NDArray[Any]) -> NDArray[Any]:
        """Returns for each pair the value of its query or document, given one for each text."""
        pairs = self.positives
        return np.repeat(values, pairs.lengths) if role == "query" else values[pairs.values]

    def examples(self) -> Iterator[Triple]:
        for row, query in enumerate(self.queries):
            documents = self._texts(self.positives[row]), self._texts(self.negatives[row])
            yield Triple(query, *documents)

    def _texts(self, rows: RowArray) -> tuple[str, ...]:
        return tuple(self.documents[row] for row in rows.tolist())


def write_examples(folder: Path, examples: Iterable[Triple]) -> None:
    """Writes the files of a `Corpus`; examples with equal queries become one.

    A positive of a query in one example is not its negative in another.
    """
    counts = array("i")
    with _TextsWriter(folder, "queries-read") as queries, _TextsWriter(folder, "read") as documents:
        for example in examples:
            queries.write(Text("query", example.query))
            for text in (*example.positives, *example.negatives):
                documents.write(Text("document", text))
            counts.extend((len(example.positives), len(example.negatives)))
    rows, numbers = _distinct(queries.keys)
    queries.select(rows, "queries")
    count = len(rows)
    # Positives and negatives of each record alternate; even numbers are positives of a query.
    kinds = np.repeat(np.stack([2 * numbers, 2 * numbers + 1], axis=1).ravel(), counts)
    order = np.argsort(kinds, kind="stable")
    queries_of = kinds[order] // 2
    _, documents_of = _distinct(documents.keys[order])
    # The first of equal documents of a query is kept: a positive if there is one.
    first, _ = _distinct(queries_of * (len(order) + 1) + documents_of)
    kept = order[first]
    rows, documents_of = _distinct(documents.keys[kept])
    documents.select(kept[rows], "documents")
    for name, parity in (("positives", 0), ("negatives", 1)):
        chosen = kinds[kept] % 2 == parity
        lengths = np.bincount(kinds[kept[chosen]] // 2, minlength=count)
        with RowsWriter(folder, name) as writer:
            writer.extend(documents_of[chosen], lengths)


class _TextsWriter(RowsWriter):
    """Writes texts; keeps their keys in memory."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._folder, self._name = folder, name
        self._keys = array("Q")

    @property
    def keys(self) -> KeyArray:
        return np.frombuffer(self._keys, dtype=np.uint64)

    def write(self, text: Text) -> None:
        self.append(text.text.encode())
        self._keys.append(key_of(text.id))

    def select(self, rows: RowArray, name: str) -> None:
        """Writes the texts of some rows, and their keys, as `name`, in place of all texts."""
        write_selected(self._folder, self._name, rows, name)
        self.keys[rows].tofile(self._folder / f"{name}.keys")


def _distinct(values: NDArray[Any]) -> tuple[RowArray, RowArray]:
    """Returns the row of each distinct value, and for each value the number of its distinct one.

    Distinct values are numbered from 0 in the order of their first rows.
    """
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order))
    return first[order], numbers[inverse]
