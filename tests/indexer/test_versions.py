import re
from pathlib import Path

import pytest

from core.errors import IndexVersionError
from core.versions import current_version, list_versions
from indexer.versions import activate, prune, rollback
from tests.conftest import Builder, make_records


@pytest.fixture
def versions(build_version: Builder) -> list[str]:
    """The ids of four versions, oldest first; the last is active."""
    return [build_version(make_records(10 + i)).version for i in range(4)]


def test_builds_are_listed_in_their_order_and_the_last_is_active(
    versions: list[str], indexes: Path
) -> None:
    assert list_versions(indexes, "test") == versions
    assert current_version(indexes, "test") == versions[-1]


def test_any_version_can_be_made_active(versions: list[str], indexes: Path) -> None:
    for version in versions:
        activate(indexes, "test", version)
        assert current_version(indexes, "test") == version


def test_an_unknown_version_is_refused_and_the_known_are_named(
    versions: list[str], indexes: Path
) -> None:
    known = re.escape(", ".join(versions))
    with pytest.raises(IndexVersionError, match=f"has no version 'x'; it has: {known}"):
        activate(indexes, "test", "x")


def test_a_damaged_version_cannot_be_made_active(versions: list[str], indexes: Path) -> None:
    (indexes / "test" / versions[2] / "vectors.faiss").unlink()
    with pytest.raises(IndexVersionError, match=r"vectors\.faiss is missing"):
        activate(indexes, "test", versions[2])
    with pytest.raises(IndexVersionError, match=r"vectors\.faiss is missing"):
        rollback(indexes, "test")
    assert current_version(indexes, "test") == versions[-1]


def test_each_rollback_goes_one_version_back_until_there_is_none(
    versions: list[str], indexes: Path
) -> None:
    for version in versions[-2::-1]:
        assert rollback(indexes, "test") == version == current_version(indexes, "test")
    with pytest.raises(IndexVersionError, match=f"has no version before {versions[0]}"):
        rollback(indexes, "test")
    assert current_version(indexes, "test") == versions[0]


@pytest.mark.parametrize(
    ("active", "keep", "kept"),
    [(3, 2, [2, 3]), (0, 2, [0, 2, 3]), (0, 0, [0]), (2, 1, [2, 3]), (3, 9, [0, 1, 2, 3])],
)
def test_the_newest_and_the_active_version_are_kept(
    versions: list[str], indexes: Path, active: int, keep: int, kept: list[int]
) -> None:
    activate(indexes, "test", versions[active])
    deleted = prune(indexes, "test", keep=keep)
    assert list_versions(indexes, "test") == [versions[i] for i in kept]
    assert sorted(deleted + list_versions(indexes, "test")) == versions
    assert current_version(indexes, "test") == versions[active]


def test_left_overs_of_killed_builds_are_removed(versions: list[str], indexes: Path) -> None:
    left_over = indexes / "test" / ".20200101T000000.000000Z-0.tmp"
    left_over.mkdir()
    (left_over / "vectors.faiss").write_bytes(b"half")
    assert prune(indexes, "test", keep=9) == []
    assert not left_over.exists()


def test_without_an_active_version_nothing_is_deleted(versions: list[str], indexes: Path) -> None:
    (indexes / "test" / "CURRENT").unlink()
    with pytest.raises(IndexVersionError, match="no active version"):
        prune(indexes, "test", keep=0)
    assert list_versions(indexes, "test") == versions
