"""The writer of a service in a thread, with a live index that tests can hold."""

import asyncio
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from care.writer import Writer
from core.errors import CareError
from core.writes import Write, Written
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from tests.encoders import BigramEncoder


class HeldLive:
    """A live index with the test encoder.

    Each commit waits until `hold` is set; `commits` has the numbers of requests of each. If there
    is a `failure`, each request gets it.
    """

    def __init__(self, folder: Path) -> None:
        index = IndexWriter(folder / "indexes", "test")
        self._live = LiveIndex(index, BigramEncoder("document"))
        self.hold = threading.Event()
        self.hold.set()
        self.began = threading.Event()
        self.commits: list[int] = []
        self.writes: list[Write] = []
        self.failure: CareError | None = None

    def open(self, name: str) -> "HeldLive":
        return self

    def create(self, name: str, like: str, fields: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def delete(self, name: str) -> dict[str, Any]:
        raise NotImplementedError

    def commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        self.commits.append(len(writes))
        self.writes += writes
        self.began.set()
        assert self.hold.wait(30)
        try:
            return [self.failure for _ in writes] if self.failure else self._live.commit(writes)
        except Exception:
            traceback.print_exc()  # the writer tells its log the kind only
            raise

    def merge(self) -> bool:
        return self._live.merge()

    @property
    def is_large(self) -> bool:
        return self._live.is_large


@contextmanager
def running_writer(folder: Path, writer: Writer) -> Iterator[str]:
    """Runs a writer in a thread, and yields the path of its socket."""
    path = folder / "writer"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    started, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with await asyncio.start_unix_server(writer.serve, sock=listening):
            started.set()
            await asyncio.to_thread(stop.wait)

    # `asyncio.run` also ends what the writer still does.
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(60)
    yield str(path)
    stop.set()
    thread.join()
