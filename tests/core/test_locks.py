import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from core.errors import CareError
from core.locks import LOCK, exclusive, lock_holder
from tests.errors import raises

HOLD = """
import sys
from pathlib import Path
from core.locks import exclusive
with exclusive(Path(sys.argv[1]), "build"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Locks a folder in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_folder_is_locked_until_the_block_ends(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with exclusive(folder, "a"), raises(CareError, "locked", path=folder), exclusive(folder, "b"):
        pass
    with exclusive(folder, "a"), exclusive(folder, "b", "other.lock"):
        pass


def test_the_error_names_the_holder(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    with (
        held(tmp_path) as process,
        raises(
            CareError, "locked", pid=process.pid, command="build", host=os.uname().nodename
        ) as caught,
        exclusive(tmp_path, "prune"),
    ):
        pass
    assert before <= datetime.fromisoformat(caught.value.fields["since"]) <= datetime.now(UTC)


def test_a_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        assert lock_holder(tmp_path / LOCK)
        process.kill()
        process.wait()
        # Its name is still in the file.
        assert json.loads((tmp_path / LOCK).read_bytes())["pid"] == process.pid
        assert lock_holder(tmp_path / LOCK) is None
        with exclusive(tmp_path, "prune"):
            holder = lock_holder(tmp_path / LOCK)
    assert holder
    assert (holder.pid, holder.command) == (os.getpid(), "prune")
    assert lock_holder(tmp_path / LOCK) is None


def test_a_command_waits_for_the_lock(tmp_path: Path) -> None:
    with held(tmp_path) as process:
        waiting = [sys.executable, "-c", HOLD.replace('"build"', '"b", wait=60'), str(tmp_path)]
        with subprocess.Popen(
            waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as second:
            process.communicate()  # ends its block
            assert second.stdout
            assert second.stdout.readline() == "locked\n"
            second.communicate()
            assert second.returncode == 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": 1}', b"\xff", b'{"pid": "x"}'])
def test_an_unknown_holder_is_not_named(tmp_path: Path, content: bytes) -> None:
    with exclusive(tmp_path, "a"):
        (tmp_path / LOCK).write_bytes(content)
        assert lock_holder(tmp_path / LOCK) is None
        with raises(CareError, "locked", pid=None), exclusive(tmp_path, "b"):
            pass


def test_a_folder_is_locked_on_a_full_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with exclusive(tmp_path, "prune"):
            assert (tmp_path / LOCK).read_bytes() == b""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_holder_may_delete_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    with exclusive(folder, "a"):
        shutil.rmtree(folder)
        # The folder is a new one.
        with exclusive(folder, "b"):
            assert (folder / LOCK).exists()
