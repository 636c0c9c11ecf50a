"""Full text of an index version: BM25 over the terms of `core/analysis.py`, by Tantivy.

The files are in the folder `lexical` of the version and are memory-mapped. They are independent of
the store of the vectors: row i of the version is row i here.
"""

import json
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from uuid import UUID

import numpy as np
import tantivy
from pyroaring import BitMap

from core.analysis import terms
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import sha256_file, write_text
from core.filters import FilterReader, Selection
from core.manifest import FULL_TEXT, Component, FileRecord, IndexManifest
from core.progress import progress_bar
from core.scratch import temporary_folder
from core.terms import TermList
from core.text import document_text
from core.types import Check, no_check
from stores.base import ScoredRows
from stores.order import with_ties
from stores.term_list import USED, read_terms

FORMAT = 1
# Setting of the component: whether names have the terms that their spellings have in common.
_NAMES = "names"

# Fields of Tantivy's index: the terms, the labels of metadata values (core/filters.py), the row.
_TEXT, _LABELS, _ROW = "text", "labels", "row"
_Clause = tuple[tantivy.Occur, tantivy.Query]

# Parameter of BM25 in Tantivy, whose b is 0.75.
_K1 = 1.2
# Weight of the terms that a word of patients means, beside 1 for the words of the query. With 1
# they lose accuracy on questions that were reworded by rules (docs/evaluate.md).
_MEANT_WEIGHT = 0.5
# Terms whose weights are kept in memory.
_WEIGHTS = 1 << 16
# Further hits of a search, which show the rows with the score of the last one: among 300 hits they
# are 50 at most (14,950 passages).
_TIED = 64
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
    for path in target.iterdir():
        path.chmod(0o644)
    files = {
        f"{FULL_TEXT}/{path.name}": FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(target.iterdir())
    }
    return Component(format=FORMAT, files=files, settings={_NAMES: True})


def is_current(component: Component) -> bool:
    """Returns whether a full text has the terms of this release, not those of an older one."""
    return bool(component.settings.get(_NAMES))


def _write(
    target: Path, documents: DocumentReader, filters: FilterReader, *, progress: bool
) -> None:
    index = tantivy.Index(_schema(), str(target), reuse=False)
    # One thread writes rows in their order.
    writer = index.writer(heap_size=_HEAP, num_threads=1)
    offsets, labels = filters.labels_of_rows()
    with progress_bar("text", show=progress, total=len(documents)) as bar:
        for row, document in enumerate(documents):
            own = labels[offsets[row] : offsets[row + 1]].tolist()
            text = " ".join(terms(document_text(document.title, document.text)))
            new = tantivy.Document(text=text, labels=" ".join(map(str, own)), row=row)
            writer.add_document(new)
            bar.update()
    writer.commit()
    writer.wait_merging_threads()


def _rename_segments(target: Path) -> None:
    """Gives segments the names 1, 2, …; Tantivy's are random, and equal indexes would differ."""
    meta = target / "meta.json"
    content = json.loads(meta.read_bytes())
    for number, segment in enumerate(content["segments"], start=1):
        old, new = UUID(segment["segment_id"]), UUID(int=number)
        for path in target.glob(f"{old.hex}.*"):
            path.rename(path.with_name(new.hex + path.suffix))
        segment["segment_id"] = str(new)
    write_text(meta, json.dumps(content))


def open_full_text(
    parts: "Sequence[tuple[Path, IndexManifest]]", deleted: "BitMap | None" = None
) -> "LexicalIndex | None":
    """Opens the full text of a version, or returns None if it has none.

    Raises:
        IndexVersionError: If the files cannot be read, or do not have a row for each document.
    """
    folder, manifest = parts[0]
    component = manifest.components.get(FULL_TEXT)
    if component is None:
        return None
    opened = LexicalIndex(folder, component, read_terms(folder, manifest, USED))
    if opened.count != manifest.count:
        reason = f"has {opened.count} rows instead of {manifest.count}: build the index again"
        raise IndexVersionError.at(folder / FULL_TEXT, reason, "unreadable_full_text")
    return opened


class LexicalIndex:
    """The full text of one version; thread-safe.

    Args:
        term_list: Words of patients; a search also finds the terms that they mean.

    Attributes:
        weight: Returns the weight of a term in BM25: its idf, or 0 if no document has it.

    Raises:
        IndexVersionError: If the files cannot be read, or have another format.
    """

    def __init__(
        self,
        folder: Path,
        component: Component,
        term_list: TermList | None = None,
    ) -> None:
        source = folder / FULL_TEXT
        if component.format != FORMAT:
            reason = f"has format {component.format} instead of {FORMAT}: build the index again"
            raise IndexVersionError.at(source, reason, "unreadable_full_text")
        self._terms = partial(terms, names=is_current(component))
        self._term_list = term_list
        # Tantivy creates a lock file beside the files that it maps, and a version is immutable and
        # may be on a read-only disk. So it opens links to the files.
        temporary = ExitStack()
        weakref.finalize(self, temporary.close)
        links = temporary.enter_context(temporary_folder())
        for name in component.files:
            path = folder / name
            (links / path.name).symlink_to(path.absolute())
        try:
            index = tantivy.Index.open(str(links))
            index.config_reader(reload_policy="manual")
            self._searcher = index.searcher()
        except ValueError as error:
            reason = "is not a readable full-text index: build the index again"
            raise IndexVersionError.at(source, reason, "unreadable_full_text") from error
        self._schema = index.schema
        self.count: int = self._searcher.num_docs
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

        Args:
            query: Normalised text of the query.
            k: Number of hits, at least 1.
            selection: The rows that may be found, by conditions; None for all.
            check: Called before the search; stops it by an exception.
            characters: Whether single characters of Chinese words are searched for as well. Without
                them a search takes a third of the time.

        Returns:
            Scores from 0 to 1, float32 [m], and rows, int64 [m], best first: at most k of the rows
            that are selected and share a term with the query, and those with the score of the
            last one (`stores/order.py`).
        """
        check()
        own = self._terms(query, characters=characters)
        wanted = self._meant(query) | dict.fromkeys(own, 1.0)
        highest = (_K1 + 1) * sum(self.weight(term) * boost for term, boost in wanted.items())
        if not highest:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        any_term = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, self._having(term, boost)) for term, boost in wanted.items()]
        )
        search = any_term
        if selection:
            clauses = [(tantivy.Occur.Must, any_term), *self._conditions(selection)]
            search = tantivy.Query.boolean_query(clauses)

        def find(wanted: int) -> ScoredRows:
            hits = self._searcher.search(search, wanted, count=False).hits
            rows = self._searcher.fast_field_values(_ROW, [address for _, address in hits])
            scores = np.array([score for score, _ in hits], np.float32)
            return scores / np.float32(highest), np.array(rows, np.int64)

        return with_ties(find, k, k + _TIED, self.count)

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
        meant = self._term_list.matches(query) if self._term_list else ()
        return dict.fromkeys(self._terms("，".join(meant), characters=False), _MEANT_WEIGHT)

    def _conditions(self, selection: Selection) -> list[_Clause]:
        """Returns what documents must and must not have to be selected, without a score."""
        clauses: list[_Clause] = []
        for required in selection.labels() or ():
            occur = tantivy.Occur.MustNot if required.excluded else tantivy.Occur.Must
            labels = [str(label) for label in required.labels.tolist()]
            one = tantivy.Query.term_set_query(self._schema, _LABELS, labels)
            clauses.append((occur, tantivy.Query.const_score_query(one, 0.0)))
        return clauses

    def _weight_of(self, term: str) -> float:
        # The idf of Lucene.
        having = self._searcher.doc_freq(_TEXT, term)
        return math.log(1 + (self.count - having + 0.5) / (having + 0.5)) if having else 0.0


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field(_TEXT, tokenizer_name="whitespace", index_option="freq")
    builder.add_text_field(_LABELS, tokenizer_name="whitespace", index_option="basic")
    builder.add_integer_field(_ROW, indexed=True, fast=True)
    return builder.build()
