"""Compares the files of an index version with their sizes and checksums."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core.errors import IndexVersionError
from core.files import sha256_file
from core.manifest import VECTORS_FILE, FileRecord, IndexManifest
from core.versions import MANIFEST, OF_THE_MACHINE, Part, linked, read_parts

# Files that every segment has, apart from those in Milvus.
_FILES = ("documents.arrow", "filters.arrow", VECTORS_FILE)


def verify_files(folder: Path, manifest: IndexManifest, known: Collection[Part] = ()) -> list[Part]:
    """Compares the files of a version with the sizes and checksums of the manifest.

    Those of the segments that are `known` are not compared again. Packs are verified whenever they
    are read.

    Returns:
        What is known of each segment.

    Raises:
        IndexVersionError: If a file is missing, truncated, modified, cannot be read or is not in
            the manifest although it is needed, or if a folder or anything in it is a link.
    """
    parts = read_parts(folder, manifest, known)
    before = {part.key for part in known}
    new = [part for part in parts if part.key not in before]
    for part in new:
        if part.manifest.store == "milvus":
            continue
        records = part.manifest.all_files
        for name in _FILES:
            if name not in records:
                reason = f"does not list {name}: build the index again"
                raise IndexVersionError.at(part.folder / MANIFEST, reason, "file_missing")
    for own in {folder, *(part.folder for part in new)}:
        for path in (own, *own.rglob("*")):
            # What is gone by now belonged to another version, or is found to be missing below.
            if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
                raise linked(path)
    files = {folder / name: record for name, record in manifest.all_files.items()}
    for part in new:
        if not part.is_packed:
            files |= {part.folder / name: one for name, one in part.manifest.all_files.items()}
    compare_files(files)
    return parts


def compare_files(files: dict[Path, FileRecord]) -> None:
    """Compares files with their sizes and checksums."""
    for path, record in files.items():
        if not path.is_file():
            reason = "is missing: build the index again"
            raise IndexVersionError.at(path, reason, "file_missing")
        if (size := path.stat().st_size) != record.bytes:
            reason = f"has {size} bytes instead of {record.bytes}: build the index again"
            raise IndexVersionError.at(path, reason, "wrong_size")
    with ThreadPoolExecutor() as pool:
        sums = {path: pool.submit(sha256_file, path) for path in files}
    for path, record in files.items():
        try:
            found = sums[path].result()
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise
            reason = f"cannot be read ({error.strerror}): check the disk, or build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_file") from error
        if found != record.sha256:
            reason = "differs from its checksum in the manifest: build the index again"
            raise IndexVersionError.at(path, reason, "wrong_checksum")
