"""Vectors on disk: shards of a fixed size and a journal of those that are whole.

shard-00000.npy  float32 [shard size, dimension], row i is unique text i
shard-00000.ids  the id of the first document with that text, one a line
journal.jsonl    a line for each whole shard, with its checksums
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from core.files import atomic, sha256_file, write_text
from core.types import FloatArray, RowArray

JOURNAL = "journal.jsonl"


class ShardRecord(BaseModel):
    """A whole shard, as the journal describes it; reused rows have no tokens here.

    `failed` has a reason for each row that cannot be encoded; its vector is zero.
    """

    shard: int
    rows: int
    tokens: int
    truncated: int
    reused: int = 0
    failed: dict[int, str] = {}
    vectors_sha256: str
    ids_sha256: str


def vectors_path(folder: Path, shard: int) -> Path:
    """Returns where a shard's vectors lie."""
    return folder / f"shard-{shard:05d}.npy"


def ids_path(folder: Path, shard: int) -> Path:
    """Returns where a shard's ids lie."""
    return folder / f"shard-{shard:05d}.ids"


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
) -> ShardRecord:
    """Writes a shard whole and then its line in the journal."""
    path = vectors_path(folder, shard)
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.save(file, vectors)
    write_text(ids_path(folder, shard), "".join(f"{id_}\n" for id_ in ids))
    record = ShardRecord(
        shard=shard,
        rows=len(vectors),
        tokens=tokens,
        truncated=truncated,
        reused=reused,
        failed=dict(failed or {}),
        vectors_sha256=sha256_file(path),
        ids_sha256=sha256_file(ids_path(folder, shard)),
    )
    _append(folder, record)
    return record


def _append(folder: Path, record: ShardRecord) -> None:
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:
        # A kill or a full disk may have cut the line before off: begin a new one.
        journal.write(f"\n{record.model_dump_json()}\n")
        journal.flush()
        os.fsync(journal.fileno())


def has_shards(folder: Path) -> bool:
    """Returns whether a build folder may hold shards; unlike `whole_shards` it reads none."""
    return (folder / JOURNAL).exists()


def whole_shards(folder: Path) -> list[ShardRecord]:
    """Returns the leading shards that are whole on disk; what follows must be encoded again."""
    path = folder / JOURNAL
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records: dict[int, ShardRecord] = {}
    for line in lines:
        try:
            record = ShardRecord.model_validate_json(line)
        except ValidationError:
            continue  # blank, or cut off by a kill
        records[record.shard] = record
    whole: list[ShardRecord] = []
    while (following := records.get(len(whole))) and _is_whole(folder, following):
        whole.append(following)
    return whole


def _is_whole(folder: Path, record: ShardRecord) -> bool:
    vectors, ids = vectors_path(folder, record.shard), ids_path(folder, record.shard)
    checksums = ((vectors, record.vectors_sha256), (ids, record.ids_sha256))
    return all(path.is_file() and sha256_file(path) == checksum for path, checksum in checksums)


def link_shards(source: Path, folder: Path) -> int:
    """Takes the whole shards of another build folder over, by hard links, and returns their number.

    Shards are never changed in place, so both folders may be used and deleted independently.
    """
    records = whole_shards(source)
    for record in records:
        for path in (vectors_path(source, record.shard), ids_path(source, record.shard)):
            with suppress(FileExistsError):
                os.link(path, folder / path.name)
        _append(folder, record)
    return len(records)


class ShardedVectors:
    """The vectors of all documents, read from shards as they are needed.

    Args:
        folder: The build folder.
        shard_size: Rows of every shard but the last.
        vector_of: int64 [documents], the unique text of each document.
    """

    def __init__(self, folder: Path, shard_size: int, vector_of: RowArray) -> None:
        self._shard_size = shard_size
        self._vector_of = vector_of
        count = int(vector_of.max()) + 1
        self._shards: list[FloatArray] = [
            np.load(vectors_path(folder, shard), mmap_mode="r")
            for shard in range(-(-count // shard_size))
        ]
        self.dimension = self._shards[0].shape[1]

    def __len__(self) -> int:
        return len(self._vector_of)

    def take(self, rows: RowArray) -> FloatArray:
        """Returns float32 [len(rows), dimension], the vectors of these documents."""
        unique = self._vector_of[rows]
        vectors = np.empty((len(unique), self.dimension), dtype=np.float32)
        shard_of = unique // self._shard_size
        for shard in np.unique(shard_of):
            here = shard_of == shard
            vectors[here] = self._shards[shard][unique[here] % self._shard_size]
        return vectors

    def chunks(self, size: int) -> Iterator[tuple[int, FloatArray]]:
        """Yields the first row and the vectors of successive runs of `size` documents."""
        for start in range(0, len(self), size):
            yield start, self.take(np.arange(start, min(start + size, len(self))))
