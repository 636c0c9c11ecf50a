"""Encoded vectors on disk: shards of a fixed size and a journal of the complete ones.

shard-00000.npy  float32 [shard size, dimension], one row per unique text
shard-00000.ids  the id of the first document with each text, one per line
shard-00000.npz  token vectors of each text, if there are any: `values`, uint8 [tokens, bytes], one
                 text after another, and `lengths`, int32 [shard size]
journal.jsonl    one line per complete shard, with its checksums
journal-*.jsonl  the same for processes that encode together, one file each, until all are done
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from core.files import atomic, sha256_file, write_text
from core.rows import Rows, offsets_of
from core.types import FloatArray, RowArray

JOURNAL = "journal.jsonl"
_JOURNALS = "journal-*.jsonl"

# Each mapped shard holds a file descriptor; the usual limits are 256 and 1,024 per process.
_OPEN_SHARDS = 64
# Token vectors of a shard take tens of megabytes in memory.
_LOADED_SHARDS = 4


class ShardRecord(BaseModel):
    """Entry of the journal for a complete shard; shards count from 0."""

    shard: int
    rows: int
    tokens: int  # encoded tokens; rows with reused vectors are not counted
    truncated: int  # encoded texts that exceeded the encoder's maximum length
    reused: int = 0
    failed: dict[int, str] = {}  # reason for each row that cannot be encoded; its vector is zero
    # Checksums of the files .npy, .ids and .npz; the last is None without token vectors.
    vectors_sha256: str
    ids_sha256: str
    tokens_sha256: str | None = None

    def checksums(self, folder: Path) -> dict[Path, str]:
        """Returns the files of the shard in a build folder, with their checksums."""
        found = {
            vectors_path(folder, self.shard): self.vectors_sha256,
            ids_path(folder, self.shard): self.ids_sha256,
        }
        if self.tokens_sha256 is not None:
            found[tokens_path(folder, self.shard)] = self.tokens_sha256
        return found


def vectors_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.npy"


def ids_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.ids"


def tokens_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.npz"


def write_shard(
    folder: Path,
    shard: int,
    vectors: FloatArray,
    ids: Sequence[str],
    *,
    tokens: int,
    truncated: int,
    reused: int = 0,
    failed: Mapping[int, str] | None = None,
    token_vectors: Sequence[NDArray[np.uint8]] | None = None,
    process: int | None = None,
) -> ShardRecord:
    """Writes the files of a shard, then appends its entry to the journal.

    The vectors are float32 [rows, dimension], the token vectors uint8 [tokens, bytes] for each row;
    for the other arguments see `ShardRecord`. With `process`, the number of one of several
    processes, the journal is that of this process.
    """
    path = vectors_path(folder, shard)
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.save(file, vectors)
    write_text(ids_path(folder, shard), "".join(f"{id_}\n" for id_ in ids))
    if token_vectors is not None:
        lengths = np.array([len(rows) for rows in token_vectors], np.int32)
        with atomic(tokens_path(folder, shard)) as temporary, temporary.open("wb") as file:
            np.savez(file, values=np.concatenate(token_vectors), lengths=lengths)
    record = ShardRecord(
        shard=shard,
        rows=len(vectors),
        tokens=tokens,
        truncated=truncated,
        reused=reused,
        failed=dict(failed or {}),
        vectors_sha256=sha256_file(path),
        ids_sha256=sha256_file(ids_path(folder, shard)),
        tokens_sha256=sha256_file(tokens_path(folder, shard))
        if token_vectors is not None
        else None,
    )
    _append(folder, record, JOURNAL if process is None else f"journal-{process:05d}.jsonl")
    return record


def _append(folder: Path, record: ShardRecord, name: str = JOURNAL) -> None:
    with (folder / name).open("a", encoding="utf-8") as journal:
        journal.write(_line(record))
        journal.flush()
        os.fsync(journal.fileno())


def _line(record: ShardRecord) -> str:
    # The last line may be incomplete after a kill or on a full disk: start a new line.
    return f"\n{record.model_dump_json()}\n"


def join_journals(folder: Path) -> None:
    """Moves the entries of all processes to the journal, in the order of the shards.

    No process may write a shard meanwhile.
    """
    if journals := list(folder.glob(_JOURNALS)):
        records = sorted(_records(folder).items())
        write_text(folder / JOURNAL, "".join(_line(record) for _, record in records))
        for path in journals:
            path.unlink()


def has_shards(folder: Path) -> bool:
    """Returns whether a build folder has a journal, without verifying any shard."""
    return (folder / JOURNAL).exists()


def complete_shards(folder: Path) -> list[ShardRecord]:
    """Returns the journal entries of shards 0 to n - 1, where n is the first incomplete shard.

    The checksums of the files are verified. Later shards must be encoded again.
    """
    records = _records(folder)
    complete: list[ShardRecord] = []
    while (record := records.get(len(complete))) and _is_complete(folder, record):
        complete.append(record)
    return complete


def incomplete_shards(folder: Path, shards: Iterable[int]) -> list[int]:
    """Returns those of some shards that have no journal entry or whose checksums differ."""
    records = _records(folder)
    return [
        shard
        for shard in shards
        if not ((record := records.get(shard)) and _is_complete(folder, record))
    ]


def _records(folder: Path) -> dict[int, ShardRecord]:
    """Returns the last entry of each shard; those of processes follow those of the journal."""
    records: dict[int, ShardRecord] = {}
    for path in (folder / JOURNAL, *sorted(folder.glob(_JOURNALS))):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = ShardRecord.model_validate_json(line)
            except ValidationError:
                continue  # empty, or incomplete after a kill
            records[entry.shard] = entry
    return records


def _is_complete(folder: Path, record: ShardRecord) -> bool:
    checksums = record.checksums(folder).items()
    return all(path.is_file() and sha256_file(path) == checksum for path, checksum in checksums)


def link_shards(source: Path, folder: Path) -> int:
    """Adds the complete shards of the build folder `source` as hard links; returns their number.

    Shards are never modified, so both folders can be used and deleted independently. If `source`
    is deleted meanwhile, the shards up to then are added.
    """
    linked = 0
    with suppress(FileNotFoundError):
        for record in complete_shards(source):
            for path in record.checksums(source):
                with suppress(FileExistsError):
                    os.link(path, folder / path.name)
            _append(folder, record)
            linked += 1
    return linked


class ShardedVectors:
    """The vectors of all documents, read from memory-mapped shards on demand.

    At most 64 shards are open at a time, those that were used last.

    Args:
        shard_size: Number of rows of all shards but the last.
        vector_of: int64 [documents], number of each document's unique text.
    """

    def __init__(self, folder: Path, shard_size: int, vector_of: RowArray) -> None:
        self._shard_size = shard_size
        self._vector_of = vector_of

        @lru_cache(_OPEN_SHARDS)
        def read(shard: int) -> FloatArray:
            vectors: FloatArray = np.load(vectors_path(folder, shard), mmap_mode="r")
            return vectors

        self._read = read
        self.dimension = read(0).shape[1]

    def __len__(self) -> int:
        return len(self._vector_of)

    def take(self, rows: RowArray) -> FloatArray:
        """Returns the vectors of rows, int64 [n], as float32 [n, dimension]."""
        unique = self._vector_of[rows]
        vectors = np.empty((len(unique), self.dimension), dtype=np.float32)
        shard_of = unique // self._shard_size
        for shard in np.unique(shard_of):
            in_shard = shard_of == shard
            vectors[in_shard] = self._read(int(shard))[unique[in_shard] % self._shard_size]
        return vectors

    def chunks(self, size: int) -> Iterator[tuple[int, FloatArray]]:
        """Yields consecutive chunks of `size` rows: the first row and float32 [n, dimension]."""
        for start in range(0, len(self), size):
            yield start, self.take(np.arange(start, min(start + size, len(self))))


class ShardedTokens:
    """The token vectors of all documents, read from shards as `ShardedVectors` are."""

    def __init__(self, folder: Path, shard_size: int, vector_of: RowArray) -> None:
        self._shard_size = shard_size
        self._vector_of = vector_of

        @lru_cache(_LOADED_SHARDS)
        def read(shard: int) -> Rows:
            with np.load(tokens_path(folder, shard)) as arrays:
                return Rows(arrays["values"], offsets_of(arrays["lengths"]))

        self._read = read

    def __len__(self) -> int:
        return len(self._vector_of)

    def row(self, row: int) -> NDArray[np.uint8]:
        """Returns the token vectors of a row, uint8 [tokens, bytes]."""
        shard, position = divmod(int(self._vector_of[row]), self._shard_size)
        return self._read(shard)[position]
