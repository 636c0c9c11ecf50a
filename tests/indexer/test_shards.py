import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from core.shards import (
    ShardedVectors,
    complete_shards,
    ids_path,
    link_shards,
    vectors_path,
    write_shard,
)
from core.types import FloatArray
from tests.indexer.builds import open_files

SIZE, DIMENSION = 5, 3


def shard_vectors(shard: int) -> FloatArray:
    return np.random.default_rng(shard).normal(size=(SIZE, DIMENSION)).astype(np.float32)


def write(folder: Path, shard: int) -> None:
    ids = [f"文{shard}-{i}" for i in range(SIZE)]
    write_shard(folder, shard, shard_vectors(shard), ids, tokens=10 * shard, truncated=shard)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build folder with three complete shards."""
    for shard in range(3):
        write(tmp_path, shard)
    return tmp_path


def whole(folder: Path) -> list[int]:
    return [record.shard for record in complete_shards(folder)]


def test_a_shard_is_an_array_a_list_of_ids_and_a_record(folder: Path) -> None:
    np.testing.assert_array_equal(np.load(vectors_path(folder, 1)), shard_vectors(1))
    assert ids_path(folder, 1).read_text("utf-8").split() == [f"文1-{i}" for i in range(SIZE)]
    record = complete_shards(folder)[1]
    assert (record.shard, record.rows, record.tokens, record.truncated) == (1, SIZE, 10, 1)


def test_shards_that_are_deleted_meanwhile_are_not_linked(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path_factory.mktemp("target")
    link = os.link

    def link_and_prune(source: Path, path: Path) -> None:
        link(source, path)
        if source == ids_path(folder, 1):
            shutil.rmtree(folder)

    monkeypatch.setattr(os, "link", link_and_prune)
    assert link_shards(folder, target) == 2
    assert whole(target) == [0, 1]


def test_a_folder_without_journal_has_no_complete_shard(tmp_path: Path) -> None:
    assert complete_shards(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
    ],
    ids=["missing", "cut", "changed"],
)
@pytest.mark.parametrize("path_of", [vectors_path, ids_path])
def test_shards_after_a_damaged_one_are_not_complete(
    folder: Path, path_of: Callable[[Path, int], Path], damage: Callable[[Path], object]
) -> None:
    damage(path_of(folder, 1))
    assert whole(folder) == [0]
    write(folder, 1)
    assert whole(folder) == [0, 1, 2]


def test_only_the_truncated_line_of_a_journal_is_lost(folder: Path) -> None:
    journal = folder / "journal.jsonl"
    content = journal.read_bytes()
    last = content.index(b'{"shard":2')
    for size in (last, last + 1, last + 20, len(content) - 2, len(content) - 1):
        journal.write_bytes(content[:size])
        assert whole(folder) in ([0, 1], [0, 1, 2])
        write(folder, 2)
        assert whole(folder) == [0, 1, 2]


@pytest.mark.parametrize("line", [b"[]", b"7", b'{"shard": 1}', b"not json"])
def test_invalid_lines_of_a_journal_are_skipped(folder: Path, line: bytes) -> None:
    journal = folder / "journal.jsonl"
    journal.write_bytes(line + b"\n" + journal.read_bytes() + line)
    assert whole(folder) == [0, 1, 2]


def test_each_document_has_the_vector_of_its_text(folder: Path) -> None:
    vector_of = np.array([0, 14, 3, 3, 5, 4, 9, 10])
    vectors = ShardedVectors(folder, SIZE, vector_of)
    expected = np.concatenate([shard_vectors(shard) for shard in range(3)])[vector_of]
    assert (len(vectors), vectors.dimension) == (8, DIMENSION)
    np.testing.assert_array_equal(vectors.take(np.array([7, 0, 0, 2])), expected[[7, 0, 0, 2]])
    starts, chunks = zip(*vectors.chunks(3), strict=True)
    assert starts == (0, 3, 6)
    np.testing.assert_array_equal(np.concatenate(chunks), expected)


def test_more_shards_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for shard in range(1062):
        np.save(vectors_path(tmp_path, shard), np.full((1, DIMENSION), shard, np.float32))
    with open_files(100):
        vectors = ShardedVectors(tmp_path, 1, np.arange(1062))
        rows = np.array([0, 1061, 530, 0])
        assert vectors.take(rows)[:, 0].tolist() == rows.tolist()
        assert np.concatenate([chunk for _, chunk in vectors.chunks(100)]).sum() == (
            DIMENSION * sum(range(1062))
        )
