"""Full text of an index version: BM25 over the terms of `core/analysis.py`, by Tantivy.

The files are in the folder `lexical` of a segment and are memory-mapped. They are independent of
the store of the vectors: row i of the segment is row i here. The segments of a version are searched
together, as if they had been written as one.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import tantivy
from pyroaring import BitMap

from core.analysis import terms
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import sha256_file
from core.filters import FilterReader, Selection
from core.manifest import FULL_TEXT, Component, FileRecord, IndexManifest
from core.progress import progress_bar
from core.scratch import MemoryFolder
from core.terms import TermList
from core.text import document_text
from core.types import Check, RowArray, ScoredRows, no_check
from stores.order import with_ties
from stores.term_list import USED, read_terms

FORMAT = 1
# Setting of the component: what stands for a metadata value, its hash or, if it is not set, its
# position in the segment's table.
_VALUES, _HASHES = "labels", "hash"
# Tantivy's list of segments.
_META = "meta.json"

# Fields of Tantivy's index: the terms, the metadata values (core/filters.py), the row.
_TEXT, _LABELS, _ROW = "text", "labels", "row"
_Clause = tuple[tantivy.Occur, tantivy.Query]

# Parameter of BM25 in Tantivy, whose b is 0.75.
K1 = 1.2
# Weight of the terms that a word of patients means, beside 1 for the words of the query. With 1
# they lose accuracy on questions that were reworded by rules (docs/evaluate.md).
_MEANT_WEIGHT = 0.5
# What a passage that says a short query as a whole scores beside BM25, and the most terms of such a
# query: three words (docs/evaluate.md).
WHOLE = 0.15
_SHORT = 12
# Terms whose weights are kept in memory.
_WEIGHTS = 1 << 16
# Further hits of a search, which show the rows with the score of the last one: among 300 hits they
# are 50 at most (14,950 passages).
_TIED = 64
# Further hits of a search that are to make up for deleted rows, beside their share of all rows.
_DELETED = 16
# With more hashes than this, a requirement of a filter may be left to the rows of the hits: Tantivy
# takes 5 µs for each, as long as for a few hits.
_MANY_HASHES = 1024
# Memory of the writer before it starts another segment [bytes].
_HEAP = 128 << 20


def write_full_text(
    folder: Path, documents: DocumentReader, filters: FilterReader, *, progress: bool = False
) -> Component:
    """Writes the full text of a version to `folder`/lexical; returns its entry for the manifest.

    Raises:
        CareError: If the files cannot be written.
    """
    target = folder / FULL_TEXT
    target.mkdir()
    try:
        _write(target, documents, filters, progress=progress)
    except ValueError as error:  # such as a full disk
        message = f"{target}: the full text cannot be written: {error}"
        raise CareError(message, code="input_output", path=target) from error
    for path in target.glob(".*"):  # locks, and the list of files that a writer needs
        path.unlink()
    _rename_segments(target)
    files = {}
    for path in sorted(target.glob("[!.]*")):
        path.chmod(0o644)
        record = FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
        files[f"{FULL_TEXT}/{path.name}"] = record
    return full_text_component(files)


def full_text_component(files: Mapping[str, FileRecord]) -> Component:
    """Returns the entry for the manifest of a full text as this release writes it."""
    return Component(format=FORMAT, files=dict(files), settings={_VALUES: _HASHES})


def is_current(component: Component) -> bool:
    """Returns whether a full text is as this release writes it, not as an older one did."""
    return bool(component.settings.get(_VALUES) == _HASHES)


def _write(
    target: Path, documents: DocumentReader, filters: FilterReader, *, progress: bool
) -> None:
    index = tantivy.Index(_schema(), str(target), reuse=False)
    # One thread writes rows in their order.
    writer = index.writer(heap_size=_HEAP, num_threads=1)
    (offsets, labels), hashes = filters.labels_of_rows(), filters.hashes()
    with progress_bar("text", show=progress, total=len(documents)) as bar:
        for row, document in enumerate(documents):
            own = b" ".join(hashes[labels[offsets[row] : offsets[row + 1]]].tolist()).decode()
            text = " ".join(terms(document_text(document.title, document.text)))
            new = tantivy.Document(text=text, labels=own, row=row)
            writer.add_document(new)
            bar.update()
    writer.commit()
    writer.wait_merging_threads()


def _rename_segments(target: Path) -> None:
    """Gives segments the names 1, 2, …; Tantivy's are random, and equal indexes would differ."""
    meta = target / _META
    content = json.loads(meta.read_bytes())
    for old, new in _renumber(content, 1).items():
        for path in target.glob(f"{old}.*"):
            path.rename(path.with_name(new + path.suffix))
    meta.write_text(json.dumps(content))


def _renumber(content: dict[str, Any], number: int) -> dict[str, str]:
    """Gives the segments in the content of a meta.json names from `number` on.

    Returns the new names by the old ones, as in the names of files. Nothing in a file has them.
    """
    names = {}
    for new, segment in enumerate(content["segments"], number):
        names[UUID(segment["segment_id"]).hex] = UUID(int=new).hex
        segment["segment_id"] = str(UUID(int=new))
    return names


@dataclass(frozen=True, slots=True)
class Part:
    """The full text of one segment: the folder that has it, and the number of its rows."""

    folder: Path
    component: Component
    count: int


def open_full_text(
    folder: Path,
    manifest: IndexManifest,
    parts: Sequence[Part] = (),
    deleted: BitMap | None = None,
) -> "LexicalIndex | None":
    """Opens the full text of a version, or returns None if it has none.

    Args:
        folder: Has the full text and the term list of `manifest`.
        parts: The full text of each segment, that in `folder` first; by default this one only.
        deleted: Rows that no search returns.

    Raises:
        IndexVersionError: If the files cannot be read, or do not have a row for each document.
    """
    component = manifest.components.get(FULL_TEXT)
    if component is None:
        return None
    parts = parts or [Part(folder, component, manifest.count)]
    return LexicalIndex(parts, read_terms(folder, manifest, USED), deleted)


class LexicalIndex:
    """The full text of all segments of a version; thread-safe.

    Rows count through the parts: the first of a part follows the last one of the part before.

    Args:
        parts: The full text of each segment; those of older releases must be the only part.
        term_list: Words of patients; a search also finds the terms that they mean.
        deleted: Rows that no search returns. Scores and weights are those of the index with these
            rows, as in Lucene, until they are merged away.

    Attributes:
        count: Number of rows, with the deleted ones.
        live: Number of rows without them.
        term_list: As given.
        weight: Returns the weight of a term in BM25: its idf, or 0 if no document has it.

    Raises:
        IndexVersionError: If the files cannot be read, or have another format or number of rows,
            or if one of several parts is of an older release.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        term_list: TermList | None = None,
        deleted: BitMap | None = None,
    ) -> None:
        _check(parts)
        self._hashed = is_current(parts[0].component)
        self.term_list = term_list
        self._deleted = deleted or BitMap()
        # Tantivy creates a lock file beside the files that it maps, and a version is immutable and
        # may be on a read-only disk. So it opens links to the files: in memory, because on a disk
        # each waits for what others write to it.
        self._links = MemoryFolder()
        segments = _link(parts, self._links.path)
        firsts = accumulate((part.count for part in parts), initial=0)
        # The first row of the part of each of Tantivy's segments, int64 [segments].
        self._firsts = np.repeat(list(firsts)[:-1], segments)
        try:
            index = tantivy.Index.open(str(self._links.path))
            index.config_reader(reload_policy="manual")
            self._searcher = index.searcher()
        except ValueError as error:
            if len(parts) > 1:
                for part in parts:
                    LexicalIndex([part])  # raises an error that names the part
            raise _unreadable(parts[0], "is not a readable full-text index") from error
        self._schema = index.schema
        self.count: int = self._searcher.num_docs
        self.live = self.count - len(self._deleted)
        self.weight: Callable[[str], float] = lru_cache(_WEIGHTS)(self._weight_of)

    def search(
        self,
        query: str,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
        *,
        characters: bool = True,
    ) -> ScoredRows:
        """Finds the rows with the highest BM25 scores.

        A score is divided by the highest one that a document could have for the query, that of one
        with all its terms any number of times. So scores of different queries can be compared.
        Without `characters`, a passage with all words of a short query, as they are or as the term
        list means them, scores `WHOLE` more.

        Args:
            query: Normalised text of the query.
            k: Number of hits, at least 1.
            selection: The rows that may be found, by conditions; None for all.
            check: Called between the steps of the search; stops it by an exception.
            characters: Whether single characters of Chinese words are searched for as well. Without
                them a search takes a third of the time.

        Returns:
            Scores from 0 to 1, or to 1 + `WHOLE`, float32 [m], and rows, int64 [m], best first: at
            most k of the rows that are selected and share a term with the query, and those with
            the score of the last one (`stores/order.py`).
        """
        check()
        own = terms(query, characters=characters)
        wanted = self._meant(query) | dict.fromkeys(own, 1.0)
        highest = (K1 + 1) * sum(self.weight(term) * boost for term, boost in wanted.items())
        if not (highest and self.live):
            return np.empty(0, np.float32), np.empty(0, np.int64)
        words = self._words(query) if not characters and len(own) <= _SHORT else []
        find = self._finder(wanted, words, highest, selection, k, check)
        return with_ties(find, k, k + _TIED, self.live)

    def _finder(
        self,
        wanted: Mapping[str, float],
        words: Sequence[Sequence[set[str]]],
        highest: float,
        selection: Selection | None,
        k: int,
        check: Check,
    ) -> Callable[[int], ScoredRows]:
        """Returns what finds a number of best rows: this many, or all there are.

        Args:
            wanted: The terms that count, with their boost.
            words: What `_words` returns.
            highest: The score of a document with all terms, by which scores are divided.
            k: How many rows are wanted first.
        """
        scored = [self._having(term, boost) for term, boost in wanted.items()]
        if words:
            every = [
                _joined(
                    tantivy.Occur.Should,
                    [
                        _joined(tantivy.Occur.Must, [self._having(term, 1.0) for term in way])
                        for way in ways
                    ],
                )
                for ways in words
            ]
            whole = _joined(tantivy.Occur.Must, every)
            scored.append(tantivy.Query.const_score_query(whole, WHOLE * highest))
        any_term = _joined(tantivy.Occur.Should, scored)
        search, within = any_term, None
        if selection:
            conditions, within = self._conditions(selection, k, check)
            clauses = [(tantivy.Occur.Must, any_term), *conditions]
            search = tantivy.Query.boolean_query(clauses)

        def find(wanted: int) -> ScoredRows:
            scores, rows = self._best(search, wanted, within, check)
            return scores / np.float32(highest), rows

        return find

    def _best(
        self, query: tantivy.Query, wanted: int, within: RowArray | None, check: Check
    ) -> ScoredRows:
        """Returns the best rows that are not deleted: as many as wanted, or all there are.

        If `within` is given, rows in ascending order, they are among these.
        """
        limit = wanted
        if self._deleted:
            limit += _DELETED + wanted * len(self._deleted) // self.count
        while True:
            limit = min(limit, self.count)
            hits = self._searcher.search(query, limit, count=False).hits
            addresses = [address for _, address in hits]
            rows = np.array(self._searcher.fast_field_values(_ROW, addresses), np.int64)
            rows += self._firsts[[address.segment_ord for address in addresses]]
            scores = np.array([score for score, _ in hits], np.float32)
            if within is None and not self._deleted:
                return scores, rows
            kept = np.array([row not in self._deleted for row in rows.tolist()], np.bool_)
            if within is not None:
                kept &= np.isin(rows, within, assume_unique=True)
            if len(hits) < limit or limit == self.count or np.count_nonzero(kept) >= wanted:
                return scores[kept][:wanted], rows[kept][:wanted]
            check()
            limit *= 2

    def _words(self, query: str) -> list[list[set[str]]]:
        """Returns for each word of a query the sets of terms of which a passage with it has one.

        A word of the term list is there if all terms of it, or of one that it means, are. The list
        is empty if no passage has all words.
        """
        parts = self.term_list.split(query) if self.term_list else [(query,)]
        words = []
        for part in parts:
            ways = [set(terms(text, characters=False)) for text in part]
            known = [way for way in ways if way and all(map(self.weight, way))]
            if known:
                words.append(known)
            elif any(ways):
                return []
        return words

    def _having(self, term: str, boost: float) -> tantivy.Query:
        query = tantivy.Query.term_query(self._schema, _TEXT, term, "freq")
        return query if boost == 1.0 else tantivy.Query.boost_query(query, boost)

    def idf(self, query: str) -> float:
        """Returns the sum of the idf of a query's terms and of those that a term list gives.

        Characters of Chinese words, and joined names beside their spelling, do not count. The terms
        of the list have the weight that they have in a search.
        """
        own = terms(query, characters=False, names=False)
        counted = self._meant(query) | dict.fromkeys(own, 1.0)
        return sum(self.weight(term) * boost for term, boost in counted.items())

    def _meant(self, query: str) -> dict[str, float]:
        """Returns the terms that a term list gives for a query, with their weight."""
        meant = self.term_list.matches(query) if self.term_list else ()
        return dict.fromkeys(terms("，".join(meant), characters=False), _MEANT_WEIGHT)

    def _conditions(
        self, selection: Selection, k: int, check: Check
    ) -> tuple[list[_Clause], RowArray | None]:
        """Returns what documents must and must not have to be selected, without a score.

        If a requirement is left out, as it costs more than the further hits of a search without it,
        the rows that are selected are returned as well.
        """
        within: RowArray | None = None
        if self._hashed:
            required = [(one.hashes, one.excluded) for one in selection.hashed(check) or ()]
            # Each value has a row, so about `k * count / hashes` hits have k of the rows.
            most = max(_MANY_HASHES, math.isqrt(k * self.count))
            fitting = [one for one in required if len(one[0]) <= most]
            if len(fitting) < len(required):
                required, within = fitting, selection.rows(check)
        else:
            positions = selection.labels() or ()
            required = [([*map(str, one.labels.tolist())], one.excluded) for one in positions]
        clauses: list[_Clause] = []
        for values, excluded in required:
            occur = tantivy.Occur.MustNot if excluded else tantivy.Occur.Must
            one = tantivy.Query.term_set_query(self._schema, _LABELS, values)
            clauses.append((occur, tantivy.Query.const_score_query(one, 0.0)))
        return clauses, within

    def _weight_of(self, term: str) -> float:
        return idf(self.count, self._searcher.doc_freq(_TEXT, term))


def _joined(occur: tantivy.Occur, queries: Sequence[tantivy.Query]) -> tantivy.Query:
    return tantivy.Query.boolean_query([(occur, query) for query in queries])


def idf(count: int, having: int) -> float:
    """Returns the idf of Lucene of a term that `having` of `count` documents have; 0 for none."""
    return math.log(1 + (count - having + 0.5) / (having + 0.5)) if having else 0.0


def _check(parts: Sequence[Part]) -> None:
    """Raises `IndexVersionError` if parts cannot be searched together."""
    for part in parts:
        if part.component.format != FORMAT:
            reason = f"has format {part.component.format} instead of {FORMAT}"
            raise _unreadable(part, reason)
        if len(parts) > 1 and not is_current(part.component):
            raise _unreadable(part, "is of an older release, and has to be the only one")


def _link(parts: Sequence[Part], target: Path) -> list[int]:
    """Makes one Tantivy index of links to the files of parts; returns the segments of each part.

    Tantivy numbers its segments, of which a part can have several, in the order of the parts.
    """
    contents: list[dict[str, Any]] = []
    number = 1
    for part in parts:
        content, names = _read_segments(part, number)
        folder = part.folder.absolute()
        for path in map(folder.joinpath, part.component.files):
            if path.stem in names:
                (target / f"{names[path.stem]}{path.suffix}").symlink_to(path)
        contents.append(content)
        number += len(names)
    segments = [content["segments"] for content in contents]
    composed = contents[0] | {"segments": list(chain.from_iterable(segments))}
    (target / _META).write_text(json.dumps(composed))
    return list(map(len, segments))


def _read_segments(part: Part, number: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what `_renumber` does, and before it the content of the part's meta.json."""
    try:
        content = json.loads((part.folder / FULL_TEXT / _META).read_bytes())
        names = _renumber(content, number)
        count = sum(segment["max_doc"] for segment in content["segments"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _unreadable(part, "is not a readable full-text index") from error
    if count != part.count:
        raise _unreadable(part, f"has {count} rows instead of {part.count}")
    return content, names


def _unreadable(part: Part, reason: str) -> IndexVersionError:
    source = part.folder / FULL_TEXT
    return IndexVersionError.at(source, f"{reason}: build the index again", "unreadable_full_text")


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field(_TEXT, tokenizer_name="whitespace", index_option="freq")
    builder.add_text_field(_LABELS, tokenizer_name="whitespace", index_option="basic")
    builder.add_integer_field(_ROW, indexed=True, fast=True)
    return builder.build()
