"""The life of published versions: activate, roll back, prune."""

import shutil
from pathlib import Path

from core.errors import IndexVersionError
from core.files import exclusive
from core.versions import current_version, index_folder, list_versions, set_current
from indexer.verify import verify_version


def activate(root: Path, name: str, version: str) -> None:
    """Verifies a version and makes it the active one.

    Raises:
        IndexVersionError: If there is no such version or it is damaged; nothing changes then.
    """
    if version not in list_versions(root, name):
        known = ", ".join(list_versions(root, name)) or "none"
        raise IndexVersionError(f"index '{name}' has no version '{version}'; it has: {known}")
    verify_version(index_folder(root, name) / version)
    set_current(root, name, version)


def rollback(root: Path, name: str) -> str:
    """Activates the version before the active one and returns its id.

    Raises:
        IndexVersionError: If there is none, or it is damaged; nothing changes then.
    """
    current = current_version(root, name)
    older = [version for version in list_versions(root, name) if version < current]
    if not older:
        raise IndexVersionError(f"index '{name}' has no version before {current}")
    activate(root, name, older[-1])
    return older[-1]


def prune(root: Path, name: str, *, keep: int) -> list[str]:
    """Deletes all but the newest `keep` versions and the active one.

    Left-overs of builds that were killed while publishing go too. A service that still
    has a deleted version open keeps it until it lets go.

    Returns:
        The ids of the deleted versions.

    Raises:
        IndexVersionError: If there is no active version: then nothing is deleted.
    """
    current = current_version(root, name)
    folder = index_folder(root, name)
    with exclusive(folder):
        newest_first = list_versions(root, name)[::-1]
        deleted = [version for version in newest_first[keep:] if version != current]
        for path in [*(folder / version for version in deleted), *folder.glob(".*.tmp/")]:
            shutil.rmtree(path)
    return deleted
