import errno
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.files import (
    atomic,
    new_folder,
    read_small,
    remove_folder,
    remove_temporary,
    sha256_file,
    write_text,
    writing_in,
)
from tests.errors import raises


def test_the_checksum_is_sha256_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def other_kinds(folder: Path) -> dict[str, Path]:
    """Paths that are not regular files; opening a FIFO without a writer would wait for ever."""
    paths = {name: folder / name for name in ("fifo", "folder", "socket", "missing", "link")}
    os.mkfifo(paths["fifo"])
    paths["folder"].mkdir()
    paths["link"].symlink_to(paths["fifo"])
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(paths["socket"]))
    return paths | {"device": Path("/dev/zero"), "terminal": Path("/dev/tty")}


@pytest.mark.parametrize("links", [True, False])
def test_only_regular_files_are_read(tmp_path: Path, links: bool) -> None:
    for path in other_kinds(tmp_path).values():
        with pytest.raises(OSError, match=str(path)):
            read_small(path, links=links)
        with pytest.raises(OSError, match=str(path)):
            sha256_file(path)


def test_a_small_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path, link = tmp_path / "f", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_small(path, 5) == read_small(link, 5) == b"12345"
    with pytest.raises(OSError, match="4") as caught:
        read_small(path, 4)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(OSError, match="link"):
        read_small(link, links=False)


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_unchanged_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_not_replaced_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError):
            write_text(folder, "text")
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "血压\n")
    assert (tmp_path / "f").read_bytes() == "血压\n".encode()


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with atomic(path) as first, atomic(path) as second:
        first.write_text("1")
        second.write_text("2")
    assert path.read_text() == "1"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    other = tmp_path / ".notes.tmp"
    other.touch()
    with atomic(tmp_path / "f") as temporary:
        temporary.touch()
        remove_temporary(tmp_path)
        assert list(tmp_path.iterdir()) == [other]
        temporary.touch()


def test_a_folder_is_removed_while_another_process_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    for name in "abc":
        (folder / name).touch()
    unlink = os.unlink

    def unlink_twice(path: str, **kwargs: Any) -> None:
        unlink(path, **kwargs)
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink_twice)
    remove_folder(folder)
    assert not folder.exists()
    remove_folder(folder)


def test_a_new_folder_has_one_writer(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with new_folder(folder) as temporary:
        (temporary / "f").write_text("1")
        with raises(CareError, "locked", command="write out"), new_folder(folder):
            pass
    assert (folder / "f").read_text() == "1"
    assert list(tmp_path.iterdir()) == [folder]
    with raises(CareError, "folder_exists"), new_folder(folder):
        pass
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_survives_a_process_that_was_killed_while_it_replaced_it(tmp_path: Path) -> None:
    folder, earlier = tmp_path / "out", tmp_path / ".out.old"
    earlier.mkdir()
    (earlier / "f").write_text("1")
    with pytest.raises(KeyError), new_folder(folder, replace=True):
        raise KeyError
    assert (folder / "f").read_text() == "1"
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("error", "path", "reason"),
    [
        (OSError(28, "No space left on device"), "builds", "No space left on device"),
        (OSError(28, "No space left on device", "builds/a"), "builds/a", "No space left"),
        (OSError("9 requested and 5 written"), "builds", "9 requested and 5 written"),
    ],
)
def test_a_disk_error_names_the_path(error: OSError, path: str, reason: str) -> None:
    with raises(CareError, "input_output", path=path) as caught, writing_in(Path("builds")):
        raise error
    assert reason in str(caught.value)
