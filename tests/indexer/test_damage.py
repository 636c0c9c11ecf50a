"""Each change of a byte, link, file or value of a version is refused with an IndexVersionError."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import IndexVersionError
from core.versions import IndexFolder, read_manifest
from indexer.publication import verify_version
from tests.errors import raises
from tests.indexer.builds import edit_manifest


def files_of(folder: Path) -> list[Path]:
    """All files of a version, of its components too."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(at: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return change


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def link(path: Path) -> None:
    """Replaces a file or folder by a link to the same content elsewhere."""
    elsewhere = path.parents[2] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES = [*map(flip, (0, 0.3, 0.5, 0.9, 1)), cut, empty, link, fifo, folder_instead]


@pytest.fixture
def copies(published: Path, tmp_path: Path) -> Iterator[Path]:
    """Yields copies of a whole version, each time a new one."""

    def copy() -> Iterator[Path]:
        for number in range(1_000):
            folder = tmp_path / f"copy-{number}" / published.parent.name / published.name
            shutil.copytree(published, folder)
            yield folder
            shutil.rmtree(tmp_path / f"copy-{number}")

    return copy()


def test_every_change_of_a_file_is_refused(published: Path, copies: Iterator[Path]) -> None:
    names = [path.relative_to(published) for path in files_of(published)]
    assert {name.parts[0] for name in names} > {"lexical", "manifest.json", "manifest.sha256"}
    verify_version(next(copies))
    for name in names:
        for change in CHANGES:
            folder = next(copies)
            change(folder / name)
            with pytest.raises(IndexVersionError):
                verify_version(folder)


def test_a_missing_file_is_refused_but_for_the_checksum_of_the_manifest(
    published: Path, copies: Iterator[Path]
) -> None:
    for path in files_of(published):
        folder = next(copies)
        (folder / path.relative_to(published)).unlink()
        if path.name == "manifest.sha256":  # it is written after the manifest
            verify_version(folder)
        else:
            with pytest.raises(IndexVersionError):
                verify_version(folder)


@pytest.mark.parametrize("name", [".", "lexical"])
def test_a_link_in_place_of_a_folder_is_refused(copies: Iterator[Path], name: str) -> None:
    folder = next(copies)
    link(folder / name if name != "." else folder)
    with raises(IndexVersionError, "linked_file"):
        verify_version(folder)


def test_the_folders_above_a_version_can_be_links(copies: Iterator[Path], tmp_path: Path) -> None:
    folder = next(copies)
    (tmp_path / "indexes-link").symlink_to(folder.parents[1])
    verify_version(tmp_path / "indexes-link" / folder.parent.name / folder.name)
    (tmp_path / "other-name").symlink_to(folder.parent)
    verify_version(tmp_path / "other-name" / folder.name)


def rename_file(new: str) -> Callable[[dict[str, Any]], None]:
    """Gives the first file of a component another name in the manifest."""

    def edit(manifest: dict[str, Any]) -> None:
        files = manifest["components"]["lexical"]["files"]
        files[new] = files.pop(next(iter(files)))

    return edit


NAMES = ["../../etc/hostname", "/etc/hostname", "..", "a/../b", "lexical/../x", "lexical/a/b", ""]


@pytest.mark.parametrize(
    "edit",
    [
        *map(rename_file, NAMES),
        lambda m: m["components"].update(x={"format": 1, "files": {"../x": {}}}),
        lambda m: m.update(fusion={"lexical": float("nan")}),
        lambda m: m.update(fusion={"lexical": float("inf")}),
        lambda m: m.update(fusion={"lexical": -1}),
        lambda m: m.update(search_parameters={"efSearch": -1}),
        lambda m: m.update(search_parameters={"efSearch": 10**12}),
        lambda m: m.update(filter_fields=dict.fromkeys(m["filter_fields"], -1)),
        lambda m: m.update(build_seconds=float("inf")),
        lambda m: m.update(count=10**400),
        lambda m: m["recall"].update(recall=float("nan")),
        lambda m: m["files"].pop("documents.arrow"),
        lambda m: m["components"]["lexical"].update(format=10**30),
        lambda m: m["canaries"][0].update(vector="AAAAAA=="),
        lambda m: m["canaries"][0].update(vector="x"),
    ],
)
def test_a_manifest_with_impossible_values_is_refused(
    copies: Iterator[Path], edit: Callable[[dict[str, Any]], Any]
) -> None:
    folder = next(copies)
    edit_manifest(folder, edit)
    with pytest.raises(IndexVersionError):
        verify_version(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"schema_version": 2, "corpus": ' + b"[" * 200_000,
        b'{"schema_version": ' + b"1" * 10_000 + b"}",
        b"\xff\xfe{}",
        b'{"schema_version": NaN}',
        b"",
        b"null",
        b"[]",
    ],
    ids=["nested", "nested field", "long number", "UTF-16", "NaN", "empty", "null", "list"],
)
def test_a_manifest_that_cannot_be_parsed_is_refused(
    copies: Iterator[Path], content: bytes
) -> None:
    folder = next(copies)
    (folder / "manifest.json").write_bytes(content)
    with raises(IndexVersionError, "wrong_checksum", path=folder / "manifest.json"):
        verify_version(folder)
    (folder / "manifest.sha256").unlink()
    with raises(IndexVersionError, "invalid_manifest"):
        verify_version(folder)
    assert IndexFolder(folder.parents[1], folder.parent.name).versions() == [folder.name]


@pytest.mark.parametrize("field", ["name", "version"])
def test_a_manifest_of_another_folder_is_refused(copies: Iterator[Path], field: str) -> None:
    folder = next(copies)
    edit_manifest(folder, lambda manifest: manifest.update({field: "other"}))
    fields = json.loads((folder / "manifest.json").read_bytes())
    expected = {"index": fields["name"], "version": fields["version"]}
    with raises(IndexVersionError, "misplaced_version", **expected):
        verify_version(folder)


def test_the_identity_knows_what_a_search_depends_on(published: Path) -> None:
    manifest = read_manifest(published)
    same = {"number": 9, "parent": "other"}
    assert manifest.model_copy(update=same).identity == manifest.identity
    for other in ({"fusion": {"lexical": 0.9}}, {"version": "other"}, {"files": {}}):
        assert manifest.model_copy(update=other).identity != manifest.identity


@pytest.mark.parametrize("damage", [fifo, folder_instead], ids=["FIFO", "folder"])
def test_current_is_a_regular_file(
    published: Path, indexes: Path, damage: Callable[[Path], None]
) -> None:
    current = published.parent / "CURRENT"
    damage(current)
    with raises(IndexVersionError, "bad_current", path=current):
        IndexFolder(indexes, "test").active()
