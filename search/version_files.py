"""The files of an index version while it is open: whether they changed under their maps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

# Inode, size [bytes] and time of the last change [ns].
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of a version folder at one moment; equal if no file has changed."""

    folder: Path
    stamps: dict[str, Stamp]  # by name of the file; empty if the folder does not exist

    @classmethod
    def of(cls, folder: Path) -> Self:
        try:
            # Components are in folders of their own.
            paths = [*folder.iterdir(), *folder.glob("[!.]*/*")]
            stats = {str(path.relative_to(folder)): path.stat() for path in paths}
        except OSError:
            stats = {}
        stamps = {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}
        return cls(folder, stamps)

    def changed_in_place(self) -> bool:
        """Returns whether a file has other content now, so that a map of it shows that content.

        A file that was removed, renamed or replaced by another one stays readable through its map.
        """
        now = self.of(self.folder).stamps
        return any(
            name in now and now[name] != stamp and now[name][0] == stamp[0]
            for name, stamp in self.stamps.items()
        )
