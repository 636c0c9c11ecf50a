"""`segment.pack`: all files of a small segment as one, compressed.

It is the JSON of `segment.json` and a line break, then the files that this lists, in its order, all
compressed by zlib. A version names it by its checksum, so whoever reads it verifies all of them.

`packs.zdict` is zlib's preset dictionary, of what most packs have: texts of data/sample, the terms
of four documents in Tantivy's form, and the files of one short document. Packs on disk need it as
it is. Packs without a dictionary are read too.
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
_DICTIONARY = Path(__file__).with_name("packs.zdict").read_bytes()


def write_pack(path: Path, facts: bytes, files: Iterable[Path]) -> bytes:
    """Writes a pack of files in the order in which the facts, JSON in one line, list them.

    Returns:
        Its content.
    """
    compressor = zlib.compressobj(zdict=_DICTIONARY)
    whole = b"".join([facts, b"\n", *(file.read_bytes() for file in files)])
    content = compressor.compress(whole) + compressor.flush()
    path.write_bytes(content)
    return content


def read_facts(path: Path, content: bytes) -> bytes:
    """Returns the facts in the content of the pack at a path; IndexVersionError if it has none."""
    return _decompress(path, content, _MOST_FACTS).partition(b"\n")[0]


def unpack(path: Path, content: bytes, records: Mapping[str, FileRecord], target: Path) -> None:
    """Writes the files in the content of the pack at a path, which have `records`, to a folder.

    IndexVersionError if their sizes are others.
    """
    size = sum(record.bytes for record in records.values())
    whole = _decompress(path, content, min(size, _MOST_BYTES) + _MOST_FACTS)
    rest = memoryview(whole.partition(b"\n")[2])
    if len(rest) != size:
        raise _damaged(path)
    for name, record in records.items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(rest[: record.bytes])
        rest = rest[record.bytes :]


def _decompress(path: Path, content: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj(zdict=_DICTIONARY).decompress(content, most)
    except zlib.error as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> IndexVersionError:
    reason = "is not a readable pack of files: build the index again"
    return IndexVersionError.at(path, reason, "unreadable_version")
