"""Named points of a commit at which the processes of a service die or meet an error of the disk.

`Failpoints.environment` lets each Python process of a service import `sitecustomize`, which watches
its audit events, `os.fsync`, and the messages between processes. So the code under test has no
hooks. A point comes before the action that its name says. At an armed point, the first process that
reaches it kills itself, or the action fails with an error of the system.
"""

import errno
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

WRITER, WORKER, SERVICE = "writer", "worker", "service"
KILL = "kill"

_FOLDER, _ENCODER = "FAILPOINTS_FOLDER", "FAILPOINTS_ENCODER"
_VERSION = r"\d{8}T[\d.]+Z-"
_NEW = rf"/\.{_VERSION}w\w+\.new"
# Points of each kind of process, by what an audit event and a path have in them.
_ON_DISK = {
    WRITER: {
        "lock the index": ("open", r"/\.lock$"),
        "make the hidden folder": ("os.mkdir", rf"{_NEW}$"),
        "write the segment": ("open", rf"{_NEW}/segment\.pack$"),
        "write the deleted rows": ("open", rf"{_NEW}/deleted\.roaring$"),
        "write the manifest": ("open", rf"{_NEW}/manifest\.json$"),
        "write the checksum": ("open", rf"{_NEW}/manifest\.sha256$"),
        "flush a file": ("fsync", rf"{_NEW}/.+"),
        "flush the folder": ("fsync", rf"{_NEW}$"),
        "name the version": ("os.rename", rf"{_NEW}$"),
        "flush the names": ("fsync", r"/indexes/\w+$"),
        "write CURRENT": ("open", r"/\.CURRENT\.\w+\.tmp$"),
        "flush CURRENT": ("fsync", r"/\.CURRENT\.\w+\.tmp$"),
        "rename CURRENT": ("os.rename", r"/\.CURRENT\.\w+\.tmp$"),
        "lock for a merge": ("open", r"/\.build\.lock$"),
        "make the folder of a merge": ("os.mkdir", rf"/\.{_VERSION}joined\.tmp$"),
        "flush the merged segment": ("fsync", rf"/\.{_VERSION}joined\.tmp/.+"),
        "name the merged segment": ("os.rename", rf"/\.{_VERSION}joined\.tmp$"),
        "delete a version": ("os.rename", rf"/{_VERSION}w\w+$"),
        "keep only the segment": ("os.remove", rf"/{_VERSION}w\w+/manifest\.json$"),
        "remove the folder": ("os.rmdir", rf"/\.{_VERSION}\w+\.deleted$"),
    },
    SERVICE: {"verify the version": ("open", rf"/{_VERSION}w\w+/manifest\.json$")},
    WORKER: {"open the version": ("open", rf"/{_VERSION}w\w+/manifest\.json$")},
}
# Points before a message is sent, by the class of the message.
_MESSAGES = {
    WORKER: {
        "Reload": "ask for the version",
        "Prepared": "say that it is open",
        "Activated": "say that it is served",
        "Loaded": "say that it is loaded",
    },
    SERVICE: {
        "Prepare": "let a worker open it",
        "Activate": "let a worker serve it",
        "Load": "let a worker load it",
        "Reloaded": "say that all serve it",
    },
}
# Points before a worker and the writer send something to each other.
_SENT = {WORKER: "send the write", WRITER: "answer the worker"}
POINTS: dict[str, list[str]] = {
    WRITER: [*_ON_DISK[WRITER], _SENT[WRITER]],
    WORKER: [_SENT[WORKER], *_ON_DISK[WORKER], *_MESSAGES[WORKER].values()],
    SERVICE: [*_ON_DISK[SERVICE], *_MESSAGES[SERVICE].values()],
}
# Points at which the disk can fail, and how.
DISK_POINTS = list(_ON_DISK[WRITER])
DISK_ERRORS = ("ENOSPC", "EIO", "EROFS")


class Failpoints:
    """Arms points, and counts how often processes died there; its folder is empty at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "armed").mkdir(parents=True)

    def environment(self) -> dict[str, str]:
        """The variables of a service that is watched, which also has the test encoder."""
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(Path(__file__).parent), str(root)])
        return {_FOLDER: str(self._folder), _ENCODER: "1", "PYTHONPATH": path}

    def arm(self, point: str, action: str = KILL) -> None:
        """Lets the next process that reaches a point die, or meet an error such as ENOSPC."""
        (self._folder / f"{point}.new").write_text(action)
        (self._folder / f"{point}.new").rename(self._folder / "armed" / point)

    def disarm(self, point: str) -> bool:
        """Returns whether no process has reached an armed point; none will then."""
        try:
            (self._folder / "armed" / point).unlink()
        except FileNotFoundError:
            return False
        return True

    def is_armed(self, point: str) -> bool:
        """Whether no process has reached a point since it was armed."""
        return (self._folder / "armed" / point).exists()

    def hits(self) -> Counter[str]:
        """Returns how often what was armed has happened, by action and point."""
        try:
            return Counter((self._folder / "hits").read_text().splitlines())
        except FileNotFoundError:
            return Counter()


# What holds until the process ends.
_kept = ExitStack()


def install() -> None:
    """Watches this process, if it is one of a service that `Failpoints` watches."""
    folder = os.environ.get(_FOLDER)
    kind = _kind(sys.orig_argv)
    if not folder or not kind:
        return
    without_pandas()
    reach = watch_disk(Path(folder), kind)
    if kind in _SENT:
        _watch_writes(_SENT[kind], reach)
    if kind in _MESSAGES:
        _watch_messages(_MESSAGES[kind], reach)
    if os.environ.get(_ENCODER):
        _kept.enter_context(use_test_encoder())
        if kind == WRITER:
            merge_soon(3)


def _kind(command: list[str]) -> str:
    modules = {"care.writer": WRITER, "service.workers.worker": WORKER, "care": SERVICE}
    return next((modules[word] for word in command if word in modules), "")


def _reach(folder: Path) -> Callable[[str], None]:
    armed, hits = folder / "armed", folder / "hits"

    def reach(point: str) -> None:
        path = armed / point
        try:
            action = path.read_text()
            path.unlink()
        except FileNotFoundError:
            return
        file = os.open(hits, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{action} {point}\n".encode())
        os.close(file)
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, action)
        raise OSError(number, os.strerror(number), point)

    return reach


def watch_disk(folder: Path, kind: str = WRITER) -> Callable[[str], None]:
    """Watches the files of this process until it ends.

    Args:
        folder: That of the `Failpoints`.
        kind: What kind of process this is.

    Returns:
        What is to be called at other points.
    """
    points, reach = _ON_DISK[kind], _reach(folder)
    events = {event for event, _ in points.values()}
    wanted = [(event, re.compile(path), name) for name, (event, path) in points.items()]
    real = os.fsync

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in events:
            return
        path = str(arguments[0])
        for own, pattern, name in wanted:
            if own == event and pattern.search(path):
                reach(name)

    def fsync(file: int) -> None:
        see("fsync", (Path(f"/proc/self/fd/{file}").readlink(),))
        real(file)

    os.fsync = fsync
    sys.addaudithook(see)
    return reach


def _watch_writes(point: str, reach: Callable[[str], None]) -> None:
    from asyncio import StreamWriter

    real = StreamWriter.write

    def write(self: StreamWriter, data: bytes) -> None:
        reach(point)
        real(self, data)

    StreamWriter.write = write  # type: ignore[assignment, method-assign]


def _watch_messages(points: Mapping[str, str], reach: Callable[[str], None]) -> None:
    from multiprocessing.connection import Connection

    real = Connection.send

    def send(self: Any, message: Any) -> None:
        if point := points.get(type(message).__name__):
            reach(point)
        real(self, message)

    Connection.send = send  # type: ignore[method-assign]


@contextmanager
def use_test_encoder() -> Iterator[None]:
    """Lets this process load the test encoder in place of ONNX files in the block."""
    from models.encoders import factory, onnx
    from tests.encoders import BigramEncoder

    class Encoder(BigramEncoder):
        def __init__(self, spec: Any, *_: Any) -> None:
            super().__init__(spec.role, spec.embedding_space)

        def warm_up(self) -> None:
            """Does nothing."""

    modules: list[Any] = [factory, onnx]
    reals = [module.OnnxEncoder for module in modules]
    for module in modules:
        module.OnnxEncoder = Encoder
    try:
        yield
    finally:
        for module, real in zip(modules, reals, strict=True):
            module.OnnxEncoder = real


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def without_pandas() -> None:
    """Keeps pyarrow from importing pandas, if that is installed, which takes most of a second."""
    sys.meta_path.insert(0, _NoPandas())


def merge_soon(seconds: float) -> None:
    """Lets segments be merged and versions of writes be deleted soon, to reach the points of that.

    Args:
        seconds: How long versions are kept.
    """
    from indexer.live import index, joining

    index.KEPT, joining.TIER = timedelta(seconds=seconds), 3
