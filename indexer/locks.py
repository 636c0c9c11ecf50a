"""The two locks of an index, which commands hold while they change it.

The lock for changes is held for moments: by a build or update while it publishes, and by activate,
rollback, prune and migrate. What is decided from `CURRENT` is done before it is released.

The lock for builds is held by a build or update from start to end. Versions can be activated and
pruned in the meantime. It is taken before the lock for changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import IndexVersionError
from core.files import remove_temporary
from core.locks import LOCK, LockHolder, exclusive, lock_holder
from core.versions import index_folder

BUILD_LOCK = ".build.lock"
# How long to wait for the lock for changes [s].
CHANGE_WAIT = 10.0
# How long a build waits for its locks, which a prune may hold for moments [s].
BUILD_WAIT = 0.5


def holders(folder: Path) -> list[LockHolder]:
    """Returns the commands that hold the locks of the folder of an index."""
    found = (lock_holder(folder / name) for name in (LOCK, BUILD_LOCK))
    return [holder for holder in found if holder]


@contextmanager
def changing(root: Path, name: str, command: str) -> Iterator[Path]:
    """Yields the folder of an index, locked for changes; waits up to `CHANGE_WAIT`.

    Temporary files that killed processes left in the folder are removed.

    Raises:
        IndexVersionError: If the index does not exist.
        CareError: `locked`, if another process holds the lock all the time.
    """
    folder = index_folder(root, name)
    if not folder.is_dir():
        message = f"there is no index '{name}' in {root}: `care versions list` shows all"
        raise IndexVersionError(message, code="no_active_version", index=name)
    with exclusive(folder, command, wait=CHANGE_WAIT):
        remove_temporary(folder)
        yield folder


@contextmanager
def building(folder: Path, command: str) -> Iterator[None]:
    """Locks the folder of an index for one build or update.

    Raises:
        CareError: `locked`, if another build or update runs.
    """
    with exclusive(folder, command, BUILD_LOCK, wait=BUILD_WAIT):
        yield
