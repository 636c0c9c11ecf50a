"""Index versions on disk: immutable folders, and a file that names the active one.

<root>/<name>/CURRENT                  the active version's id
<root>/<name>/<version>/manifest.json  written last; a folder without it is no version
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ValidationError

from core.errors import IndexVersionError
from core.files import sha256_file, write_text
from core.types import SCHEMA_VERSION, IndexManifest

MANIFEST = "manifest.json"
VECTORS = "vectors.faiss"

_CURRENT = "CURRENT"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Schema(BaseModel):
    """What manifests of every schema version have; read before the rest."""

    schema_version: int


def index_folder(root: Path, name: str) -> Path:
    """Returns the folder of an index.

    Raises:
        IndexVersionError: If the name could leave the folder or confuse a shell.
    """
    if not _NAME.fullmatch(name):
        raise IndexVersionError(
            f"'{name}' is no index name: use up to 64 letters, digits, '.', '_' and '-'"
        )
    return root / name


def list_versions(root: Path, name: str) -> list[str]:
    """Returns the ids of all complete versions, oldest first."""
    folder = index_folder(root, name)
    return sorted(path.parent.name for path in folder.glob(f"[!.]*/{MANIFEST}"))


def current_version(root: Path, name: str) -> str:
    """Returns the id of the active version.

    Raises:
        IndexVersionError: If there is none.
    """
    path = index_folder(root, name) / _CURRENT
    try:
        version = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise IndexVersionError(
            f"index '{name}' has no active version in {root}: build it with "
            f"make build-index CORPUS=… INDEX={name}"
        ) from error
    if not _NAME.fullmatch(version):
        raise IndexVersionError(f"{path} does not name a version")
    return version


def set_current(root: Path, name: str, version: str) -> None:
    """Makes a version the active one, atomically.

    Raises:
        IndexVersionError: If there is no such version.
    """
    if version not in list_versions(root, name):
        raise IndexVersionError(f"index '{name}' has no version '{version}' in {root}")
    write_text(index_folder(root, name) / _CURRENT, version + "\n")


def read_manifest(folder: Path) -> IndexManifest:
    """Reads the manifest of one version.

    Raises:
        IndexVersionError: If it is missing, not valid, or of another schema version.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        schema_version = _Schema.model_validate_json(content).schema_version
        if schema_version != SCHEMA_VERSION:
            raise IndexVersionError(
                f"{path} has schema version {schema_version}; this program reads "
                f"{SCHEMA_VERSION}: build the index again"
            )
        return IndexManifest.model_validate_json(content)
    except OSError as error:
        raise IndexVersionError(f"{path} is missing: {folder} is no index version") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise IndexVersionError(f"{path} is not valid: {field}: {first['msg']}") from error


def verify_files(folder: Path, manifest: IndexManifest) -> None:
    """Holds each file of a version against the manifest's sizes and checksums.

    Raises:
        IndexVersionError: At the first file that is missing, truncated or changed.
    """
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise IndexVersionError(f"{path} is missing")
        size = path.stat().st_size
        if size != record.bytes:
            raise IndexVersionError(f"{path} has {size} bytes instead of {record.bytes}")
    with ThreadPoolExecutor() as pool:
        sums = pool.map(sha256_file, [folder / name for name in manifest.files])
    for (name, record), found in zip(manifest.files.items(), sums, strict=True):
        if found != record.sha256:
            raise IndexVersionError(
                f"{folder / name} is corrupt: its checksum is not the manifest's"
            )
