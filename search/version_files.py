"""The files of an index version while it is open: whether they changed under their maps."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from core.errors import IndexVersionError
from core.manifest import IndexManifest
from core.versions import read_parts

# Inode, size [bytes] and time of the last change [ns].
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of a version at one moment; equal if no file has changed."""

    folders: tuple[Path, ...]  # that of the version first, then those of its segments
    stamps: dict[str, Stamp]  # by path of the file; empty if the folder does not exist

    @classmethod
    def of(cls, folder: Path, manifest: IndexManifest | None = None) -> Self:
        """Returns the files in the folder of a version and, given its manifest, its segments."""
        segments = manifest.segments if manifest else ()
        folders = folder, *(folder.parent / one.folder for one in segments)
        return cls(folders, _stamps(folders))

    def changed_in_place(self) -> bool:
        """Returns whether a file has other content now, so that a map of it shows that content.

        A file that was removed, renamed or replaced by another one stays readable through its map.
        """
        now = self.now().stamps
        return any(
            name in now and now[name] != stamp and now[name][0] == stamp[0]
            for name, stamp in self.stamps.items()
        )

    def now(self) -> "VersionFiles":
        """Returns the same files as they are now."""
        return replace(self, stamps=_stamps(self.folders))


def version_bytes(folder: Path, manifest: IndexManifest) -> int:
    """Returns the size of all files that the version in a folder needs [bytes].

    These are its own and those of its segments, with components. Of segments that cannot be read
    none count.
    """
    size = _bytes(manifest)
    if manifest.segments:
        with suppress(IndexVersionError, OSError):
            for part in read_parts(folder, manifest):
                size += part.path.stat().st_size if part.is_packed else _bytes(part.manifest)
    return size


def _bytes(manifest: IndexManifest) -> int:
    return sum(record.bytes for record in manifest.all_files.values())


def _stamps(folders: Iterable[Path]) -> dict[str, Stamp]:
    stamps: dict[str, Stamp] = {}
    for folder in dict.fromkeys(folders):
        try:
            # Components are in folders of their own.
            paths = [*folder.iterdir(), *folder.glob("[!.]*/*")]
            stats = {str(path): path.stat() for path in paths}
        except OSError:
            continue
        stamps |= {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}
    return stamps
