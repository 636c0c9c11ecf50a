import hashlib
from pathlib import Path

import pytest

from core.errors import CareError
from core.files import atomic, exclusive, sha256_file, write_text, writing_in
from tests.errors import raises


def test_the_checksum_is_sha256_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(content).hexdigest()


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


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "血压\n")
    assert (tmp_path / "f").read_bytes() == "血压\n".encode()


def test_a_folder_is_locked_until_the_block_ends(tmp_path: Path) -> None:
    with exclusive(tmp_path), raises(CareError, "locked", path=tmp_path), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


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
