"""What faults of disks, clocks, files, other writers and encoders do to a live index."""

import os
import resource
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.encoders import Encoding
from core.errors import CareError, EmbeddingServerError, IndexVersionError
from core.packs import PACK_FILE
from core.verification import verify_files
from core.versions import read_manifest
from core.writes import Write, Written
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter, is_live, verify_version
from search.snapshot import load_index
from service.pipeline.served_index import versions_before
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.failpoints import DISK_ERRORS, DISK_POINTS, KILL
from tests.indexer.writing import Writing, WritingProcess, content, make_index, unneeded

NEW = Write("test", put=({"_id": "new", "text": "新"}, {"_id": "other", "text": "另"}))
PATCH, DELETE = Write("test", patch=(("d0001", {"x": 1}),)), Write("test", delete=("d0002",))


@pytest.fixture
def index(build_version: Builder, indexes: Path) -> IndexWriter:
    build_version(make_records(20))
    return IndexWriter(indexes, "test")


@pytest.mark.e2e
def test_a_death_or_an_error_at_each_point_loses_nothing(tmp_path: Path) -> None:
    writing = Writing(tmp_path, seed=1)
    for number, point in enumerate(DISK_POINTS):
        for action in (KILL, DISK_ERRORS[number % len(DISK_ERRORS)]):
            assert writing.take(point, action), (point, action)
    process = WritingProcess(tmp_path)
    process.commit([Write("test", delete=("none",))])
    assert process.merge() == ""
    process.end()
    assert unneeded(tmp_path) == set()


@pytest.mark.e2e
def test_two_writers_lose_no_update_and_merge_beside_each_other(tmp_path: Path) -> None:
    make_index(tmp_path)
    done: list[int] = []

    def count(writer: int) -> None:
        process = WritingProcess(tmp_path)
        for number in range(15):
            parts: dict[str, Any] = {
                "put": ({"_id": f"w{writer}n{number}", "text": f"写{writer}第{number}"},)
            }
            (result,) = process.commit([Write("test", **parts)])
            assert isinstance(result, Written), result
            done.append(result.number)
            assert process.merge() in ("", "locked")
        process.end()

    threads = [threading.Thread(target=count, args=[writer]) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(done)) == len(done) == 30
    assert {f"w{w}n{n}" for w in range(2) for n in range(15)} < content(tmp_path).keys()


@pytest.mark.parametrize("room", [0, 100, 500, 1000])
def test_a_full_disk_refuses_writes_until_there_is_room(tmp_path: Path, room: int) -> None:
    before = make_index(tmp_path)
    process = WritingProcess(tmp_path)
    process.limit(room)
    for _ in range(2):
        (result,) = process.commit([NEW])
        assert isinstance(result, CareError) and result.code == "input_output"
        assert content(tmp_path) == before
    assert process.merge() in ("", "input_output")
    process.limit(resource.RLIM_INFINITY)
    (result,) = process.commit([NEW])
    assert isinstance(result, Written) and result.added == 2
    assert content(tmp_path).keys() == {*before, "new", "other"}
    process.end()


def set_clock(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=days)

    for module in ("indexer.publication", "indexer.live.index"):
        monkeypatch.setattr(f"{module}.datetime", Shifted)


def test_a_clock_that_jumps_loses_no_write_and_changes_no_order(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveIndex(index, BigramEncoder("document"))
    numbers = []
    for number, days in enumerate((0, 400, -400, 0, 0)):
        set_clock(monkeypatch, days)
        (written,) = live.commit([Write("test", put=({"_id": f"n{number}", "text": "钟"},))])
        assert isinstance(written, Written)
        assert index.active() == written.version == index.versions()[-1]
        numbers.append(written.number)
        for later in (0, 2000, -2000):
            set_clock(monkeypatch, days + later)
            live.merge()
            assert index.active() == written.version == index.versions()[-1]
        assert sum(map(is_live, index.versions())) == 1  # those before seemed too old
        found = load_index(index, BigramEncoder()).segment.documents
        assert {f"n{n}" for n in range(number + 1)} < {one.id for one in found}
    assert numbers == sorted(set(numbers))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_torn_file_of_a_base_or_write_is_named_and_the_last_good_version_is_left(
    index: IndexWriter, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    live = LiveIndex(index, BigramEncoder("document"))
    live.commit([DELETE])
    good = index.active()
    (written,) = live.commit([NEW, PATCH])[:1]
    assert isinstance(written, Written)
    version = index.version(written.version)
    manifest = read_manifest(version)
    base = index.version(manifest.segments[0].folder)
    own = [path for path in version.rglob("*") if path.is_file()]
    for path in [*own, *(path for path in base.rglob("*") if path.is_file())]:
        if path.parent == base and path.name == "manifest.sha256":
            continue  # the base is known by the checksum in the manifest of the write
        kept = path.read_bytes()
        damage(path)
        with pytest.raises(IndexVersionError) as caught:
            verify_version(version)
        named = "manifest.json" if path.name == "manifest.sha256" else path.name
        assert named in str(caught.value)
        path.unlink()
        path.write_bytes(kept)
        if path in own:
            assert next(versions_before(index, written.version)) == good
            verify_version(index.version(good))
    load_index(index, BigramEncoder())


def test_a_version_is_verified_while_another_one_with_its_segment_is_deleted(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveIndex(index, BigramEncoder("document"))
    live.commit([NEW])
    first = index.version(index.active())
    live.commit([DELETE])
    version = index.version(index.active())
    listed = Path.rglob

    def delete_after(folder: Path, pattern: str) -> list[Path]:
        paths = list(listed(folder, pattern))
        (first / "manifest.json").unlink(missing_ok=True)
        return paths

    monkeypatch.setattr(Path, "rglob", delete_after)
    verify_files(version, read_manifest(version))
    (first / PACK_FILE).unlink()
    with raises(IndexVersionError, "file_missing"):
        verify_files(version, read_manifest(version))


class Faulty(BigramEncoder):
    """Changes its answer for texts with a word."""

    def __init__(self, change: Callable[[Encoding], Encoding], word: str) -> None:
        super().__init__("document")
        self._change, self._word = change, word

    def encode(self, texts: Sequence[str]) -> Encoding:
        encoding = super().encode(texts)
        return self._change(encoding) if any(self._word in t for t in texts) else encoding


def nothing_finite(encoding: Encoding) -> Encoding:
    return replace(encoding, vectors=np.full_like(encoding.vectors, np.nan))


def other_dimension(encoding: Encoding) -> Encoding:
    return replace(encoding, vectors=encoding.vectors[:, :-1])


def one_less(encoding: Encoding) -> Encoding:
    return replace(encoding, vectors=encoding.vectors[1:])


def dies(encoding: Encoding) -> Encoding:
    raise RuntimeError("secret")


def is_away(encoding: Encoding) -> Encoding:
    raise EmbeddingServerError("no answer", code="embedding_server_unavailable")


@pytest.mark.parametrize("change", [nothing_finite, other_dimension, one_less, dies, is_away])
def test_an_encoder_that_returns_rubbish_stops_neither_deletes_nor_metadata(
    index: IndexWriter, change: Callable[[Encoding], Encoding]
) -> None:
    live = LiveIndex(index, Faulty(change, ""))
    failed, patched, deleted = live.commit([NEW, PATCH, DELETE])
    assert isinstance(failed, CareError) and failed.code == "encoder_fails"
    assert "secret" not in str(failed) and "新" not in str(failed)
    assert isinstance(patched, Written) and patched.replaced == 1
    assert isinstance(deleted, Written) and deleted.deleted == 1
    documents = load_index(index, BigramEncoder()).segment.documents
    assert {one.id: one.metadata for one in documents}["d0001"] == {"x": 1}


@pytest.mark.parametrize("change", [nothing_finite, dies, is_away])
def test_a_text_for_which_an_encoder_returns_rubbish_is_rejected_alone(
    index: IndexWriter, change: Callable[[Encoding], Encoding]
) -> None:
    (written,) = LiveIndex(index, Faulty(change, "新")).commit([NEW])
    assert isinstance(written, Written) and written.added == 1
    assert [(one.id, one.code) for one in written.rejected] == [("new", "not_encoded")]
    assert "新" not in written.rejected[0].reason
