"""What the requests of a commit change, one after another, in the documents of a version."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from core.errors import CareError
from core.filters import meets
from core.text import document_text
from core.types import Document
from core.writes import (
    DOCUMENT_CHANGED,
    INVALID_RECORD,
    MUST_EXIST,
    MUST_NOT_EXIST,
    OUTSIDE_GRANT,
    Rejected,
    Write,
    Written,
    document_tag,
)
from indexer.chunking import Chunker, split_record
from indexer.limits import MAX_INDEX_FIELDS, max_text_chars
from indexer.records import Reject, parse_record, valid_id
from indexer.state import IndexState, contents, own_id
from stores.milvus.names import too_large

# Codes of rejected records, beside those of `core/writes.py`.
NOT_ENCODED, TOO_MANY_FIELDS, ID_IS_A_CHUNK = "not_encoded", "too_many_fields", "id_is_a_chunk"
TOO_LARGE = "too_large_for_milvus"

# The chunks of a document or, without chunking, the document.
Chunks = list[Document]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request whose records were checked."""

    write: Write
    put: list[Chunks | Reject]  # the chunks of each record, or why it is rejected
    patch: list[Document | Reject]  # the metadata of each pair as they are stored, or why not

    def documents(self) -> Iterator[Chunks]:
        """Yields the chunks of each valid record."""
        return (one for one in self.put if not isinstance(one, Reject))


def parse(write: Write, chunker: Chunker | None) -> Parsed:
    """Checks the records of a request by the rules of a corpus, and splits them into chunks."""
    most = max_text_chars(chunked=chunker is not None)
    return Parsed(
        write,
        [split_record(parse_record(record, most), chunker) for record in write.put],
        [
            parse_record({"_id": id_, "text": "-", "metadata": metadata}, most)
            for id_, metadata in write.patch
        ],
    )


@dataclass(slots=True)
class Outcome:
    """What a request changes; see `Written`."""

    added: int = 0
    replaced: int = 0
    deleted: int = 0
    unchanged: int = 0
    missing: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def written(self, version: str, number: int) -> Written:
        """Returns the result of the request, given the version that has its changes."""
        counts = self.added, self.replaced, self.deleted, self.unchanged
        return Written(version, number, *counts, tuple(self.missing), tuple(self.rejected))


@dataclass(frozen=True, slots=True)
class Changes:
    """What all requests of a commit change, by id."""

    new: dict[str, Chunks]  # documents that are new or differ
    removed: dict[str, range]  # rows of documents that are replaced or deleted
    sources: dict[str, range]  # rows of the documents that `new` ones replace

    def __bool__(self) -> bool:
        return bool(self.new or self.removed)


class Requests:
    """Applies requests to the documents of a version, each after those before it.

    `failed` says why texts cannot be encoded. `lacking` gets the chunks of a document and the rows
    of the one that it replaces, and returns the error for which they have no vectors, if any.
    """

    def __init__(
        self,
        state: IndexState,
        failed: dict[str, str],
        lacking: Callable[[Sequence[Document], range], CareError | None],
    ) -> None:
        self._state, self._failed, self._lacking = state, failed, lacking
        self._rows: dict[str, range] = {}
        # Documents after the requests so far, None if deleted, and those of the present request.
        self._after: dict[str, Chunks | None] = {}
        self._own: dict[str, Chunks | None] = {}
        self._fields = set(state.manifest.filter_fields)

    def apply(self, parsed: Parsed) -> Outcome | CareError:
        """Applies a request; if it fails as a whole, it changes nothing."""
        write, outcome = parsed.write, Outcome()
        ids = [own_id(chunks[0]) for chunks in parsed.documents()]
        ids += [*write.delete, *(id_ for id_, _ in write.patch)]
        self._rows |= self._state.find({id_ for id_ in ids if id_ not in self._rows})
        self._own = {}
        try:
            self._put(parsed, outcome)
            self._patch(parsed, outcome)
            self._delete(write, outcome)
        except CareError as error:
            return error
        self._after |= self._own
        return outcome

    def changes(self) -> Changes:
        """Returns what the requests so far change."""
        new, removed, sources = {}, {}, {}
        for id_, chunks in self._after.items():
            rows = self._rows.get(id_)
            if rows is None:
                if chunks is not None:
                    new[id_] = chunks
                continue
            if chunks is not None and contents(chunks) == contents(self._state.chunks(rows)):
                continue
            removed[id_] = rows
            if chunks is not None:
                new[id_] = chunks
                sources[id_] = rows
        return Changes(new, removed, sources)

    def _put(self, parsed: Parsed, outcome: Outcome) -> None:
        write = parsed.write
        for position, chunks in enumerate(parsed.put):
            if isinstance(chunks, Reject):
                found = valid_id(write.put[position])
                outcome.rejected.append(Rejected(position, found, INVALID_RECORD, chunks.reason))
                continue
            id_, old = own_id(chunks[0]), self._document(own_id(chunks[0]))
            if reason := self._unmatched(write, id_, old):
                outcome.rejected.append(Rejected(position, id_, DOCUMENT_CHANGED, reason))
            elif not all(self._visible(write, one) for one in (old, chunks) if one):
                reason = "the document, or the one that it replaces, is outside of what the key "
                reason += "may write"
                outcome.rejected.append(Rejected(position, id_, OUTSIDE_GRANT, reason))
            else:
                self._set(position, id_, chunks, old, outcome)

    def _patch(self, parsed: Parsed, outcome: Outcome) -> None:
        write = parsed.write
        for position, ((id_, _), checked) in enumerate(zip(write.patch, parsed.patch, strict=True)):
            if isinstance(checked, Reject):
                outcome.rejected.append(Rejected(position, id_, INVALID_RECORD, checked.reason))
                continue
            old = self._own_document(write, id_)
            if reason := self._unmatched(write, id_, old):
                outcome.rejected.append(Rejected(position, id_, DOCUMENT_CHANGED, reason))
            elif old is None:
                outcome.missing.append(id_)
            else:
                new = [replace(chunk, metadata=checked.metadata) for chunk in old]
                if self._visible(write, new):
                    self._set(position, id_, new, old, outcome)
                    continue
                reason = "the document would be outside of what the key may write"
                outcome.rejected.append(Rejected(position, id_, OUTSIDE_GRANT, reason))

    def _delete(self, write: Write, outcome: Outcome) -> None:
        for position, id_ in enumerate(write.delete):
            old = self._own_document(write, id_)
            if reason := self._unmatched(write, id_, old):
                outcome.rejected.append(Rejected(position, id_, DOCUMENT_CHANGED, reason))
            elif old is None:
                outcome.missing.append(id_)
            else:
                self._own[id_] = None
                outcome.deleted += 1
        if write.delete_where is None:
            return
        conditions = write.delete_where
        if write.within:
            conditions &= self._state.filters.check({}, write.within)
        rows = self._state.filters.rows(conditions).tolist()
        for row, stored in zip(rows, self._state.documents.read(rows), strict=True):
            document = stored.document()
            id_ = own_id(document)
            if document.chunk == 0 and id_ not in self._own and id_ not in self._after:
                self._rows[id_] = range(row, row + document.chunks)
                self._own[id_] = None
                outcome.deleted += 1
        for id_, chunks in (self._after | self._own).items():
            if chunks and meets(chunks[0].metadata, conditions):
                self._own[id_] = None
                outcome.deleted += 1

    def _set(
        self, position: int, id_: str, chunks: Chunks, old: Chunks | None, outcome: Outcome
    ) -> None:
        """Puts a document, unless it is equal to the old one or cannot be indexed."""
        if old is not None and contents(chunks) == contents(old):
            outcome.unchanged += 1
            return
        names = {name for name, value in chunks[0].metadata.items() if value is not None}
        if len(self._fields | names) > MAX_INDEX_FIELDS:
            reason = (
                f"the index would have more than {MAX_INDEX_FIELDS} metadata fields: use fewer "
            )
            reason += "names, and what differs between documents as values"
            outcome.rejected.append(Rejected(position, id_, TOO_MANY_FIELDS, reason))
            return
        for chunk in chunks:
            if reason := self._failed.get(document_text(chunk.title, chunk.text), ""):
                outcome.rejected.append(Rejected(position, id_, NOT_ENCODED, reason))
                return
            if self._state.manifest.store == "milvus" and (reason := too_large(chunk)):
                outcome.rejected.append(Rejected(position, id_, TOO_LARGE, reason))
                return
        if error := self._lacking(chunks, self._rows.get(id_, range(0))):
            raise error
        if self._taken(id_, chunks):
            reason = "the id of the document or of one of its chunks is that of another document "
            reason += "or chunk: rename it"
            outcome.rejected.append(Rejected(position, id_, ID_IS_A_CHUNK, reason))
            return
        self._fields |= names
        self._own[id_] = chunks
        if old is None:
            outcome.added += 1
        else:
            outcome.replaced += 1

    def _taken(self, id_: str, chunks: Chunks) -> bool:
        """Returns whether another document or chunk has the id of a document or of its chunks."""
        if not self._state.documents.chunked:
            return False
        names = {id_, *(chunk.id for chunk in chunks)}
        others = {**self._after, **self._own}
        for other, own in others.items():
            if other != id_ and own and not names.isdisjoint({other, *(c.id for c in own)}):
                return True
        taken = self._state.taken_ids([chunks])
        return any(others.get(other, ()) is not None for other in taken.values())

    def _document(self, id_: str) -> Chunks | None:
        for known in (self._own, self._after):
            if id_ in known:
                return known[id_]
        rows = self._rows.get(id_)
        return None if rows is None else self._state.chunks(rows)

    def _own_document(self, write: Write, id_: str) -> Chunks | None:
        """Returns a document if the caller may write it."""
        found = self._document(id_)
        return found if found and self._visible(write, found) else None

    def _visible(self, write: Write, chunks: Chunks) -> bool:
        """Returns whether a document is one of the caller's.

        As in a search, none is if no document has one of the fields of `within`.
        """
        if write.within is None:
            return True
        metadata = chunks[0].metadata
        known = self._fields | metadata.keys()
        return known.issuperset(dict(write.within.conditions)) and meets(metadata, write.within)

    @staticmethod
    def _unmatched(write: Write, id_: str, old: Chunks | None) -> str:
        """Returns why a document is not as the request requires it, or nothing."""
        wanted = write.if_match.get(id_)
        if wanted is None:
            return ""
        if wanted == MUST_NOT_EXIST:
            return "" if old is None else "the document exists"
        if old is None:
            return "the document does not exist"
        if wanted in (MUST_EXIST, document_tag(*old)):
            return ""
        return "the document has changed: read it again"
