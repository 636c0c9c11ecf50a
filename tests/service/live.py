"""An index that takes writes, which it publishes as versions of the usual build."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from care.writer import Writer
from core.documents import FILE_NAME, DocumentReader
from core.errors import CareError
from core.types import Document
from core.writes import DOCUMENT_CHANGED, INVALID_RECORD, OUTSIDE_GRANT, Rejected, Write, Written
from core.writes import document_tag as tag_of
from indexer.build import BuildOptions
from indexer.publication import IndexWriter
from indexer.records import Reject, parse_record
from indexer.update import Changes, active_manifest, update
from tests.conftest import write_jsonl
from tests.encoders import BigramEncoder


def meets(document: Document, conditions: Any) -> bool:
    """Whether a document has an accepted value of each condition, the one kind of these tests."""
    return all(
        document.metadata.get(field) in condition.accepted
        for field, condition in (conditions.conditions if conditions else ())
    )


class FakeLive:
    """Applies writes to the documents of the active version, and builds the next one.

    `hold` delays each commit until it is set; `commits` has the numbers of requests of each.
    """

    def __init__(self, folder: Path, name: str = "test") -> None:
        self.options = BuildOptions(
            corpus="", name=name, indexes=folder / "indexes", builds=folder / "b", progress=False
        )
        self.folder = folder
        self.hold = threading.Event()
        self.hold.set()
        self.began = threading.Event()
        self.commits: list[int] = []
        self.writes: list[Write] = []
        self.failure: CareError | None = None

    def commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        self.commits.append(len(writes))
        self.writes += writes
        self.began.set()
        assert self.hold.wait(30)
        if self.failure:
            return [self.failure for _ in writes]
        base = active_manifest(IndexWriter(self.options.indexes, self.options.name))
        version = self.options.indexes / self.options.name / base.version
        before = {each.id: each for each in DocumentReader(version / FILE_NAME)}
        after = dict(before)
        results = [self._apply(write, after) for write in writes]
        if after != before:
            added = [
                {"_id": d.id, "title": d.title, "text": d.text, "metadata": d.metadata}
                for d in after.values()
                if before.get(d.id) != d
            ]
            path = str(write_jsonl(self.folder / "added.jsonl", added)) if added else None
            changes = Changes(path, [id_ for id_ in before if id_ not in after])
            encoders = BigramEncoder("document"), BigramEncoder("query")
            updated = update(self.options, changes, base, *encoders)
            assert updated
            base = updated[0]
        assert base.number
        return [Written(base.version, base.number, **result) for result in results]

    def _apply(self, write: Write, after: dict[str, Document]) -> dict[str, Any]:
        counts = dict.fromkeys(("added", "replaced", "deleted", "unchanged"), 0)
        missing, rejected = [], []

        def matches(id_: str) -> bool:
            wanted, found = write.if_match.get(id_), after.get(id_)
            if wanted is None:
                return True
            return not wanted if found is None else wanted in ("*", tag_of(found))

        def put(position: int, new: Document) -> None:
            old = after.get(new.id)
            if not matches(new.id):
                rejected.append(Rejected(position, new.id, DOCUMENT_CHANGED, "has changed"))
            elif not all(meets(each, write.within) for each in (old, new) if each):
                rejected.append(Rejected(position, new.id, OUTSIDE_GRANT, "is another's"))
            else:
                kind = "added" if old is None else "unchanged" if old == new else "replaced"
                counts[kind] += 1
                after[new.id] = new

        for position, record in enumerate(write.put):
            document = parse_record(record, 1000)
            if isinstance(document, Reject):
                rejected.append(Rejected(position, None, INVALID_RECORD, document.reason))
            else:
                put(position, document)
        for position, (id_, metadata) in enumerate(write.patch):
            if not matches(id_):
                rejected.append(Rejected(position, id_, DOCUMENT_CHANGED, "has changed"))
            elif old := self._visible(id_, write, after):
                put(position, Document(id_, old.text, old.title, metadata))
            else:
                missing.append(id_)
        chosen = [*write.delete]
        if write.delete_where:
            chosen += [d.id for d in after.values() if meets(d, write.delete_where)]
        for position, id_ in enumerate(chosen):
            if not matches(id_):
                rejected.append(Rejected(position, id_, DOCUMENT_CHANGED, "has changed"))
            elif self._visible(id_, write, after):
                counts["deleted"] += 1
                del after[id_]
            else:
                missing.append(id_)
        return {**counts, "missing": tuple(missing), "rejected": tuple(rejected)}

    def _visible(self, id_: str, write: Write, after: dict[str, Document]) -> Document | None:
        found = after.get(id_)
        return found if found and meets(found, write.within) else None


@contextmanager
def running_writer(folder: Path, writer: Writer) -> Iterator[str]:
    """Runs a writer in a thread, and yields the path of its socket."""
    path = folder / "writer"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def run() -> None:
        server = await asyncio.start_unix_server(writer.serve, sock=listening)
        started.set()
        async with server:
            await server.serve_forever()

    task = loop.create_task(run())

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    yield str(path)
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
