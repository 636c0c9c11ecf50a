"""Lets an index follow a folder of documents, whose files come, change and go."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import CareError, CorpusError
from core.files import read_small, write_text, writing_in
from core.locks import exclusive
from core.types import Document
from core.writes import Write, Written
from indexer.corpus import Location, Reading, corpus_files, read_corpus, warn_about_unread
from indexer.limits import max_text_chars
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.readers.process import ReaderProcess
from indexer.records import Reject

# How often the folder is looked at [s], at most this share of the time, and the pause after an
# error. A file is read when two looks find the same size and time of modification.
_EVERY, _SHARE, _RETRY = 1.0, 0.1, 10.0
# Documents of a commit: a search finds the first of many while the others are encoded.
_COMMIT_DOCUMENTS = 256
# Rejected records of a file that are named.
_NAMED = 5
_RECORD_BYTES = 1 << 30

_log = logging.getLogger(__name__)

# Time of the last modification [ns] and size [bytes].
_Stamp = tuple[int, int]
_Batch = list[tuple[Location, Document]]


@dataclass(slots=True)
class _File:
    """A file and the ids of its documents; it is read again if it has no stamp."""

    ids: set[str] = field(default_factory=set)
    stamp: _Stamp | None = None


@dataclass(slots=True)
class FolderChange:
    """What the files of one look have changed, in numbers of documents, and the version with it."""

    files: list[str] = field(default_factory=list)  # new, changed and gone
    added: int = 0
    replaced: int = 0
    deleted: int = 0
    unchanged: int = 0
    version: str = ""

    def add(self, written: Written) -> None:
        for name in ("added", "replaced", "deleted", "unchanged"):
            setattr(self, name, getattr(self, name) + getattr(written, name))
        self.version = written.version


class LiveFolder:
    """The documents of a folder in an index.

    A hidden file of the index says which documents are of which file. By it a later process finds
    what has changed meanwhile, and only documents that it names are ever deleted.
    """

    def __init__(
        self, live: LiveIndex, index: IndexWriter, folder: Path, reading: Reading, *, chunked: bool
    ) -> None:
        self._live, self._index, self._folder, self._reading = live, index, folder, reading
        self._most_chars = max_text_chars(chunked=chunked)
        key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._path = index.path / f".folder-{key}.json"
        self._known: dict[str, _File] = {}
        self._seen: dict[str, _Stamp] | None = None  # by the last look
        # Files that cannot be read, which are tried again when they change.
        self._failed: dict[str, _Stamp] = {}
        self._is_empty = self._is_large = False

    def watch(self) -> Iterator[FolderChange]:
        """Yields what has changed in the index, whenever it has, for ever.

        Raises:
            CorpusError: `corpus_missing`, if the folder is gone; no document is deleted then.
            CareError: `locked`, if another process watches the folder for this index.
        """
        with exclusive(self._index.path, "watch", f"{self._path.stem}.lock"):
            self._read_known()
            warn_about_unread(str(self._folder))
            last = ""
            while True:
                started = time.monotonic()
                pause = _EVERY
                try:
                    change = self.look()
                    last = ""
                    if change:
                        yield change
                        self._merge()
                        continue
                except (CareError, OSError) as error:
                    if not self._folder.is_dir():
                        raise
                    if str(error) != last:
                        _log.warning("%s: it is tried again every %d s", error, _RETRY)
                    last, pause = str(error), _RETRY
                time.sleep(max(pause, (time.monotonic() - started) / _SHARE))

    def look(self) -> FolderChange | None:
        """Writes what is new, changed or gone, and has been the same in the last two looks.

        CareError if it cannot be written; the next look tries it again.
        """
        found = self._scan()
        seen, self._seen = self._seen, found
        if seen is None:
            return None
        names = {*found, *self._known}
        steady = {name for name in names if found.get(name) == seen.get(name)}
        gone = sorted(steady - found.keys())
        if gone and not found:  # the folder may be a disk that is not mounted
            if not self._is_empty:
                _log.warning("%s has no files: their documents stay in the index", self._folder)
            gone = []
        self._is_empty = not found
        changed = [name for name in sorted(steady & found.keys()) if self._is_new(name, found)]
        change = FolderChange()
        if changed or gone:
            self._apply({name: found[name] for name in changed}, gone, change)
        return change if change.files else None

    def _is_new(self, name: str, found: Mapping[str, _Stamp]) -> bool:
        known = self._known.get(name)
        return found[name] not in (known and known.stamp, self._failed.get(name))

    def _apply(
        self, changed: Mapping[str, _Stamp], gone: Sequence[str], change: FolderChange
    ) -> None:
        """Adds the documents of changed files, then deletes those that are in no file any more."""
        read: dict[str, _File] = {}
        batch: _Batch = []
        with ReaderProcess() as process:
            for name, stamp in changed.items():
                now = _File(stamp=stamp)
                self._failed.pop(name, None)
                # An error of a commit is none of the file, which is then read again.
                for location, document in self._readable(name, stamp, process):
                    if len(batch) == _COMMIT_DOCUMENTS:
                        self._commit(batch, (), change)
                        batch = []
                    batch.append((location, document))
                    now.ids.add(document.id)
                    known = self._known.setdefault(name, _File())
                    known.ids.add(document.id)
                    known.stamp = None
                    change.files.append(name)
                if name not in self._failed:
                    read[name] = now
        files = {name: file for name, file in self._known.items() if name not in gone} | read
        before = [self._known[name].ids for name in (*read, *gone) if name in self._known]
        left = set().union(*before).difference(*(file.ids for file in read.values()))
        for name, file in files.items():
            if name not in read and not left.isdisjoint(file.ids):
                left -= file.ids
                files[name] = _File(file.ids)  # the index may have the document of the other file
        self._commit(batch, sorted(left), change)
        self._known = files
        self._write_known()
        change.files = sorted({*change.files, *read, *gone})

    def _readable(
        self, name: str, stamp: _Stamp, process: ReaderProcess
    ) -> Iterator[tuple[Location, Document]]:
        """Yields the documents of a file; it is not tried again as it is if it cannot be read."""
        try:
            yield from self._documents(name, process)
        except (CareError, OSError) as error:
            _log.warning("%s", error)
            self._failed[name] = stamp

    def _documents(self, name: str, process: ReaderProcess) -> Iterator[tuple[Location, Document]]:
        """Yields the documents of a file; the log has what is rejected.

        CareError at the end if records are rejected, so that no document is deleted.
        """
        rejected = 0
        path = self._folder / name
        for location, record in read_corpus(
            [path], self._most_chars, reading=self._reading, process=process
        ):
            if isinstance(record, Reject):
                rejected += 1
                if rejected <= _NAMED:
                    _log.warning("%s: %s", location, record.reason)
            else:
                yield location, record
        if rejected:
            reason = (
                f"has {rejected} rejected records: documents that it lacks stay until it has none"
            )
            raise CorpusError.at(path, reason, "too_many_rejects")

    def _commit(self, batch: _Batch, delete: Sequence[str], change: FolderChange) -> None:
        if not (batch or delete):
            return
        # Known before they are written: after a crash the next process knows them too.
        self._write_known()
        put = tuple(
            {"_id": one.id, "title": one.title, "text": one.text, "metadata": one.metadata}
            for _, one in batch
        )
        (written,) = self._live.commit([Write(self._index.name, put=put, delete=tuple(delete))])
        if isinstance(written, CareError):
            raise written
        for one in written.rejected:
            _log.warning("%s: %s", batch[one.position][0], one.reason)
        change.add(written)

    def _merge(self) -> None:
        try:
            self._live.merge()
            if self._live.is_large and not self._is_large:
                _log.warning("a fifth of the index has changed: care merge makes it faster again")
            self._is_large = self._live.is_large
        except CareError as error:
            if error.code != "locked":  # a build, which a later merge follows
                _log.warning("%s", error)

    def _scan(self) -> dict[str, _Stamp]:
        if not self._folder.is_dir():
            message = f"{self._folder} is not a folder or does not exist"
            raise CorpusError(message, code="corpus_missing", path=self._folder)
        files: list[Path] = []
        with suppress(CorpusError):  # there is none
            files = corpus_files(str(self._folder))
        found: dict[str, _Stamp] = {}
        for file in files:
            with suppress(OSError):  # it is gone
                status = file.stat()
                stamp = status.st_mtime_ns, status.st_size
                found[file.relative_to(self._folder).as_posix()] = stamp
        return found

    def _read_known(self) -> None:
        with suppress(OSError, ValueError):  # there is none
            listed = json.loads(read_small(self._path, _RECORD_BYTES))
            self._known = {
                name: _File(set(ids), stamp and (stamp[0], stamp[1]))
                for name, (ids, stamp) in listed.items()
            }

    def _write_known(self) -> None:
        listed = {name: (sorted(file.ids), file.stamp) for name, file in self._known.items()}
        with writing_in(self._index.path):
            write_text(self._path, json.dumps(listed, ensure_ascii=False))
