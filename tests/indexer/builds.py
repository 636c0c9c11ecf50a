"""Helpers of tests of builds that do not import the application."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from indexer.build import BuildOptions

SHARD_SIZE = 16
BATCH_SIZE = 4


def build_options(folder: Path, corpus: Path, **changes: Any) -> BuildOptions:
    """Returns options of a small build of index 'test' that writes only to `folder`."""
    defaults = {
        "corpus": str(corpus),
        "name": "test",
        "indexes": folder / "indexes",
        "builds": folder / "builds",
        "shard_size": SHARD_SIZE,
        "batch_size": BATCH_SIZE,
        "progress": False,
    }
    return BuildOptions(**(defaults | changes))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Limits the size of files to `size` bytes, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def open_files(more: int) -> Iterator[None]:
    """Limits the process to `more` open files beside those that it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(list(Path("/proc/self/fd").iterdir())) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits the manifest of a version in place, without a checksum."""
    (folder / "manifest.sha256").unlink(missing_ok=True)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    edit(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def to_schema_2(manifest: dict[str, Any]) -> None:
    """Makes a manifest one of schema 2, which has the same fields."""
    manifest["schema_version"] = 2


def only_folder(path: Path) -> Path:
    """Returns the only folder in `path`."""
    (folder,) = (entry for entry in path.iterdir() if entry.is_dir())
    return folder


def state(indexes: Path) -> dict[str, bytes | None]:
    """Returns all files and folders of all indexes, except locks."""
    paths = (path for path in sorted(indexes.rglob("*")) if not path.name.endswith(".lock"))
    return {str(p.relative_to(indexes)): p.read_bytes() if p.is_file() else None for p in paths}
