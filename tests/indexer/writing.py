"""A writer in a process that dies, or meets errors of the disk, at the points of a commit.

`python -m tests.indexer.writing --rounds 20 --seed 1` prints how often each point was taken.
"""

import argparse
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from core.errors import CareError
from core.types import Query
from core.writes import Write, Written
from indexer.build import build
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from search.snapshot import load_index
from search.task import SearchTask
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.failpoints import (
    DISK_ERRORS,
    DISK_POINTS,
    KILL,
    Failpoints,
    merge_soon,
    watch_disk,
    without_pandas,
)
from tests.indexer.builds import build_options
from tests.indexer.commands import set_clock

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.indexer.writing"])
# Commits until a point is reached, also those of merges.
_COMMITS = 16
_DAYS = (0, 0, 0, -400, 400)

# Text and metadata of documents, by id.
Documents = Mapping[str, tuple[str, Any]]


class WritingProcess:
    """A process that commits writes to index 'test' and merges its segments.

    Args:
        folder: Folder with `indexes`.
        failpoints: Folder of the points that it watches, if any.
        days: How far its clock is set forward.
    """

    def __init__(self, folder: Path, failpoints: Path | None = None, days: int = 0) -> None:
        self._pipe, there = _CONTEXT.Pipe()
        arguments = folder, failpoints, days, there
        self._process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        there.close()

    def commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        """Returns what `LiveIndex.commit` returns; EOFError if the process dies."""
        self._pipe.send(writes)
        results: list[Written | CareError] = self._pipe.recv()
        return results

    def merge(self) -> str:
        """Merges segments; returns the code of an error. EOFError if the process dies."""
        self._pipe.send(None)
        return str(self._pipe.recv())

    def limit(self, room: int) -> None:
        """Limits the size of files, to simulate a full disk [bytes]."""
        limits = room, resource.RLIM_INFINITY
        resource.prlimit(self._process.pid or 0, resource.RLIMIT_FSIZE, limits)

    def end(self) -> None:
        """Ends the process, if it has not been killed."""
        self._pipe.close()
        self._process.join()
        assert self._process.exitcode in (0, -signal.SIGKILL)


def _work(folder: Path, failpoints: Path | None, days: int, pipe: Connection) -> None:
    without_pandas()
    set_clock(timedelta(days=days))
    merge_soon(0)
    index = IndexWriter(folder / "indexes", "test")
    live: LiveIndex | None = None
    if failpoints:
        watch_disk(failpoints)
    while True:
        try:
            writes = pipe.recv()
        except EOFError:
            return
        try:
            live = live or LiveIndex(index, BigramEncoder("document"))
            pipe.send(live.commit(writes) if writes else live.merge() * "")
        except CareError as error:  # as `care.writer` does
            live = None
            pipe.send([error] * len(writes) if writes else error.code)


def make_index(folder: Path) -> Documents:
    """Builds index 'test' of some documents, and returns them."""
    records = make_records(12)
    options = build_options(folder, write_jsonl(folder / "corpus.jsonl", records))
    build(options, BigramEncoder("document"), BigramEncoder("query"))
    return {one["_id"]: (one["text"], one["metadata"]) for one in records}


def content(folder: Path) -> Documents:
    """Returns the documents of an index; each is found by its text and by its vector."""
    encoder = BigramEncoder()
    snapshot = load_index(IndexWriter(folder / "indexes", "test"), encoder)
    found = {one.id: one for one in snapshot.segment.documents}
    for one in list(found.values())[-3:]:
        vector = encoder.encode([f"{one.title}\n{one.text}".strip()]).vectors[0]
        for mode in ("dense", "lexical"):
            query = Query(one.text, top_k=20, mode=mode)
            task = SearchTask(snapshot=snapshot, query=query, vector=vector)
            assert one.id in [hit.id for hit in task.search().hits], (mode, one)
    return {id_: (one.text, one.metadata) for id_, one in found.items()}


def random_write(random: Random, number: int) -> Write:
    """Returns a write of a few documents out of forty."""

    def id_() -> str:
        return f"d{random.randrange(40):04d}"

    metadata = {"number": number}
    put = [{"_id": id_(), "text": f"第{number}次写入{i}", "metadata": metadata} for i in range(2)]
    kinds = {"put": tuple(put), "patch": ((id_(), metadata),), "delete": (id_(),)}
    chosen = random.sample(sorted(kinds), random.choice((1, 1, 2)))
    return Write("test", **{kind: kinds[kind] for kind in chosen})  # type: ignore[arg-type]


def after(documents: Documents, write: Write) -> Documents:
    """Returns the documents after a write."""
    new = dict(documents)
    for one in write.put:
        new[one["_id"]] = one["text"], one["metadata"]
    for id_, metadata in write.patch:
        if id_ in new:
            new[id_] = new[id_][0], metadata
    for id_ in write.delete:
        new.pop(id_, None)
    return new


class Writing:
    """An index that is written by one process after another.

    Attributes:
        documents: Those that the index has.
        hits: How often each point was taken.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.documents = make_index(folder)
        self._folder, self._random = folder, Random(seed)
        self._failpoints = folder / "failpoints"
        self._points = Failpoints(self._failpoints)
        self._number = 0

    @property
    def hits(self) -> Counter[str]:
        return self._points.hits()

    def take(self, point: str, action: str) -> bool:
        """Lets an action happen at a point; returns whether that was reached.

        Asserts that the index then has what was acknowledged, and all of what was not or nothing.
        """
        process = WritingProcess(self._folder, self._failpoints, self._random.choice(_DAYS))
        self._points.arm(point, action)
        for _ in range(_COMMITS):
            self._commit(process)
            if not self._points.is_armed(point):
                break
        reached = not self._points.disarm(point)
        if action != KILL:  # it goes on
            self._commit(process, fails=False)
        assert content(self._folder) == self.documents
        process.end()
        return reached

    def _commit(self, process: WritingProcess, *, fails: bool = True) -> None:
        self._number += 1
        write = random_write(self._random, self._number)
        new = after(self.documents, write)
        possible = [self.documents, new]
        try:
            (result,) = process.commit([write])
            if isinstance(result, Written):
                self.documents, possible = new, [new]
                if not process.merge():
                    return
            assert fails and (isinstance(result, Written) or result.code == "input_output"), result
        except (EOFError, BrokenPipeError):
            pass
        self.documents = content(self._folder)
        assert self.documents in possible, (write, self.documents, possible)


def unneeded(folder: Path) -> set[str]:
    """Returns the names in the folder of an index that no version needs."""
    index = IndexWriter(folder / "indexes", "test")
    names = {path.name for path in index.path.iterdir()} - {"CURRENT", ".lock", ".build.lock"}
    manifests = index.manifests()
    needed = {one.version for one in manifests}
    return names - needed - {entry.folder for one in manifests for entry in one.segments}


def main() -> int:
    """Takes each point as often as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rounds", 20), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with TemporaryDirectory(prefix="writing-", dir=memory) as folder:
        writing = Writing(Path(folder), given.seed)
        for number in range(given.rounds):
            for point in DISK_POINTS:
                for action in (KILL, DISK_ERRORS[number % len(DISK_ERRORS)]):
                    writing.take(point, action)
        print(json.dumps(dict(sorted(writing.hits.items())), indent=1))
        print(f"{sum(writing.hits.values())} faults, {writing._number} commits, seed {given.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
