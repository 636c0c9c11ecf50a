"""The index version that a service serves: loaded at start, reloaded, watched for changes."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from core.choices import SearchDevice
from core.errors import CareError, IndexVersionError, describe
from core.manifest import IndexManifest
from core.versions import CURRENT, IndexFolder, read_manifest, with_version
from search.snapshot import Snapshot
from search.version_files import VersionFiles
from service.observe.metrics import Metrics
from service.settings import Settings, plain
from stores.base import StoreError, VectorStore
from stores.faiss.search import limit_threads
from stores.registry import MilvusAddress, VectorStores

_LOG = logging.getLogger("care.service")

# How often the service asks whether another version is active [s].
GLANCE = 0.5
# The longest pause between two attempts to load a version whose files do not change [s].
_LONGEST_PAUSE = 600.0
# Codes of errors after which an older version is served: files are missing, damaged or unreadable.
DAMAGE = frozenset(
    {
        "bad_canaries",
        "file_missing",
        "foreign_vectors",
        "invalid_manifest",
        "linked_file",
        "manifest_missing",
        "misplaced_version",
        "unreadable_documents",
        "unreadable_file",
        "unreadable_filters",
        "unreadable_full_text",
        "unreadable_terms",
        "unreadable_token_vectors",
        "unreadable_vectors",
        "unreadable_version",
        "wrong_checksum",
        "wrong_document_count",
        "wrong_size",
        "wrong_vectors",
    }
)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a look at the index found; if it differs from the last one, a reload is attempted."""

    active: str  # the active version, or the code of the error if there is none
    files: VersionFiles | None  # of the active version
    served: VersionFiles | None  # of the served version


def make_stores(settings: Settings, device: SearchDevice = "cpu") -> VectorStores:
    """Returns the stores of vectors; FAISS searches on a device."""
    uri = plain(settings.milvus_uri)
    address = MilvusAddress(uri, plain(settings.milvus_token), settings.milvus_timeout_ms / 1000)
    return VectorStores(address if uri else None, device)


def open_store(settings: Settings) -> VectorStore:
    """Returns the store of the vectors; CareError if Milvus or the GPU is not available."""
    return make_stores(settings, settings.faiss_device).get(settings.store)


class Opened(Protocol):
    """An open version."""

    @property
    def files(self) -> VersionFiles:
        """The files before they were verified."""

    @property
    def manifest(self) -> IndexManifest:
        """The manifest of the version."""


_Opened = TypeVar("_Opened", bound=Opened)


class Served(Protocol):
    """What an engine needs of the version that it serves."""

    index: Snapshot
    # Called in the event loop after another version is served.
    on_change: Callable[[Snapshot], None]

    @property
    def is_active(self) -> bool:
        """Whether the active version is served; false if it could not be loaded."""

    async def reload(self, number: int | None = None) -> Snapshot:
        """Serves the active version, and returns it; CareError if it cannot be loaded.

        With a number, nothing is loaded if the version with this number or a later one is served.
        """

    async def watch(self, every: float) -> None:
        """Serves what becomes active, if nothing else sees to it."""

    def close(self) -> None:
        """Ends what loads versions."""


class ServedIndex(Generic[_Opened]):
    """Loads the active version of an index and replaces it by a newer one while it is served.

    If the active version is damaged at start, the last whole version before it is served;
    IndexVersionError if there is none. The same happens later if the files of the served version
    are changed in place. Otherwise a version that cannot be loaded leaves the served one as it is.

    `active` returns the id of the active version; `open_version` opens and checks the version in a
    folder, given the one that is open, if one is; threads of `loader` do so, by default one of its
    own.
    """

    def __init__(
        self,
        folder: IndexFolder,
        active: Callable[[], str],
        open_version: Callable[..., _Opened],
        metrics: Metrics,
        loader: ThreadPoolExecutor | None = None,
    ) -> None:
        self._folder = folder
        self._active = active
        self._open = open_version
        self._metrics = metrics
        # Called in the event loop after another version is served.
        self.on_change: Callable[[_Opened], None] = lambda _: None
        self.switching = asyncio.Lock()  # held while the served version may change
        self._loader = loader or ThreadPoolExecutor(1, "load", limit_threads)
        self._seen: _Seen | None = None
        self._failure: object = None
        self._look_failure = ""
        self._current: tuple[int, int] | None = None
        self.index, error = self._load()
        self._record(error)

    @property
    def is_active(self) -> bool:
        """Whether the active version is served; false if it could not be loaded."""
        return self._failure is None

    async def reload(self, number: int | None = None) -> _Opened:
        """Loads and checks the active version, then replaces the served one.

        With a number, nothing is loaded if the version with this number or a later one is served,
        and is the active one.

        CareError if the active version cannot be loaded. The served one stays, unless its files
        were changed in place: then the last whole version before it replaces it.
        """
        async with self.switching:
            served = self.index.manifest
            if number is not None and (served.number or 0) >= number:
                # After a rollback, numbers of versions that are served can be larger.
                with suppress(IndexVersionError):
                    if self._folder.active() == served.version:
                        return self.index
            loop = asyncio.get_running_loop()
            old = self.index.manifest.version
            try:
                index, error = await loop.run_in_executor(
                    self._loader, self._load, self.index.files
                )
            except Exception as failure:
                self._metrics.reloads.labels("failure").inc()
                self._record(failure)
                raise
            self._metrics.reloads.labels("failure" if error else "success").inc()
            retired = [self.index]
            self.index = index
            self.on_change(index)
            fields = {"old": old, "version": index.manifest.version}
            _LOG.info("index version loaded", extra={"fields": fields})
            self._record(error)
            # Closing large files would block the event loop.
            with suppress(RuntimeError):  # the service ends
                await loop.run_in_executor(self._loader, retired.clear)
            if error:
                raise error
            return index

    async def reload_if_changed(self) -> None:
        """Loads what has changed since the last look; the log has what failed."""
        if await self._look_for_changes():
            await self._try_to_reload()

    def is_switched(self) -> bool:
        """Returns whether `CURRENT` is another file than at the last call."""
        before, self._current = self._current, None
        with suppress(OSError):
            status = (self._folder.path / CURRENT).stat()
            self._current = status.st_ino, status.st_mtime_ns
        return self._current != before

    async def watch(self, every: float) -> None:
        """Looks at the index about every `every` seconds and loads what changed; 0 disables this.

        It also looks as soon as another version is active. Each pause is between half and one and a
        half times `every`. A version that cannot be loaded is tried again as soon as a file
        changes, and otherwise after pauses that double up to `_LONGEST_PAUSE`.
        """
        loop = asyncio.get_running_loop()
        pause, retry_at = every, loop.time()
        while every:
            until = loop.time() + every * random.uniform(0.5, 1.5)
            while (left := until - loop.time()) > 0:
                await asyncio.sleep(min(left, GLANCE))
                if await loop.run_in_executor(self._loader, self.is_switched):
                    break
            changed = await self._look_for_changes()
            if not changed and (self._failure is None or loop.time() < retry_at):
                continue
            await self._try_to_reload()
            pause = every if changed else min(2 * pause, max(every, _LONGEST_PAUSE))
            retry_at = loop.time() + pause

    def close(self) -> None:
        """Stops the thread that loads; a load in progress is abandoned."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _look_for_changes(self) -> bool:
        """Returns whether something has changed that no load in progress finds."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._loader, self._has_changed):
            return False
        async with self.switching:
            return await loop.run_in_executor(self._loader, self._has_changed)

    async def _try_to_reload(self) -> None:
        try:
            await self.reload()
        except CareError:
            pass  # `reload` has logged it
        except Exception as error:
            _LOG.error("reload failed", extra={"fields": _fields(error)})

    def _load(self, served: VersionFiles | None = None) -> tuple[_Opened, CareError | None]:
        """Loads the active version, or the last whole one before it if that has to be served.

        `served` are the files of the served version when they were opened. Returns the version to
        serve, and why the active one is not served.
        """
        seen = self._seen = self._look(served)
        try:
            index, failure = with_version(self._active, self._open_id), None
        except IndexVersionError as error:
            if error.code not in DAMAGE or (served and not served.changed_in_place()):
                raise
            if (whole := self._last_whole()) is None:
                raise
            index, failure = whole, error
        # A change after the files were verified is found by the next look.
        self._seen = replace(seen, served=index.files)
        return index, failure

    def _open_id(self, version: str) -> _Opened:
        return self._open(self._folder.version(version), old=getattr(self, "index", None))

    def _last_whole(self) -> _Opened | None:
        for version in versions_before(self._folder, self._active()):
            with suppress(CareError):
                return self._open_id(version)
        return None

    def _has_changed(self) -> bool:
        """Returns whether a look finds something new; if the look fails, it is logged once."""
        try:
            seen = self._look(self.index.files)
        except Exception as error:
            if str(error) != self._look_failure:
                self._look_failure = str(error)
                extra = {"fields": _fields(error)}
                _LOG.error("the active index version cannot be determined", extra=extra)
            return False
        self._look_failure = ""
        return seen != self._seen

    def _look(self, served: VersionFiles | None) -> _Seen:
        now = served and served.now()
        try:
            active = self._active()
        except StoreError:
            raise
        except IndexVersionError as error:
            return _Seen(error.code, None, now)
        return _Seen(active, VersionFiles.of(self._folder.version(active)), now)

    def _record(self, error: Exception | None) -> None:
        """Shows whether the active version is served, and logs a CareError that is not yet logged.

        Callers of `reload` log other errors.
        """
        version = self.index.manifest.version
        failure = error and (version, type(error), str(error))
        if isinstance(error, CareError) and failure != self._failure:
            extra = {"fields": {"served": version} | _fields(error)}
            _LOG.error("the active index version cannot be loaded", extra=extra)
        self._failure = failure
        self._metrics.fell_back(self._folder.name, failure is not None)


def _fields(error: Exception) -> dict[str, str]:
    """Returns the fields of the log line of an error; a message of ours does not quote a query."""
    if isinstance(error, CareError):
        return {"code": error.code, "reason": str(error)}
    return {"code": "internal_error", **describe(error)}


def versions_before(index: IndexFolder, version: str) -> Iterator[str]:
    """Yields the versions before `version`: the chain of its parents, then others, newest first."""
    listed = index.versions()
    found = [version]
    with suppress(CareError):
        while (parent := read_manifest(index.version(found[-1])).parent) and parent not in found:
            found.append(parent)
            yield parent
    try:
        read_manifest(index.version(version))
        older = listed[: listed.index(version)]
    except (CareError, ValueError):
        # Its place is unknown. Ids begin with the time of the build.
        older = [other for other in listed if other < version]
    yield from (other for other in reversed(older) if other not in found)
