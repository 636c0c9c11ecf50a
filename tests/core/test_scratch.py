from pathlib import Path

import numpy as np
import pytest

from core.scratch import allocate, scratch
from tests.indexer.builds import room_for


def test_records_keep_their_order_and_outlive_their_file(tmp_path: Path) -> None:
    with scratch(tmp_path, np.int64) as records:
        for start in range(0, 100_000, 1000):
            records.append(np.arange(start, start + 1000).data)
        found = records.array()
        assert not list(tmp_path.iterdir())
    assert np.array_equal(found, np.arange(100_000))
    assert not found.flags.writeable


def test_no_records_give_an_empty_array(tmp_path: Path) -> None:
    with scratch(tmp_path, "S16") as records:
        assert records.array().shape == allocate(tmp_path, "S16", 0).shape == (0,)


def test_allocated_records_are_written_in_any_order(tmp_path: Path) -> None:
    records = allocate(tmp_path, np.int64, 1000)
    assert not records.any()
    order = np.random.default_rng(0).permutation(1000)
    records[order] = np.arange(1000)
    assert np.array_equal(records[order], np.arange(1000))
    assert not list(tmp_path.iterdir())


def test_missing_disk_space_is_an_error_at_allocation(tmp_path: Path) -> None:
    with room_for(4096), pytest.raises(OSError, match="File too large"):
        allocate(tmp_path, np.int64, 1000)
