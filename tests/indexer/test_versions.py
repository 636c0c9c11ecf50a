import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from care.cli.main import main
from core.errors import CareError, IndexVersionError
from core.locks import exclusive
from core.manifest import SCHEMA_VERSION
from core.versions import schema_of
from indexer.build import build, encode
from indexer.publication import IndexWriter, holders
from indexer.versions import activate, migrate, prune, rollback
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import build_options, edit_manifest, to_schema_2
from tests.indexer.conftest import OptionsMaker


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with `indexes` and `builds` of four versions, and their ids."""
    folder, ids = tmp_path_factory.mktemp("built"), []
    for count in range(10, 14):
        options = build_options(folder, write_jsonl(folder / "c.jsonl", make_records(count)))
        ids.append(build(options, BigramEncoder("document"), BigramEncoder())[0].version)
    return folder, ids


@pytest.fixture
def versions(built: tuple[Path, list[str]], tmp_path: Path) -> list[str]:
    """The ids of four versions, oldest first; the last one is active."""
    folder, ids = built
    for name in ("indexes", "builds"):
        shutil.copytree(folder / name, tmp_path / name)
    return list(ids)


@pytest.fixture
def index(indexes: Path) -> IndexWriter:
    return IndexWriter(indexes, "test")


@pytest.fixture
def builds(tmp_path: Path) -> Path:
    return tmp_path / "builds"


def keys(builds: Path) -> list[str]:
    """Returns the first digits of the keys of the remaining build folders."""
    return sorted(path.name[:8] for path in (builds / "test").iterdir())


def keys_of(versions: list[str]) -> list[str]:
    return sorted(version.rpartition("-")[2] for version in versions)


def test_any_known_and_intact_version_can_be_activated(
    versions: list[str], index: IndexWriter
) -> None:
    assert index.versions() == versions
    assert index.active() == versions[-1]
    for version in versions:
        activate(index, version)
        assert index.active() == version
    with raises(IndexVersionError, "unknown_version", version="x"):
        activate(index, "x")
    (index.path / versions[2] / "vectors.faiss").unlink()
    with raises(IndexVersionError, "file_missing"):
        activate(index, versions[2])
    with raises(IndexVersionError, "file_missing"):
        rollback(index)
    assert index.active() == versions[-1]


def test_without_an_active_version_nothing_is_deleted(
    versions: list[str], index: IndexWriter, builds: Path
) -> None:
    (index.path / "CURRENT").unlink()
    with raises(IndexVersionError, "no_active_version"):
        prune(index, builds, keep=0)
    assert index.versions() == versions


def test_the_build_folder_of_a_deleted_version_is_deleted_unless_locked(
    versions: list[str], index: IndexWriter, builds: Path
) -> None:
    assert keys(builds) == keys_of(versions)
    (at_work,) = (builds / "test").glob(f"{keys_of(versions[:1])[0]}*")
    with exclusive(at_work, "build"):
        prune(index, builds, keep=2)
    assert keys(builds) == keys_of([versions[0], *versions[2:]])


def test_the_build_folder_of_a_kept_version_is_kept(
    build_version: Builder, index: IndexWriter, builds: Path
) -> None:
    first, second = (build_version(make_records(20), factory=f) for f in ("Flat", "HNSW8"))
    assert prune(index, builds, keep=1) == [first.version]
    assert keys(builds) == keys_of([second.version])


def test_build_folders_without_a_version_are_kept(
    versions: list[str], index: IndexWriter, builds: Path, options: OptionsMaker
) -> None:
    """Folders of encoded shards, of a killed build, and other folders."""
    encoded = encode(options(make_records(9)), BigramEncoder("document")).folder
    killed = builds / "test" / "0123456789abcdef"
    other = builds / "test" / "engines"
    for path in (killed, other):
        path.mkdir()
    # A second build from the first version's shards, killed when it published.
    (index.path / f".29990101T000000.000000Z-{keys_of(versions[:1])[0]}.tmp").mkdir()
    prune(index, builds, keep=1)
    kept = keys_of([versions[0], versions[-1]])
    assert keys(builds) == sorted([*kept, *(path.name[:8] for path in (encoded, killed, other))])


def test_a_new_version_has_a_number_and_the_active_one_as_parent(
    versions: list[str], build_version: Builder, index: IndexWriter, builds: Path
) -> None:
    manifests = index.manifests()
    assert [m.number for m in manifests] == [1, 2, 3, 4]
    assert [m.parent for m in manifests] == [None, *versions[:3]]
    activate(index, versions[0])
    prune(index, builds, keep=0)
    new = build_version(make_records(20))
    assert (new.number, new.parent) == (2, versions[0])


def test_a_rollback_goes_to_the_parent_or_else_to_the_version_before(
    versions: list[str], build_version: Builder, index: IndexWriter, builds: Path
) -> None:
    activate(index, versions[1])
    new = build_version(make_records(20)).version
    assert rollback(index) == versions[1]
    activate(index, new)
    shutil.rmtree(index.path / versions[1])
    assert rollback(index) == versions[3]


def test_a_deleted_active_version_has_none_before(
    versions: list[str], index: IndexWriter, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(index.path / versions[3])
    with raises(IndexVersionError, "no_older_version", version=versions[3]):
        rollback(index)
    assert main(["versions", "list", "--indexes", str(indexes)]) == 0
    assert versions[3] in capsys.readouterr().out


@pytest.mark.parametrize("written", [0, 1, 2, 3, 5, 8], ids="{} files are written".format)
def test_an_interrupted_migration_goes_on(
    versions: list[str], index: IndexWriter, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    for version in versions:
        edit_manifest(index.path / version, to_schema_2)
    left = written

    def interrupted(path: Path, text: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError
        path.write_text(text, encoding="utf-8")

    with monkeypatch.context() as patch, suppress(OSError):
        patch.setattr("core.versions.write_text", interrupted)
        migrate(index)
    assert index.versions() == versions
    assert migrate(index) == versions[written // 2 :]  # two files each
    assert index.versions() == versions
    assert all(schema_of(index.path / version) == SCHEMA_VERSION for version in versions)


def test_a_missing_index_is_not_created(indexes: Path, builds: Path) -> None:
    for command in (rollback, partial(prune, builds=builds, keep=1), migrate):
        with raises(IndexVersionError, "no_active_version"):
            command(IndexWriter(indexes, "no"))
    assert not (indexes / "no").exists()


def test_a_command_that_waits_too_long_names_the_holder(
    versions: list[str], index: IndexWriter, builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.publication.CHANGE_WAIT", 0.0)
    with index.changing("activate"):
        assert [holder.command for holder in holders(index.path)] == ["activate"]
        for command in (rollback, partial(prune, builds=builds, keep=0), migrate):
            with raises(CareError, "locked", command="activate", pid=os.getpid()):
                command(index)
    assert index.versions() == versions
    assert holders(index.path) == []


def test_a_prune_spares_a_running_build(
    versions: list[str], index: IndexWriter, builds: Path
) -> None:
    new = index.path / ".20300101T000000.000000Z-0.tmp"
    with index.building("build"):
        new.mkdir()
        assert prune(index, builds, keep=1) == versions[2::-1]
    assert new.exists()
    prune(index, builds, keep=1)
    assert not new.exists()


def test_a_prune_removes_what_killed_commands_left(
    versions: list[str], index: IndexWriter, builds: Path
) -> None:
    token = "0123456789abcdef"
    (folder,) = (builds / "test").glob(f"{keys_of(versions[3:])[0]}*")
    left = [
        index.path / ".20200101T000000.000000Z-0.deleted" / "f",
        index.path / ".20200102T000000.000000Z-0.tmp" / "vectors.faiss",
        index.path / f".CURRENT.{token}.tmp",
        builds / "test" / f".{token}.deleted" / "f",
        folder / f".corpus.json.{token}.tmp",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    prune(index, builds, keep=9)
    assert [path for path in left if path.exists()] == []
    assert index.versions() == versions


def test_a_build_folder_is_deleted_again_after_a_killed_prune(
    build_version: Builder, index: IndexWriter, builds: Path
) -> None:
    old = build_version(make_records(10)).version
    (key,) = (path.name for path in (builds / "test").iterdir())
    build_version(make_records(11))
    left = builds / "test" / f".{key}.deleted"
    shutil.copytree(builds / "test" / key, left)  # of a prune that was killed
    assert prune(index, builds, keep=0) == [old]
    assert not left.exists()
    assert not (builds / "test" / key).exists()
