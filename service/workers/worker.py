"""A worker: a process that serves the versions which its supervisor names."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from core.errors import CareError
from search.snapshot import Snapshot
from service.app import Shared, create_app
from service.catalog import OpenVersion
from service.errors import shown
from service.http.listener import Listener
from service.observe.metrics import Metrics
from service.server import run, set_up_process
from service.settings import read_settings
from service.workers.cache import WorkerCache
from service.workers.memory import SharedMemory
from service.workers.messages import (
    Abort,
    Activate,
    Activated,
    Failed,
    Load,
    Loaded,
    Prepare,
    Prepared,
    Reload,
    Reloaded,
    Serving,
    Started,
    ToSupervisor,
    ToWorker,
)
from stores.faiss.search import limit_threads

# How often a worker shows that its event loop runs [s].
BEAT = 0.5
_PR_SET_PDEATHSIG = 1


class Supervision:
    """The supervisor, as a worker sees it."""

    def __init__(
        self,
        memory: SharedMemory,
        connection: "Connection[ToSupervisor, ToWorker]",
        writer: str,
    ) -> None:
        self.memory = memory
        self._writer = writer
        self.metrics: Metrics = memory.metrics()
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = count()
        self._reloads: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Loads the active version of an index that is open, when another worker has loaded it.
        self.load: Callable[[str, int | None], Coroutine[Any, Any, None]] = _load_nothing

    def send(self, message: ToSupervisor) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self) -> ToWorker:
        """Waits for a message; EOFError if the supervisor has ended."""
        return self._connection.recv()

    async def reload(self, index: str = "", number: int | None = None) -> None:
        """Lets all workers load the active version of an index, by default of the default one.

        Of the default one all serve it, or none does; of others each worker that can. With a
        number, none is loaded where the version with this number or a later one is served.
        """
        request = next(self._numbers)
        self._reloads[request] = reloaded = asyncio.get_running_loop().create_future()
        try:
            self.send(Reload(request, index, number))
            await reloaded
        finally:
            del self._reloads[request]

    def reloaded(self, request: int, error: Exception | None) -> None:
        """Notes that this is done, or why not; must be called on the event loop."""
        reloaded = self._reloads.get(request)
        if reloaded and not reloaded.done():
            reloaded.set_exception(error) if error else reloaded.set_result(None)

    def load_for_others(self, asked: Load) -> None:
        """Loads the active version of an index, and answers; must be called on the event loop."""

        async def load() -> None:
            failure = None
            try:
                await self.load(asked.index, asked.number)
            except Exception as error:
                failure = shown(error)
            self.send(Loaded(asked.request, failure))

        task = asyncio.get_running_loop().create_task(load())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def beat(self) -> None:
        """Shows that the event loop runs, and what the gauges follow, until it is cancelled."""
        while True:
            self.metrics.update()
            self.memory.beat()
            await asyncio.sleep(BEAT)

    def shared(self) -> Shared:
        """Returns what this worker shares with the others."""
        memory = self.memory
        return Shared(
            is_first=memory.worker == 0,
            metrics=self.metrics,
            usages=memory.usages,
            buckets=memory.buckets,
            secret=memory.secret,
            cache=partial(WorkerCache, table=memory.table),
            serve=partial(SupervisedIndex, self),
            tell_others=self.reload,
            writer=self._writer,
            beat=self.beat,
        )


class SupervisedIndex:
    """The version that all workers serve: the supervisor says which, and when.

    It waits for the first one. `open_version` opens the version in a folder.
    """

    def __init__(self, supervision: Supervision, open_version: OpenVersion) -> None:
        self._supervision = supervision
        self._open = open_version
        self._opened: Snapshot | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Called in the event loop after another version is served.
        self.on_change: Callable[[Snapshot], None] = lambda _: None
        self.index: Snapshot
        self._first = threading.Event()
        supervision.send(Started())
        threading.Thread(target=self._follow, name="supervision", daemon=True).start()
        self._first.wait()

    @property
    def is_active(self) -> bool:
        """Whether the active version is served; false if it could not be loaded."""
        return not self._supervision.memory.fallback

    async def reload(self, number: int | None = None) -> Snapshot:
        """Lets all workers serve the active version; if one cannot, all keep the one before."""
        await self._supervision.reload(number=number)
        return self.index

    async def watch(self, every: float) -> None:
        """Lets the supervisor find the event loop; it is the supervisor that watches the index."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Does nothing: the thread that follows the supervisor ends with the process."""

    def _follow(self) -> None:
        """Does what the supervisor says until it ends, which ends this process."""
        limit_threads()
        while True:
            try:
                message = self._supervision.receive()
            except (EOFError, OSError):
                os._exit(1)
            match message:
                case Prepare(folder):
                    self._supervision.send(self._prepare(folder))
                case Abort():
                    self._opened = None
                case Activate():
                    self._activate()
                    self._supervision.send(Activated())
                case Reloaded(request, error):
                    self._on_loop(self._supervision.reloaded, request, error)
                case Load(request) if self._loop is None:  # no index is open yet
                    self._supervision.send(Loaded(request))
                case Load():
                    self._on_loop(self._supervision.load_for_others, message)

    def _prepare(self, folder: Path) -> Prepared:
        try:
            old = self.index if self._first.is_set() else None
            self._opened = self._open(folder, verified=True, old=old)
        except Exception as error:
            return Prepared(shown(error))
        return Prepared()

    def _activate(self) -> None:
        opened, self._opened = self._opened, None
        assert opened
        if not self._first.is_set():
            self.index = opened
            self._first.set()
            return
        # Files that are closed block the event loop, so this thread holds the old version longer.
        old = self.index
        self._on_loop(self._switch, opened)
        del old

    def _switch(self, opened: Snapshot) -> None:
        self.index = opened
        self.on_change(opened)

    def _on_loop(self, work: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the event loop, or here before there is one, and waits for it."""
        if self._loop is None:
            work(*arguments)
            return
        done = threading.Event()

        def call() -> None:
            try:
                work(*arguments)
            finally:
                done.set()

        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(call)
            done.wait()


async def _load_nothing(index: str, number: int | None) -> None:
    """Does nothing: no index is open yet."""


def main(
    writer: str, worker: int, workers: int, memory: int, socket: int, connection: int, parent: int
) -> None:
    """Runs a worker.

    Its arguments are the socket of the writer process, its number, that of all, three descriptors,
    and the id of its parent.
    """
    # The kernel ends this process when the supervisor ends, however that is.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    settings = read_settings()
    set_up_process(settings)
    shared = SharedMemory(memory, workers, worker, settings.cache_entries)
    shared.start()
    supervision = Supervision(shared, Connection(connection), writer)
    try:
        app = create_app(settings, shared=supervision.shared())
        supervision.load = app.state.service.catalog.look
        listener = Listener.of(socket)
        run(app, listener, lambda url: supervision.send(Serving(url)))
    except CareError as error:
        supervision.send(Failed(error))
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
