"""The folder of an index for commands: its locks, new versions, and their one way to publication.

.<version>.tmp      a new version; belongs to the holder of the lock for builds
.<version>.new      a version of a live write; belongs to the holder of the lock for changes
.<version>.deleted  a version that is being deleted

The lock for changes is held for moments: by a live write, by a build or update while it publishes,
and by activate, rollback, prune and migrate. What is decided from `CURRENT` is done before it is
released.

The lock for builds is held by a build, update or merge from start to end. Versions can be activated
and pruned in the meantime. It is taken before the lock for changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from core.aliases import index_of
from core.errors import CareError, IndexVersionError
from core.files import remove_folder, remove_temporary, sync, sync_folder, writing_in
from core.locks import LOCK, LockHolder, exclusive, lock_holder
from core.manifest import IndexManifest
from core.verification import verify_files
from core.versions import IndexFolder, opening, read_manifest, write_manifest
from stores.milvus.names import read_collection
from stores.registry import FAISS_ONLY, VectorStores
from stores.segment import open_segments

BUILD_LOCK = ".build.lock"
# How long to wait for the lock for changes [s].
CHANGE_WAIT = 10.0
# How long a build waits for its locks, which a prune may hold for moments [s].
BUILD_WAIT = 0.5
# Digits of the build key in the id of a version.
KEY_DIGITS = 8
# The first letter of the build key of live writes, which have no build.
LIVE_KEY = "w"
NEW, WRITE = ".tmp", ".new"
DELETED = ".deleted"


@dataclass(frozen=True, slots=True)
class IndexWriter(IndexFolder):
    """The folder of an index for commands that change it, with the stores that versions may use."""

    stores: VectorStores = FAISS_ONLY

    def __post_init__(self) -> None:
        """Checks the name; IndexVersionError if it is not valid, or an alias."""
        IndexFolder.__post_init__(self)
        if self.path.is_symlink() and (name := index_of(self)) != self.name:
            message = f"'{self.name}' is an alias of the index '{name}': name that index"
            raise IndexVersionError(message, code="index_is_alias", name=self.name)

    @contextmanager
    def changing(self, command: str) -> Iterator[None]:
        """Locks the index for changes in the block; waits up to `CHANGE_WAIT`.

        Temporary files that killed processes left in the folder are removed.
        """
        if not self.path.is_dir():
            message = (
                f"there is no index '{self.name}' in {self.root}: `care versions list` shows all"
            )
            raise IndexVersionError(message, code="no_active_version", index=self.name)
        with exclusive(self.path, command, wait=CHANGE_WAIT):
            remove_temporary(self.path)
            for version in hidden_names(self.path, WRITE):
                remove_folder(hidden(self.path, version, WRITE))
            yield

    @contextmanager
    def building(self, command: str, wait: float | None = None) -> Iterator[None]:
        """Locks the index for one build or update in the block, and removes left-overs of others.

        It waits for the lock up to `wait` seconds, by default `BUILD_WAIT`.
        """
        wait = BUILD_WAIT if wait is None else wait
        with exclusive(self.path, command, BUILD_LOCK, wait=wait):
            self._remove_left_overs()
            yield

    @contextmanager
    def new_version(self, build_key: str, end: str = NEW) -> Iterator[tuple[str, Path]]:
        """Yields the id of a new version and its hidden folder, which `publish` moves to its place.

        The index is locked for builds or, if `end` is `WRITE`, for changes. The folder is removed
        if the block does not publish it. The first digits of the build key end the id.
        """
        time = datetime.now(UTC)
        while True:
            version = f"{time:%Y%m%dT%H%M%S.%fZ}-{build_key[:KEY_DIGITS]}"
            folder = hidden(self.path, version, end)
            if not (folder.exists() or self.version(version).exists()):
                break
            time += timedelta(microseconds=1)  # the clock was set back
        with writing_in(self.path):
            folder.mkdir()
            try:
                yield version, folder
            finally:
                with suppress(CareError, OSError):  # the next build or prune removes it
                    self._remove(folder)

    def publish(self, manifest: IndexManifest, folder: Path, base: str | None) -> IndexManifest:
        """Verifies a new version, moves it to its place and activates it.

        Returns the manifest with number and parent; `base_not_active` if another version than the
        base is active.
        """
        self.prepare(manifest, folder)
        with self.changing("update" if base else "build"):
            return self.place(manifest, folder, base)

    def prepare(self, manifest: IndexManifest, folder: Path) -> None:
        """Verifies a new version in its hidden folder, and flushes it to disk."""
        write_manifest(folder, manifest)
        verify_version(folder, self.stores)
        sync_folder(folder)

    def place(self, manifest: IndexManifest, folder: Path, base: str | None) -> IndexManifest:
        """Does the rest of what `publish` does; the index is locked for changes."""
        self.check_base(base)
        known = {"parent": self.active_or_none(), "number": self.next_number()}
        manifest = manifest.model_copy(update=known)
        write_manifest(folder, manifest)
        self.show(folder, manifest.version)
        return manifest

    def show(self, folder: Path, version: str) -> None:
        """Moves a new version, which is on disk, to its place and activates it; locked."""
        folder.rename(self.version(version))
        sync(self.path)
        self.switch(version)

    def latest(self) -> str:
        """Returns the version that services search, which `CURRENT` then names.

        Of an index in Milvus, it can have been activated on another machine.
        """
        version = self.active()
        folder = self.version(version)
        try:
            if read_collection(folder) is None:
                return version
        except IndexVersionError:  # it is damaged
            return version
        latest = self.stores.for_version(folder).active_version(self)
        if latest != version and self.version(latest).exists():
            self.set_active(latest)
        return latest

    def next_number(self) -> int:
        """Returns the number of the next version; the index is locked for changes."""
        return max(self.numbers().values(), default=0) + 1

    def switch(self, version: str) -> None:
        """Activates a version, first in its store, then in `CURRENT`; the index is locked."""
        with self.activating(version):
            folder = self.version(version)
            # What a write has added is kept with its base.
            base = self.version(read_manifest(folder).base)
            self.stores.for_version(base).activate(self.name, folder)

    def check_base(self, base: str | None) -> None:
        """Raises IndexVersionError if `base`, if there is one, is no longer the active version."""
        if base and base != self.active_or_none():
            raise IndexVersionError(
                f"index '{self.name}' was changed by another command: version {base}, from which "
                "this update started, is no longer active: run the update again",
                code="base_not_active",
                version=base,
            )

    def remove_deleted(self) -> None:
        """Removes the folders of deleted versions, and their vectors in other stores."""
        for version in hidden_names(self.path, DELETED):
            self._remove(hidden(self.path, version, DELETED))

    def active_or_none(self) -> str | None:
        """Returns the id of the active version, None if there is none."""
        try:
            return self.active()
        except IndexVersionError:
            return None

    def _remove_left_overs(self) -> None:
        """Removes new and deleted versions of killed commands, as far as their stores are reached.

        The index is locked for builds, so no new version of a living process is there.
        """
        for end in (NEW, DELETED):
            for version in hidden_names(self.path, end):
                with suppress(CareError, OSError):
                    self._remove(hidden(self.path, version, end))

    def _remove(self, folder: Path) -> None:
        if folder.is_dir():
            self.stores.for_version(folder).drop(folder)
            remove_folder(folder)


def holders(folder: Path) -> list[LockHolder]:
    """Returns the commands that hold the locks of the folder of an index."""
    found = (lock_holder(folder / name) for name in (LOCK, BUILD_LOCK))
    return [holder for holder in found if holder]


def verify_version(folder: Path, stores: VectorStores = FAISS_ONLY) -> IndexManifest:
    """Verifies checksums, counts, dimensions and canaries of a version; returns its manifest."""
    with opening(folder):
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
        open_segments(folder, manifest, stores.for_version(folder))
    return manifest


def is_live(version: str) -> bool:
    """Returns whether a version is that of a live write, by its id."""
    return version.rpartition("-")[2].startswith(LIVE_KEY)


def hidden(parent: Path, name: str, end: str) -> Path:
    """Returns the hidden path of a folder that is new (`NEW`) or being deleted (`DELETED`)."""
    return parent / f".{name}{end}"


def hidden_names(parent: Path, end: str) -> list[str]:
    """Returns the names of all folders of which `hidden` is the path."""
    return [path.name[1:].removesuffix(end) for path in parent.glob(f".*{end}/")]


def hide(folder: Path) -> Path:
    """Renames a folder to be deleted and returns its hidden path.

    The folder may have been hidden before, by a command that was killed before it removed it.
    """
    target = hidden(folder.parent, folder.name, DELETED)
    if target.exists():
        remove_folder(target)
    return folder.rename(target)
