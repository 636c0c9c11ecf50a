"""What a power failure in a commit can leave on disk: only what was flushed, or more.

At each flush and rename of a commit, states of the disk are made in which each file and folder has
either what it had when it was last flushed, or what it has now.
"""

import hashlib
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.errors import CareError
from core.writes import Write
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter, verify_version
from indexer.state import IndexState
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder

# The content of files, and the inodes in folders, by inode.
Content = dict[int, bytes | dict[str, int]]
# Random states at each point besides the one in which only what was flushed is there.
_STATES = 1


class Disk:
    """Notes what is flushed below a folder, and all at each flush and rename.

    `points` has, for each, what is flushed and what else there is.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, flushes: bool) -> None:
        self.root = root
        self.points: list[tuple[Content, Content]] = []
        self._flushed = _content(root)
        for name in ("fsync", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._noting(name, getattr(os, name)))
        self._flushes = flushes

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> None:
            self.note()
            if name != "fsync":
                function(*given, **options)
                self.note()
            elif self._flushes:
                path = Path(f"/proc/self/fd/{given[0]}").readlink()
                self._flushed[path.stat().st_ino] = _of(path)

        return call

    def note(self) -> None:
        """Adds the present state of the files to `points`."""
        point = dict(self._flushed), _content(self.root)
        if not self.points or point != self.points[-1]:
            self.points.append(point)

    def state(self, point: int, random: Random | None) -> Any:
        """Returns one of the states at a point, by name; without `random` what was flushed."""
        flushed, now = self.points[point]

        def chosen(inode: int) -> Any:
            known = [one for one in (flushed.get(inode), now.get(inode)) if one is not None]
            empty: bytes | dict[str, int] = {} if isinstance(known[-1], dict) else b""
            content = random.choice((flushed.get(inode, empty), known[-1])) if random else None
            content = flushed.get(inode, empty) if content is None else content
            if isinstance(content, bytes):
                return content
            inner = {name: i for name, i in content.items() if i in flushed or i in now}
            return {name: chosen(i) for name, i in sorted(inner.items())}

        return chosen(self.root.stat().st_ino)


def _write(state: Any, path: Path) -> None:
    if isinstance(state, bytes):
        path.write_bytes(state)
        return
    path.mkdir(parents=True)
    for name, inner in state.items():
        _write(inner, path / name)


def _of(path: Path) -> bytes | dict[str, int]:
    if stat.S_ISDIR(path.stat().st_mode):
        return {entry.name: entry.inode() for entry in os.scandir(path)}
    return path.read_bytes()


def _content(root: Path) -> Content:
    return {path.stat().st_ino: _of(path) for path in (root, *root.rglob("*"))}


def _run(
    build_version: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, flushes: bool
) -> tuple[int, list[str]]:
    """Commits writes; returns the number of states, and those that are not one of the versions."""
    records = make_records(24)
    build_version(records[:20])
    index = IndexWriter(tmp_path / "indexes", "test")
    live = LiveIndex(index, BigramEncoder("document"))
    live.commit([Write("test", put=(records[20],))])
    writes = [
        [Write("test", put=(records[21], records[3] | {"text": "改了"}), delete=("d0004",))],
        [
            Write("test", patch=(("d0005", {"department": "骨科"}),)),
            Write("test", put=(records[22],)),
        ],
        [Write("test", delete=("d0006", records[20]["_id"]))],
    ]
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "indexes", patch, flushes=flushes)
        versions = [(0, index.active())]
        for group in writes:
            live.commit(group)
            versions.append((len(disk.points), index.active()))
        disk.note()
    seen, wrong = set(), []
    for point in range(len(disk.points)):
        # What was acknowledged before this point, and what is published meanwhile.
        before = [version for end, version in versions if end <= point]
        possible = {before[-1], *(version for _, version in versions[len(before) :][:1])}
        for number in range(_STATES + 1):
            state = disk.state(point, Random(f"{point} {number}") if number else None)
            key = hashlib.sha256(pickle.dumps((state, sorted(possible)))).digest()
            if key in seen:
                continue
            seen.add(key)
            target = tmp_path / f"{point}-{number}"
            _write(state, target)
            try:
                left = IndexWriter(target, "test")
                version = left.active()
                assert version in possible, f"{version} is active"
                verify_version(left.version(version))
                # Left-overs do not disturb the next write.
                (done,) = LiveIndex(left, BigramEncoder("document")).commit(
                    [Write("test", put=(records[23],))]
                )
                assert not isinstance(done, CareError), done
                assert verify_version(left.version(done.version)).parent == version
                assert [*IndexState.open(left, done.version).documents][-1].id == records[23]["_id"]
            except (AssertionError, CareError, OSError) as error:
                wrong.append(f"point {point}, state {number}: {error!r}")
                return len(seen), wrong
    return len(seen), wrong


def test_an_acknowledged_write_survives_a_power_failure_and_no_other_breaks_the_index(
    build_version: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, wrong = _run(build_version, tmp_path, monkeypatch, flushes=True)
    assert wrong == []
    assert checked > 20


def test_without_flushes_a_power_failure_loses_writes(
    build_version: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(build_version, tmp_path, monkeypatch, flushes=False)[1]
