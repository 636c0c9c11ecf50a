"""The indexes of a service: the default one, and others that are opened when requests name them."""

import asyncio
import logging
import resource
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from core.aliases import index_of, read_aliases
from core.errors import CareError, EmbeddingSpaceError, IndexVersionError
from core.machine import available_memory
from core.manifest import IndexManifest
from core.versions import IndexFolder, opening, read_manifest
from search.snapshot import Snapshot
from service.errors import RequestError, shown, unknown_index
from service.pipeline.engine import Engine
from service.pipeline.served_index import GLANCE, Served, ServedIndex
from service.settings import Settings
from stores.base import VectorStore
from stores.faiss.search import limit_threads

_LOG = logging.getLogger("care.service")

# Indexes that are opened at once. One that takes long delays no other until so many do.
_OPENING = 8
# How long an index that cannot be opened is not tried again [s].
_RETRY = 5.0
_MOST_FAILURES = 1024
# Private memory of an open index, and of each of its rows [bytes], as measured.
_INDEX_BYTES, _ROW_BYTES = 200 << 10, 64
# Maps of an open index besides one for each of its files.
_MORE_MAPS = 8
# Memory and maps of a segment that is unpacked into memory, at least [bytes].
_SEGMENT_BYTES, _SEGMENT_MAPS = 64 << 10, 8
# The share of what the kernel allows a process that indexes may take.
_SHARE_OF_MAPS, _SHARE_OF_DESCRIPTORS = 2, 4
# Open files for indexes that are made while the service runs.
_MORE_INDEXES = 64
_MAPS = Path("/proc/sys/vm/max_map_count")

# Canaries of an index whose document encoder agrees with the query encoder, as another index has
# shown with all of its canaries.
_CANARIES = 1

# Opens the version in a folder, and checks some of its canaries, or all with None.
OpenVersion = Callable[..., Snapshot]
# Lets the other workers of the service load the active version of an index too, or one with at
# least this number.
TellOthers = Callable[[str, int | None], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Opened:
    """An open index, as one request sees it."""

    engine: Engine  # of its embedding space
    snapshot: Snapshot
    is_active: bool  # whether the active version is served


@dataclass(frozen=True, slots=True)
class Budget:
    """What the open indexes of a worker may take, besides the default one."""

    bytes: int  # private memory
    maps: int
    descriptors: int  # each index has one

    @classmethod
    def of(cls, settings: Settings, indexes: int) -> "Budget":
        """Returns the budget of a worker whose folder has a number of indexes."""
        most = settings.open_bytes or available_memory() // 4 // (settings.workers or 1)
        maps = 65_530
        with suppress(OSError, ValueError):
            maps = int(_MAPS.read_text())
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = indexes + _MORE_INDEXES
        if files != resource.RLIM_INFINITY:
            descriptors = min(descriptors, files // _SHARE_OF_DESCRIPTORS)
        return cls(most, maps // _SHARE_OF_MAPS, descriptors)

    def allows(self, indexes: Iterable[Snapshot]) -> bool:
        """Returns whether indexes may be open together."""
        held = list(indexes)
        segments = sum(len(each.manifest.segments) for each in held)
        size = sum(_INDEX_BYTES + _ROW_BYTES * each.manifest.count for each in held)
        size += _SEGMENT_BYTES * segments
        maps = sum(_MORE_MAPS + len(each.files.stamps) for each in held)
        maps += _SEGMENT_MAPS * segments
        return size <= self.bytes and maps <= self.maps and len(held) <= self.descriptors


class Catalog:
    """The indexes that a service serves.

    The default index is always open. Another one is opened by the first request that names it, and
    closed when it has not been used for longest and others need its room; requests that read it
    keep it open until they end. All methods but `stop` must be called on the event loop.

    Each embedding space has an engine, of which that of the default index is the first, and a
    function that opens versions for it. The store says which version of an index is active, and
    `tell_others` tells other workers to load an index again.
    """

    def __init__(
        self,
        settings: Settings,
        default: Served,
        engines: Mapping[str, Engine],
        open_version: Mapping[str, OpenVersion],
        store: VectorStore,
        tell_others: TellOthers | None = None,
    ) -> None:
        self._root = settings.indexes
        self._patterns = settings.serve_indexes
        self._every = settings.watch_seconds
        self._engines = engines
        self._open_version = open_version
        self._store = store
        self.active_version = store.active_version
        self._tell_others = tell_others
        self._pool = ThreadPoolExecutor(_OPENING, "open", limit_threads)
        self._served: OrderedDict[str, ServedIndex[Snapshot]] = OrderedDict()
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[float, CareError]] = {}
        self._refreshing: set[asyncio.Future[None]] = set()
        self.served = default
        default.on_change = self._show
        self._agreed = {_document_encoder(default.index.manifest)}
        self._show(default.index)
        self.budget = Budget.of(settings, len(self.names()))

    @property
    def default_name(self) -> str:
        """The name of the default index; `CARE_INDEX` may be an alias of it."""
        return self.served.index.manifest.name

    @property
    def default(self) -> Opened:
        """The default index."""
        engine = next(iter(self._engines.values()))
        return Opened(engine, self.served.index, self.served.is_active)

    def names(self) -> dict[str, list[str]]:
        """Returns the names of all indexes that are served, each with its aliases."""
        found: dict[str, list[str]] = {self.default_name: []}
        for path in sorted(self._root.glob("[!.]*/CURRENT")):
            name = path.parent.name
            if not path.parent.is_symlink() and self.serves(name):
                found.setdefault(name, [])
        for alias, name in read_aliases(self._root).items():
            if name in found:
                found[name].append(alias)
        return found

    def real_name(self, name: str) -> str:
        """Returns the name of the index that a name or alias means, whether it exists or not.

        RequestError if it is no name.
        """
        try:
            return index_of(IndexFolder(self._root, name))
        except IndexVersionError as error:
            raise unknown_index() from error

    def check(self, name: str) -> None:
        """Raises RequestError if no index of this name, which is not an alias, is served."""
        is_default = name == self.default_name
        if not is_default and not self._exists(name):
            raise unknown_index()
        if not self.serves(name):
            raise unknown_index()

    def serves(self, name: str) -> bool:
        """Returns whether the service serves an index of this name, if there is one."""
        return name == self.default_name or any(
            fnmatchcase(name, pattern) for pattern in self._patterns
        )

    async def open(self, name: str, deadline: float) -> Opened:
        """Returns the index of this name, which `check` has accepted, and opens it if needed.

        RequestError if it is not open by the deadline, a time of the event loop [s];
        IndexVersionError if it cannot be opened.
        """
        if name == self.default_name:
            return self.default
        while name not in self._served:
            await self._wait_for(name, deadline)
        served = self._served[name]
        self._served.move_to_end(name)
        engine = self._engines[served.index.manifest.encoder.embedding_space]
        return Opened(engine, served.index, served.is_active)

    async def reload(self, name: str, deadline: float) -> Opened:
        """Serves the active version of an index in all workers; errors are those of `open`.

        Of the default index all workers serve it, or none does. Of another one each worker that has
        it open loads it; the error of one that cannot is raised, and that one keeps the old
        version.
        """
        await self.follow(name)
        return await self.open(name, deadline)

    async def follow(self, name: str, number: int | None = None) -> None:
        """Serves the active version of an index in all workers that have it open; see `reload`.

        With a number, a worker that serves the version with this number or a later one loads none.
        """
        if name == self.default_name:
            await self.served.reload(number)
            return
        await self.look(name, number)
        if self._tell_others:
            await self._tell_others(name, number)

    async def look(self, name: str, number: int | None = None) -> None:
        """Does what `follow` does, in this worker alone; not of the default index."""
        if opening := self._opening.get(name):
            await asyncio.shield(opening)  # it may have read which version is active
        self._failures.pop(name, None)
        if served := self._served.get(name):
            try:
                if self._exists(name):
                    await served.reload(number)
            except CareError:
                if self._exists(name):
                    raise
            if not self._exists(name):
                self._close(name)

    async def watch(self) -> None:
        """Looks at each open index about every `CARE_WATCH_SECONDS`, and loads what has changed.

        Indexes that only the store has are found as well.
        """
        loop = asyncio.get_running_loop()
        while self._every:
            with suppress(CareError):  # requests show it too
                await loop.run_in_executor(self._pool, self._store.fetch, self._root)
            names = list(self._served)
            for name in names:
                await asyncio.sleep(self._every / len(names))
                if name in self._served:
                    await self._refresh(name)
            if not names:
                await asyncio.sleep(self._every)

    async def glance(self) -> None:
        """Loads the active version of each open index as soon as it is another one."""

        def switched(served: Mapping[str, ServedIndex[Snapshot]]) -> list[str]:
            return [name for name, one in served.items() if one.is_switched()]

        loop = asyncio.get_running_loop()
        while self._every:
            await asyncio.sleep(GLANCE)
            for name in await loop.run_in_executor(self._pool, switched, dict(self._served)):
                if name in self._served:
                    await self._refresh(name)

    async def close(self) -> None:
        """Waits for requests in flight and stops the threads."""
        for engine in self._engines.values():
            await engine.close()
        self.stop()

    def stop(self) -> None:
        """Stops the threads; for callers outside the event loop."""
        for engine in self._engines.values():
            engine.stop()
        self.served.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _exists(self, name: str) -> bool:
        return (self._root / name / "CURRENT").is_file()

    async def _refresh(self, name: str) -> None:
        served = self._served[name]
        if self._exists(name):
            # Not waited for: one that takes long must not delay the others.
            task = asyncio.ensure_future(served.reload_if_changed())
            self._refreshing.add(task)
            task.add_done_callback(self._refreshing.discard)
        else:
            self._close(name)

    async def _wait_for(self, name: str, deadline: float) -> None:
        until, error = self._failures.get(name, (0.0, None))
        loop = asyncio.get_running_loop()
        if error and loop.time() < until:
            raise error
        if name not in self._opening:
            self._opening[name] = task = loop.create_task(self._open(name))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(self._opening[name])
        except TimeoutError as error:
            message = "the index was not open before the deadline, and goes on opening: retry"
            raise RequestError("deadline_exceeded", message) from error
        if failed := self._failures.get(name):
            raise failed[1]

    async def _open(self, name: str) -> None:
        """Opens an index, or notes why it cannot be opened."""
        loop = asyncio.get_running_loop()
        folder = IndexFolder(self._root, name)
        load = partial(
            ServedIndex,
            folder,
            partial(self.active_version, folder),
            self._open_folder,
            self.default.engine.metrics,
            self._pool,
        )
        try:
            served = await loop.run_in_executor(self._pool, load)
        except Exception as failure:
            error = shown(failure) if self._exists(name) else unknown_index()
            fields = {"index": name, "code": error.code, "reason": str(error)}
            _LOG.error("an index cannot be opened", extra={"fields": fields})
            if len(self._failures) >= _MOST_FAILURES:
                self._failures.clear()
            self._failures[name] = loop.time() + _RETRY, error
            return
        self._failures.pop(name, None)
        self._served[name] = served
        self._make_room(name)

    def _open_folder(self, folder: Path, old: Snapshot | None = None) -> Snapshot:
        with opening(folder):
            manifest = read_manifest(folder)
        space = manifest.encoder.embedding_space
        if space not in self._open_version:
            raise EmbeddingSpaceError(
                f"index '{manifest.name}' has the embedding space '{space}', which no encoder of "
                "the service has: name a pair of this space in CARE_OTHER_PAIRS",
                index=manifest.name,
                embedding_space=space,
            )
        document_encoder = _document_encoder(manifest)
        agrees = document_encoder in self._agreed
        snapshot = self._open_version[space](
            folder, canaries=_CANARIES if agrees else None, old=old
        )
        self._agreed.add(document_encoder)
        return snapshot

    def _make_room(self, newest: str) -> None:
        while len(self._served) > 1:
            if self.budget.allows(served.index for served in self._served.values()):
                return
            self._close(next(name for name in self._served if name != newest))

    def _close(self, name: str) -> None:
        """Closes an index once the last request that reads it ends."""
        retired = [self._served.pop(name, None)]
        # Closing large files would block the event loop.
        with suppress(RuntimeError):  # the service ends
            self._pool.submit(retired.clear)

    def _show(self, index: Snapshot) -> None:
        """Shows the default index in the metrics."""
        engine = self.default.engine
        engine.metrics.show_index(index.manifest, engine.pair.name)
        engine.metrics.queried(index.manifest.name, 0)
        engine.show_readiness()


def _document_encoder(manifest: IndexManifest) -> tuple[str, str, str]:
    return manifest.encoder.model_dump_json(), manifest.backend, manifest.dtype
