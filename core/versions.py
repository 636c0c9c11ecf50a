"""Index versions on disk: immutable folders, and a file with the id of the active version.

<root>/<name>/CURRENT                  id of the active version
<root>/<name>/<version>/manifest.json  written last; folders without it are not versions

Versions are ordered by publication. Their numbers say the order; for versions of older releases,
which have none, parents and then ids do. Clocks of machines do not matter otherwise.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from core.errors import CareError, IndexVersionError
from core.files import atomic, sha256_file, sync
from core.manifest import (
    NAME,
    OLDEST_SCHEMA_VERSION,
    SCHEMA_VERSION,
    IndexManifest,
    upgrade_manifest,
)

MANIFEST = "manifest.json"

_CURRENT = "CURRENT"
_T = TypeVar("_T")
_NAME = re.compile(NAME)


def index_folder(root: Path, name: str) -> Path:
    """Returns the folder of an index.

    Raises:
        IndexVersionError: If the name has characters that are not safe in paths and shells.
    """
    if not _NAME.fullmatch(name):
        message = (
            f"'{name}' is not a valid index name: use up to 64 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
        raise IndexVersionError(message, code="bad_index_name", name=name)
    return root / name


def list_versions(root: Path, name: str) -> list[str]:
    """Returns the ids of all complete versions, in the order of their publication."""
    return list(version_numbers(root, name))


def read_versions(root: Path, name: str) -> list[IndexManifest]:
    """Returns the manifests of all complete versions, in the order of their publication.

    Raises:
        IndexVersionError: If a manifest is invalid or of another schema.
    """
    manifests = []
    for version in list_versions(root, name):
        folder = index_folder(root, name) / version
        try:
            manifests.append(read_manifest(folder))
        except IndexVersionError:
            if folder.exists():  # otherwise it was deleted in the meantime
                raise
    return manifests


def version_numbers(root: Path, name: str) -> dict[str, int]:
    """Returns the number of each complete version, in the order of their publication.

    Versions without a number precede the others and each other by their parents, then by their
    ids; they get the numbers before the smallest one.
    """
    places: dict[str, tuple[int | None, str | None]] = {}
    for path in index_folder(root, name).glob(f"[!.]*/{MANIFEST}"):
        with suppress(FileNotFoundError):  # it is being deleted
            places[path.parent.name] = _place(path)
    waiting = sorted(version for version, (number, _) in places.items() if number is None)
    numbered = {version: number for version, (number, _) in places.items() if number is not None}
    first = min(numbered.values(), default=len(waiting) + 1) - len(waiting)
    numbers: dict[str, int] = {}
    while waiting:
        # In a cycle of parents, which no release writes, the first id is next.
        following = (version for version in waiting if places[version][1] not in waiting)
        version = next(following, waiting[0])
        waiting.remove(version)
        numbers[version] = first + len(numbers)
    return numbers | dict(sorted(numbered.items(), key=lambda item: (item[1], item[0])))


def _place(path: Path) -> tuple[int | None, str | None]:
    """Returns number and parent of a manifest of any schema; None for what it does not name."""
    try:
        content = json.loads(path.read_bytes())
        base = (content["corpus"].get("update") or {}).get("base")
        number, parent = content.get("number"), content.get("parent") or base
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, None
    return number if isinstance(number, int) else None, parent


def current_version(root: Path, name: str) -> str:
    """Returns the id of the active version.

    Raises:
        IndexVersionError: If the index has no active version.
    """
    path = index_folder(root, name) / _CURRENT
    try:
        version = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        message = (
            f"index '{name}' has no active version in {root}: build it with "
            f"care index CORPUS --index {name}"
        )
        raise IndexVersionError(message, code="no_active_version", index=name) from error
    if not _NAME.fullmatch(version):
        raise IndexVersionError.at(
            path, "does not contain a version id: activate a version", "bad_current"
        )
    return version


def with_version(active: Callable[[], str], use: Callable[[str], _T]) -> _T:
    """Returns what `use` returns for the id of the active version.

    If `use` fails and another version is active by then, it is called again: the first version may
    have been deleted in the meantime. Programs that only read need no lock for this reason.

    Args:
        active: Returns the id of the active version.
        use: Opens or reads the version of an id.

    Raises:
        CareError, OSError: The error of `use`, if the active version has not changed.
    """
    version = active()
    while True:
        try:
            return use(version)
        except (CareError, OSError):
            if (now := active()) == version:
                raise
            version = now


def check_version(root: Path, name: str, version: str) -> None:
    """Raises IndexVersionError if an index has no complete version of this id."""
    if version not in (versions := list_versions(root, name)):
        message = (
            f"index '{name}' has no version '{version}' in {root}; its versions are: "
            f"{', '.join(versions) or 'none'}"
        )
        raise IndexVersionError(message, code="unknown_version", version=version)


def set_current(root: Path, name: str, version: str) -> None:
    """Activates a version, atomically.

    Raises:
        IndexVersionError: If the version does not exist.
    """
    with new_current(root, name, version):
        pass


@contextmanager
def new_current(root: Path, name: str, version: str) -> Iterator[None]:
    """Activates a version, atomically, when the block succeeds.

    `CURRENT` is written before the block runs, so that a full disk fails before the block.

    Raises:
        IndexVersionError: If the version does not exist.
    """
    check_version(root, name, version)
    with atomic(index_folder(root, name) / _CURRENT) as temporary:
        temporary.write_text(version + "\n", encoding="utf-8")
        sync(temporary)
        yield


def read_manifest(folder: Path) -> IndexManifest:
    """Reads the manifest of a version, in the current or the previous schema.

    Raises:
        IndexVersionError: If the manifest is missing, invalid, or of another schema.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        schema = content["schema_version"]
        if schema == OLDEST_SCHEMA_VERSION:
            content = upgrade_manifest(content)
        elif schema != SCHEMA_VERSION:
            older = isinstance(schema, int) and schema < OLDEST_SCHEMA_VERSION
            reason = (
                f"has schema version {schema}; supported are {OLDEST_SCHEMA_VERSION} and "
                f"{SCHEMA_VERSION}: {'build the index again' if older else 'install a new release'}"
            )
            raise IndexVersionError.at(path, reason, "unsupported_schema", schema=schema)
        return IndexManifest.model_validate_json(json.dumps(content))
    except OSError as error:
        reason = (
            "is missing: its folder is not a complete index version; activate another version, or "
            "build the index again"
        )
        raise IndexVersionError.at(path, reason, "manifest_missing") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        reason = f"is not a valid manifest: {field}: {first['msg']}"
        raise IndexVersionError.at(path, reason, "invalid_manifest", field=field) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = "is not a valid manifest: it is not a JSON object with schema_version"
        raise IndexVersionError.at(path, reason, "invalid_manifest", field="") from error


def schema_of(folder: Path) -> int:
    """Returns the schema version of the manifest file of a valid version."""
    return int(json.loads((folder / MANIFEST).read_bytes())["schema_version"])


def verify_files(folder: Path, manifest: IndexManifest) -> None:
    """Compares the files of a version with the sizes and checksums of the manifest.

    Raises:
        IndexVersionError: If a file is missing, truncated, modified, cannot be read, or is a link.
    """
    for path in folder.iterdir():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            reason = "is a link or a special file: copy the file itself to this place"
            raise IndexVersionError.at(path, reason, "linked_file")
    records = manifest.all_files
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            reason = "is missing: build the index again"
            raise IndexVersionError.at(path, reason, "file_missing")
        if (size := path.stat().st_size) != record.bytes:
            reason = f"has {size} bytes instead of {record.bytes}: build the index again"
            raise IndexVersionError.at(path, reason, "wrong_size")
    with ThreadPoolExecutor() as pool:
        sums = {name: pool.submit(sha256_file, folder / name) for name in records}
    for name, record in records.items():
        try:
            found = sums[name].result()
        except OSError as error:
            reason = f"cannot be read ({error.strerror}): check the disk, or build the index again"
            raise IndexVersionError.at(folder / name, reason, "unreadable_file") from error
        if found != record.sha256:
            reason = "differs from its checksum in the manifest: build the index again"
            raise IndexVersionError.at(folder / name, reason, "wrong_checksum")
