"""The supervisor: starts workers, lets all serve one version, and replaces those that end."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from core.errors import CareError, IndexVersionError
from core.machine import available_cpus, available_memory
from core.manifest import IndexManifest
from core.verification import verify_files
from core.versions import IndexFolder, Part, opening, read_manifest
from models.pairs import load_pair
from search.version_files import VersionFiles
from service.errors import shown
from service.http.listener import Listener
from service.observe.logs import configure_logs
from service.pipeline.served_index import ServedIndex, open_store
from service.settings import Settings, warn_of_settings
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
from service.writer_process import WriterProcess

_LOG = logging.getLogger("care.service")
# A worker whose event loop has not run for this long is stuck, and is replaced [s].
_SILENCE = 10.0
_LOOK_EVERY = 1.0
# How long a worker may take to switch to a version that it has opened [s].
_SWITCH = 2.0
# Starts of one worker that fail, one after another, before the service ends.
_STARTS = 3
# The import of model libraries takes minutes if their files are not in the page cache [s].
_START = 180.0
# Workers end within 9 s after their drain time, or are killed [s].
_END = 12.0
# Memory of a worker besides its encoder and the files of the index, which all share [bytes], and
# that of the encoder as a multiple of its file: ONNX Runtime keeps rearranged weights.
_WORKER_BYTES, _ENCODER_FACTOR = 128 << 20, 2


@dataclass(frozen=True, slots=True)
class Verified:
    """A version whose files are verified, and which all workers have open."""

    files: VersionFiles  # before they were verified
    manifest: IndexManifest
    parts: list[Part]  # its segments


class _Worker:
    """A worker process and the connection to it."""

    def __init__(
        self,
        number: int,
        process: "subprocess.Popen[bytes]",
        connection: "Connection[ToWorker, ToSupervisor]",
    ) -> None:
        self.number, self.process, self.connection = number, process, connection
        loop = asyncio.get_running_loop()
        # Done when it has loaded all but a version, or has ended.
        self.started: asyncio.Future[None] = loop.create_future()
        # The URL, once it accepts connections; or why it ended before.
        self.serving: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()  # done when the process has ended
        self.failure: Exception | None = None
        self._numbers = count()
        self._loading: dict[int, asyncio.Future[Exception | None]] = {}
        self._asking = asyncio.Lock()
        self._answer: asyncio.Future[Exception | None] | None = None

    @property
    def serves(self) -> bool:
        """Whether it accepts connections."""
        return self.serving.done() and not self.gone.done()

    async def ask(self, message: ToWorker) -> Exception | None:
        """Sends a message, waits until it is done, and returns the error if it failed."""
        async with self._asking:
            if self.gone.done():
                return self.failure
            self._answer = asyncio.get_running_loop().create_future()
            self.send(message)
            return await self._answer

    async def load(self, index: str, number: int | None) -> Exception | None:
        """Lets the worker load an index if it has it open, and returns why it cannot."""
        request = next(self._numbers)
        self._loading[request] = loaded = asyncio.get_running_loop().create_future()
        self.send(Load(request, index, number))
        return None if self.gone.done() else await loaded

    def loaded(self, request: int, error: Exception | None) -> None:
        """Notes that this is done, or why not."""
        self._loading.pop(request).set_result(error)

    def send(self, message: ToWorker) -> None:
        """Sends a message, unless the worker has ended."""
        with suppress(OSError):
            self.connection.send(message)

    def answered(self, error: Exception | None) -> None:
        """Notes that what the worker was asked for is done, or why not."""
        if self._answer and not self._answer.done():
            self._answer.set_result(error)

    def ended(self, status: int) -> None:
        if self.failure is None:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            self.failure = IndexVersionError(f"a worker ended {how}", code="worker_ended")
        self.gone.set_result(None)
        self.answered(self.failure)
        for request in list(self._loading):
            self.loaded(request, None)  # the worker in its place opens the active version
        if not self.started.done():
            self.started.set_result(None)
        if not self.serving.done():
            self.serving.set_exception(self.failure)
            self.serving.exception()  # not every start is waited for
        self.connection.close()


def choose_workers(settings: Settings) -> tuple[int, str]:
    """Returns how many workers are to serve, and why; CareError for several without Linux."""
    if not hasattr(os, "memfd_create"):
        if (settings.workers or 1) > 1:
            message = (
                "several workers share memory and a port as only Linux can: set CARE_WORKERS=1"
            )
            raise CareError(message, code="needs_linux")
        return 1, "several workers need Linux"
    if settings.workers:
        return settings.workers, "as set"
    if settings.provider != "cpu" or settings.faiss_device != "cpu":
        return 1, "the encoder or FAISS runs on a GPU"
    processors = available_cpus()
    memory = available_memory() // 2 // _worker_bytes(settings)
    if memory < processors:
        return max(1, memory), "half of the memory has room for as many"
    return processors, "one for each processor"


def _worker_bytes(settings: Settings) -> int:
    """Returns about the memory that a further worker takes [bytes]."""
    size = 0
    for name in filter(None, (settings.pair, settings.overflow_pair)):
        with suppress(CareError, OSError):  # a worker says what is wrong with a pair
            pair = load_pair(name, settings.pairs)
            size += (pair.folder / pair.query.weights).stat().st_size
    return _WORKER_BYTES + _ENCODER_FACTOR * size


def supervise(
    settings: Settings, workers: int, reason: str, announce: Callable[[str], None]
) -> None:
    """Runs the service in several worker processes until SIGINT or SIGTERM.

    `reason` says in the log why as many; `announce` gets the URL once all workers serve.
    """
    configure_logs(settings.log_level)
    listeners, name = Listener.group(settings.host, settings.port, workers)
    warn_of_settings(settings)
    with name, WriterProcess() as writer:
        asyncio.run(_Supervisor(settings, listeners, reason, announce, writer).run())


class _Supervisor:
    """Owns the sockets, the workers, and the version that they serve.

    All methods but `_open` and `_follow` must be called on the event loop.
    """

    _served: ServedIndex[Verified]

    def __init__(
        self,
        settings: Settings,
        listeners: list[Listener],
        reason: str,
        announce: Callable[[str], None],
        writer: WriterProcess,
    ) -> None:
        self._settings = settings
        self._listeners = listeners
        self._reason = reason
        self._announce = announce
        self._writer = writer
        self._memory = SharedMemory.create(len(listeners), settings.cache_entries)
        self._memory.start()
        self._metrics = self._memory.metrics()
        self._workers: dict[int, _Worker] = {}
        self._all_serve = self._ending = False
        self._looked = 0.0  # when the workers were looked at last [s]
        self._tasks: set[asyncio.Task[None]] = set()
        self._switching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serves until a signal; CareError if it cannot start or replace a worker."""
        self._loop = loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._pass_on, number)
        try:
            for i in range(len(self._listeners)):
                self._start(i)
            self._spawn(self._serve())
            self._spawn(self._writer.run())
            await self._end
        finally:
            self._ending = True
            for task in self._tasks:
                task.cancel()
            await self._end_workers()

    async def _serve(self) -> None:
        """Loads the index, lets the workers serve it, and watches both."""
        folder = IndexFolder(self._settings.indexes, self._settings.index)
        store = open_store(self._settings)
        active = partial(store.active_version, folder)
        load = partial(ServedIndex, folder, active, self._open, self._metrics)
        workers = list(self._workers.values())
        try:
            self._served = await self._loop.run_in_executor(None, load)
        except CareError:
            # What a worker finds first, one process alone would find first: wrong settings.
            await asyncio.wait([worker.started for worker in workers])
            raise
        await self._activate(workers)
        urls = [await worker.serving for worker in workers]
        self._served.on_change = self._switch
        self._all_serve = True
        self._look()
        fields = {"workers": len(workers), "reason": self._reason}
        _LOG.info("workers serve", extra={"fields": fields})
        self._announce(urls[0])
        self._spawn(self._served.watch(self._settings.watch_seconds))
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            self._look()

    def _look(self) -> None:
        """Shows the state of the service, and kills workers that are stuck."""
        serving = [worker for worker in self._workers.values() if worker.serves]
        self._metrics.workers.set(len(serving))
        self._memory.fallback = not self._served.is_active
        looked, self._looked = self._looked, self._loop.time()
        if self._looked - looked > _SILENCE / 2:
            return  # this process did not run either: the machine or the container was paused
        for worker in serving:
            if (silence := self._memory.silence(worker.number)) > _SILENCE:
                self._kill(worker, f"its event loop has not run for {silence:.0f} s")

    def _kill(self, worker: _Worker, reason: str) -> None:
        fields = {"code": "worker_stuck", "worker": worker.number, "reason": reason}
        _LOG.error("a worker is stuck and is killed", extra={"fields": fields})
        worker.process.kill()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Ends the service with an error."""
        if not self._end.done():
            self._end.set_exception(error)

    # Workers

    def _start(self, number: int) -> _Worker:
        ours, theirs = Pipe()
        socket = self._listeners[number].socket
        passed = self._memory.file, socket.fileno(), theirs.fileno()
        arguments = self._writer.path, number, len(self._listeners), *passed, os.getpid()
        command = [sys.executable, "-m", "service.workers.worker", *map(str, arguments)]
        # Ctrl-C reaches all processes of a terminal's group. Workers are in groups of their own,
        # because they get the signal from the supervisor.
        settings = os.environ | {"CARE_WORKERS": str(len(self._listeners))}
        process = subprocess.Popen(command, env=settings, pass_fds=passed, process_group=0)
        theirs.close()
        worker = self._workers[number] = _Worker(number, process, ours)
        Thread(target=self._follow, args=[worker], daemon=True).start()
        return worker

    def _follow(self, worker: _Worker) -> None:
        """Passes what a worker says to the event loop until it ends; runs in a thread."""
        with suppress(RuntimeError):  # the event loop has ended
            with suppress(EOFError, OSError):
                while True:
                    message = worker.connection.recv()
                    self._loop.call_soon_threadsafe(self._received, worker, message)
            status = worker.process.wait()
            self._loop.call_soon_threadsafe(self._ended, worker, status)

    def _received(self, worker: _Worker, message: ToSupervisor) -> None:
        match message:
            case Started():
                worker.started.set_result(None)
            case Prepared(error):
                worker.answered(error)
            case Activated():
                worker.answered(None)
            case Serving(url):
                worker.serving.set_result(url)
            case Failed(error):
                worker.failure = error
            case Loaded(request, error):
                worker.loaded(request, error)
            case Reload() if message.index:
                self._spawn(self._load(worker, message))
            case Reload():
                self._spawn(self._reload(worker, message))

    def _ended(self, worker: _Worker, status: int) -> None:
        served = worker.serves
        worker.ended(status)
        self._memory.forget(worker.number)
        if self._ending:
            return
        if not self._all_serve:
            assert worker.failure
            self._fail(worker.failure)
            return
        fields = {"code": "worker_ended", "worker": worker.number, "reason": str(worker.failure)}
        _LOG.error("a worker ended", extra={"fields": fields})
        if served:
            self._metrics.worker_replacements.inc()
            self._spawn(self._replace(worker.number))

    async def _replace(self, number: int) -> None:
        """Starts a worker in the place of one that has ended."""
        failure: Exception | None = None
        for attempt in range(_STARTS):
            await asyncio.sleep(attempt)
            # What ended the worker may be a damaged file.
            await self._served.reload_if_changed()
            worker = self._start(number)
            # What it loads until then delays no other version.
            await asyncio.wait([worker.started], timeout=_START)
            async with self._served.switching:
                failure = await self._bring_up(worker)
            if not failure:
                return
            worker.process.kill()
            await worker.gone
        message = f"a worker cannot be replaced: {failure}"
        raise CareError(message, code="worker_failed") from failure

    async def _bring_up(self, worker: _Worker) -> Exception | None:
        """Lets a new worker serve what the others serve; returns why it does not."""
        try:
            async with asyncio.timeout(_START):
                served = Prepare(self._served.index.files.folders[0])
                for step in (served, Activate()):
                    if failure := await worker.ask(step):
                        return failure
                await worker.serving
        except TimeoutError:
            return CareError(f"it did not serve within {_START:.0f} s", code="server_not_ready")
        except CareError as error:  # the worker has ended
            return error
        return None

    def _pass_on(self, number: int) -> None:
        """Passes a signal on to the workers; from the first one on, the service ends."""
        self._ending = True
        for worker in self._workers.values():
            if not worker.gone.done():
                worker.process.send_signal(number)
        if not self._end.done():
            self._end.set_result(None)

    async def _end_workers(self) -> None:
        """Waits until all workers have ended, and kills those that take too long."""
        workers = [worker for worker in self._workers.values() if not worker.gone.done()]
        if self._end.done() and self._end.exception():
            for worker in workers:
                worker.process.terminate()
        gone = [worker.gone for worker in workers]
        if gone:
            await asyncio.wait(gone, timeout=self._settings.drain_seconds + _END)
        for worker in workers:
            if not worker.gone.done():
                self._kill(worker, "it does not end")

    # Versions

    def _open(self, folder: Path, old: Verified | None) -> Verified:
        """Verifies the version in a folder once, and lets all workers open it; for a thread.

        What is verified of an old version is not verified again.
        """
        known = old.parts if old and not old.files.changed_in_place() else []
        with opening(folder):
            manifest = read_manifest(folder)
            files = VersionFiles.of(folder, manifest)
            parts = verify_files(folder, manifest, known)
        asyncio.run_coroutine_threadsafe(self._prepare(folder), self._loop).result()
        return Verified(files, manifest, parts)

    async def _prepare(self, folder: Path) -> None:
        # At the start no worker serves yet; later, one that starts opens what is served by then.
        workers = [w for w in self._workers.values() if w.serves or not self._all_serve]
        errors = await asyncio.gather(*(worker.ask(Prepare(folder)) for worker in workers))
        if self._all_serve:  # a worker in the place of one that has ended opens it too
            errors = [e for worker, e in zip(workers, errors, strict=True) if worker.serves]
        if error := next(filter(None, errors), None):
            for worker in workers:
                worker.send(Abort())
            raise error

    def _switch(self, _: Verified) -> None:
        serving = [worker for worker in self._workers.values() if worker.serves]
        self._switching = self._spawn(self._activate(serving))

    async def _activate(self, workers: Iterable[_Worker]) -> None:
        await asyncio.gather(*map(self._activate_one, workers))

    async def _activate_one(self, worker: _Worker) -> None:
        try:
            async with asyncio.timeout(_SWITCH):
                await worker.ask(Activate())
        except TimeoutError:
            self._kill(worker, "it does not serve a version that it has opened")

    async def _load(self, asking: _Worker, asked: Reload) -> None:
        """Lets all workers but the one that asks load an index that is not the default one."""
        # Also those that have not said yet that they serve.
        workers = [w for w in self._workers.values() if w.started.done() and not w.gone.done()]
        loads = (w.load(asked.index, asked.number) for w in workers if w is not asking)
        errors = await asyncio.gather(*loads)
        asking.send(Reloaded(asked.request, next(filter(None, errors), None)))

    async def _reload(self, worker: _Worker, asked: Reload) -> None:
        """Loads the active version, and tells the worker that asked for it."""
        error = None
        try:
            await self._served.reload(asked.number)
        except Exception as failure:
            error = shown(failure)
        if self._switching:
            await asyncio.wait({self._switching})
        self._memory.fallback = not self._served.is_active
        worker.send(Reloaded(asked.request, error))
