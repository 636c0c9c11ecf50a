import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core.scratch import allocate, scratch, temporary_folder
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


_USES = """
import sys
from pathlib import Path
from core.scratch import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def _use(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Starts a process that uses a temporary folder until its input ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", _USES, str(parent)], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_a_temporary_folder_is_removed_at_the_end_of_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with temporary_folder(tmp_path) as first, temporary_folder(tmp_path) as second:
            assert first != second
            assert list(first.iterdir()) == []
        assert not list(tmp_path.iterdir())


def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next_one(
    tmp_path: Path,
) -> None:
    killed, left = _use(tmp_path)
    killed.kill()
    killed.wait()
    assert (left / "file").exists()
    (tmp_path / "care-tmp-link").symlink_to(tmp_path)
    alive, used = _use(tmp_path)
    assert not left.exists()
    with temporary_folder(tmp_path):
        assert (used / "file").exists()
    alive.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["care-tmp-link"]


def test_processes_that_make_and_remove_folders_at_once_do_not_disturb_each_other(
    tmp_path: Path,
) -> None:
    program = """
import sys
from pathlib import Path
from core.scratch import temporary_folder
for i in range(300):
    with temporary_folder(Path(sys.argv[1])) as folder:
        (folder / "file").write_text(str(i))
        assert (folder / "file").read_text() == str(i)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert not list(tmp_path.iterdir())
