"""Builds and updates in separate processes, which can be killed or paused at a chosen point."""

import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from core.encoders import Encoding
from indexer.build import build
from indexer.publication import IndexWriter
from indexer.update import Changes, active_manifest, update
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options
from tests.indexer.commands import BATCH, watch_points

# Processes are forked from one that has imported all modules and has no threads.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.indexer.processes"])

Job = Callable[[Path, BigramEncoder], object]


def build_corpus(folder: Path, encoder: BigramEncoder) -> int:
    """Builds index 'test' from `corpus.jsonl`; returns how many texts need no encoding again."""
    options = build_options(folder, folder / "corpus.jsonl")
    _, encoded = build(options, encoder, BigramEncoder("query"))
    return encoded.summary.resumed_texts


def update_index(folder: Path, encoder: BigramEncoder) -> None:
    """Updates index 'test' with `new.jsonl` and `ids.txt`."""
    options = build_options(folder, Path("unread"))
    changes = Changes(str(folder / "new.jsonl"), folder / "ids.txt", missing_ok=True)
    base = active_manifest(IndexWriter(options.indexes, options.name))
    update(options, changes, base, encoder, BigramEncoder("query"))


def count_points(job: Job, folder: Path) -> int:
    """Runs a job and returns the number of points at which it can be killed."""
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(job, folder, None, there))
    process.start()
    points: int = here.recv()
    process.join()
    assert process.exitcode == 0
    return points


def kill_at(job: Job, folder: Path, point: int) -> None:
    """Runs a job and kills it with SIGKILL at a point, from 1."""
    process = _CONTEXT.Process(target=_work, args=(job, folder, point, None))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


class PausedJob:
    """A job that pauses in its first batch; a context manager that resumes it at its end."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._pipe, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_wait, args=(job, folder, there))

    def __enter__(self) -> None:
        self._process.start()
        self._pipe.recv()

    def __exit__(self, *_: object) -> None:
        self._pipe.send("resume")
        self._process.join()
        assert self._process.exitcode == 0


class _AuditedEncoder(BigramEncoder):
    def __init__(self, folder: Path) -> None:
        super().__init__("document")
        self._folder = folder

    def encode(self, texts: Sequence[str]) -> Encoding:
        sys.audit(BATCH, str(self._folder))
        return super().encode(texts)


class _WaitingEncoder(BigramEncoder):
    def __init__(self, pipe: Connection) -> None:
        super().__init__("document")
        self._pipe = pipe

    def encode(self, texts: Sequence[str]) -> Encoding:
        if not self.texts_seen:
            self._pipe.send("paused")
            self._pipe.recv()
        return super().encode(texts)


def _work(job: Job, folder: Path, point: int | None, pipe: Connection | None) -> None:
    points = watch_points(folder, kill=point or 0)
    job(folder, _AuditedEncoder(folder))
    if pipe:
        pipe.send(points())


def _wait(job: Job, folder: Path, pipe: Connection) -> None:
    job(folder, _WaitingEncoder(pipe))
