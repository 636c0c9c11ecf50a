"""`segment.pack`: all files of a small segment as one, compressed.

It is the JSON of `segment.json` and a line break, then the files that this lists, in its order, all
compressed by zlib. A version names it by its checksum, so whoever reads it verifies all of them.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from core.errors import IndexVersionError
from core.manifest import FileRecord

PACK_FILE = "segment.pack"
# Larger segments have files of their own, which are mapped and shared between processes.
MOST_ROWS = 128
# Largest pack that is read, and its facts [bytes].
_MOST_BYTES, _MOST_FACTS = 1 << 30, 1 << 24


def write_pack(path: Path, facts: bytes, files: Iterable[Path]) -> bytes:
    """Writes a pack of files in the order in which the facts, JSON in one line, list them.

    Returns:
        Its content.
    """
    content = zlib.compress(b"\n".join([facts, b"".join(file.read_bytes() for file in files)]))
    path.write_bytes(content)
    return content


def read_facts(path: Path, content: bytes) -> bytes:
    """Returns the facts in the content of the pack at a path; IndexVersionError if it has none."""
    try:
        start = zlib.decompressobj().decompress(content, _MOST_FACTS)
    except zlib.error as error:
        raise _damaged(path) from error
    return start.partition(b"\n")[0]


def unpack(path: Path, content: bytes, records: Mapping[str, FileRecord], target: Path) -> None:
    """Writes the files in the content of the pack at a path, which have `records`, to a folder.

    IndexVersionError if their sizes are others.
    """
    size = sum(record.bytes for record in records.values())
    try:
        whole = zlib.decompressobj().decompress(content, min(size, _MOST_BYTES) + _MOST_FACTS)
    except zlib.error as error:
        raise _damaged(path) from error
    rest = memoryview(whole.partition(b"\n")[2])
    if len(rest) != size:
        raise _damaged(path)
    for name, record in records.items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(rest[: record.bytes])
        rest = rest[record.bytes :]


def _damaged(path: Path) -> IndexVersionError:
    reason = "is not a readable pack of files: build the index again"
    return IndexVersionError.at(path, reason, "unreadable_version")
