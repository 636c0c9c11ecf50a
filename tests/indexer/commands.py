"""Commands on a small index in processes that are killed, paused, or run on a full disk.

Processes are forked from one that has imported all modules and has no threads.
"""

import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.errors import CareError
from core.terminal import run
from core.types import Query
from core.versions import IndexFolder
from core.writes import Write
from indexer import publication
from indexer.build import build
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import Changes, active_manifest, merge, update
from indexer.versions import activate, migrate, prune, rollback
from search.snapshot import load_index
from search.task import SearchTask
from tests.encoders import BigramEncoder
from tests.errors import error_code
from tests.indexer.builds import build_options

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.indexer.commands"])

# Events at which a process can be killed or paused, if they concern the folder of the test.
_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "fcntl.flock"}
# Instead of 10 s: the other command is paused, so it does not release the lock.
_WAIT = 0.1

_QUERY = Query("", top_k=3)


@dataclass(frozen=True, slots=True)
class Command:
    """A command on index 'test'.

    Attributes:
        name: build, update, rewrite, write, merge, activate, rollback, prune, migrate or load.
        argument: Number of the corpus, id of the version, or number of versions to keep.
        days: How far the clock is set forward.
        room: Maximum size of a file, to simulate a full disk [bytes].
    """

    name: str
    argument: Any = None
    days: int = 0
    room: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: Exit status; None if it was killed.
        value: For status 0 the result: an id, or the ids of deleted versions.
        code: For status 1 the code of the error; for others the traceback.
        points: Number of points at which it could have been killed or paused.
    """

    status: int | None
    value: Any = None
    code: str = ""
    points: int = 0


def perform(folder: Path, command: Command) -> Any:
    """Runs a command in this process and returns its result."""
    indexes, builds = folder / "indexes", folder / "builds"
    encoders = BigramEncoder("document"), BigramEncoder("query")
    match command.name:
        case "build":
            options = build_options(folder, folder / f"corpus-{command.argument}.jsonl")
            return build(options, *encoders)[0].version
        case "update" | "rewrite":
            options = build_options(folder, Path("unread"))
            base = active_manifest(IndexWriter(indexes, "test"))
            corpus, ids = str(folder / f"corpus-{command.argument}.jsonl"), folder / "ids.txt"
            deleted, rewrites = ids if ids.exists() else None, command.name == "rewrite"
            changes = Changes(corpus, deleted, missing_ok=True, encode_all=rewrites)
            updated = update(options, changes, base, *encoders)
            return updated and updated[0].version
        case "write":
            index = IndexWriter(indexes, "test")
            before = index.active()
            lines = (folder / f"corpus-{command.argument}.jsonl").read_text("utf-8").splitlines()
            put = json.loads(lines[-1]) | {"metadata": {"number": command.argument}}
            write = Write("test", put=(put,), delete=(json.loads(lines[0])["_id"],))
            (written,) = LiveIndex(index, encoders[0]).commit([write])
            if isinstance(written, CareError):
                raise written
            return written.version if written.version != before else None
        case "merge":
            base = active_manifest(IndexWriter(indexes, "test"))
            merged = merge(build_options(folder, Path("unread")), base, *encoders)
            return merged and merged.version
        case "activate":
            return activate(IndexWriter(indexes, "test"), command.argument)
        case "rollback":
            return rollback(IndexWriter(indexes, "test"))
        case "prune":
            return prune(IndexWriter(indexes, "test"), builds, keep=command.argument)
        case "migrate":
            return migrate(IndexWriter(indexes, "test"))
        case _:
            snapshot = load_index(IndexFolder(indexes, "test"), encoders[1])
            vector = encoders[1].encode(["血压"]).vectors[0]
            SearchTask(snapshot=snapshot, query=_QUERY, vector=vector).search()
            return snapshot.manifest.version


class Process:
    """A command in its own process.

    Args:
        folder: Folder with `indexes`, `builds` and the corpora.
        command: The command.
        kill: Point at which it is killed with SIGKILL, from 1; 0 for none.
        pause: Point at which it pauses until `end` is called, from 1; 0 for none.
    """

    def __init__(self, folder: Path, command: Command, *, kill: int = 0, pause: int = 0) -> None:
        self._pipe, there = _CONTEXT.Pipe()
        arguments = (folder, command, kill, pause, there)
        self._process = _CONTEXT.Process(target=_work, args=arguments)
        self._process.start()
        there.close()
        self._received: Outcome | None = None

    def wait(self) -> None:
        """Waits until the process pauses or ends."""
        self._received = self._receive()

    def end(self) -> Outcome:
        """Lets a paused process continue, waits until it ends, and returns its outcome."""
        if not self._received:
            self._pipe.send("continue")
            self._received = self._receive()
        assert self._received
        self._process.join()
        return self._received

    def _receive(self) -> Outcome | None:
        try:
            received: Outcome | None = self._pipe.recv()
        except EOFError:
            self._process.join()
            assert self._process.exitcode == -signal.SIGKILL
            return Outcome(None)
        return received


def execute(folder: Path, command: Command, *, kill: int = 0) -> Outcome:
    """Runs a command in its own process and returns its outcome."""
    process = Process(folder, command, kill=kill)
    process.wait()
    return process.end()


def watch_points(
    folder: Path, *, kill: int = 0, pause: int = 0, pipe: Connection | None = None
) -> Callable[[], int]:
    """Kills or pauses this process before an event that concerns a folder.

    Args:
        folder: The folder.
        kill: Number of the event, from 1, before which the process gets SIGKILL; 0 for none.
        pause: Number of the event before which the process sends None and waits for an answer.
        pipe: Where it sends and waits.

    Returns:
        A function that returns the number of events so far.
    """
    points = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal points
        if event not in _EVENTS or not _concerns(folder, arguments[0]):
            return
        points += 1
        if points == kill:
            path = Path(str(arguments[0]))
            # An unnamed file is opened by the name of its folder.
            if event == "open" and "w" in str(arguments[1]) and not path.is_dir():
                # The worst case: the file is truncated and nothing is written yet.
                path.write_bytes(b"")
            os.kill(os.getpid(), signal.SIGKILL)
        if points == pause and pipe:
            pipe.send(None)
            pipe.recv()

    sys.addaudithook(see)
    return lambda: points


def _work(folder: Path, command: Command, kill: int, pause: int, pipe: Connection) -> None:
    publication.CHANGE_WAIT = publication.BUILD_WAIT = _WAIT
    set_clock(timedelta(days=command.days))
    value = None

    def job() -> None:
        nonlocal value
        value = perform(folder, command)

    points = watch_points(folder, kill=kill, pause=pause, pipe=pipe)
    if command.room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command.room, resource.RLIM_INFINITY))
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            status = run(job)
        code = error_code(errors.getvalue()) if status else ""
    except BaseException:
        status, code = 2, traceback.format_exc()
    pipe.send(Outcome(status, value, code, points()))


def _concerns(folder: Path, argument: Any) -> bool:
    if isinstance(argument, int):
        argument = Path(f"/proc/self/fd/{argument}").readlink()
    return str(argument).startswith(str(folder))


def set_clock(forward: timedelta) -> None:
    """Sets the clock of all modules of this process that read it."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + forward

    for name, module in list(sys.modules.items()):
        if name.startswith(("core.", "indexer.")) and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted  # type: ignore[attr-defined]
