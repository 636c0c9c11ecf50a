import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from core.errors import CareError, CorpusError
from core.locks import exclusive
from core.writes import Write, Written
from indexer.corpus import Reading
from indexer.live.folder import FolderChange, LiveFolder
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.state import IndexState
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises

OTHERS = make_records(3)


@pytest.fixture
def index(indexes: Path, build_version: Builder) -> IndexWriter:
    build_version(OTHERS)
    return IndexWriter(indexes, "test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    write_jsonl(folder / "two.jsonl", [{"_id": "1", "text": "甲"}, {"_id": "2", "text": "乙"}])
    (folder / "one.txt").write_text("少吃盐。", "utf-8")
    return folder


def opened(index: IndexWriter, folder: Path) -> LiveFolder:
    """As a new process opens it."""
    live = LiveIndex(index, BigramEncoder("document"))
    found = LiveFolder(live, index, folder, Reading(folder), chunked=False)
    found._read_known()
    return found


def steady(watched: LiveFolder) -> FolderChange | None:
    """Looks twice, so that the files were the same for a while."""
    return watched.look() or watched.look()


def numbers(change: FolderChange | None) -> tuple[int, int, int]:
    assert change
    return change.added, change.replaced, change.deleted


def ids(index: IndexWriter) -> set[str]:
    """The documents of the index that were not in it at first."""
    documents = IndexState.open(index, index.active()).documents
    return {one.id for one in documents} - {one["_id"] for one in OTHERS}


def test_files_that_come_change_and_go(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    assert watched.look() is None  # they may be half written
    change = watched.look()
    assert numbers(change) == (3, 0, 0)
    assert change and change.files == ["one.txt", "two.jsonl"]
    assert change.version == index.active()
    assert steady(watched) is None
    write_jsonl(folder / "two.jsonl", [{"_id": "2", "text": "丙"}, {"_id": "3", "text": "丁"}])
    assert numbers(steady(watched)) == (1, 1, 1)
    (folder / "one.txt").unlink()
    assert numbers(steady(watched)) == (0, 0, 1)
    assert ids(index) == {"2", "3"}


def test_a_file_is_read_when_it_no_longer_grows(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    with (folder / "two.jsonl").open("a", encoding="utf-8") as file:
        for i in range(3):
            file.write(f'{{"_id": "{i + 3}", "te')
            file.flush()
            watched.look()
            assert "1" not in ids(index)
            file.write('xt": "戊"}\n')
            file.flush()
    assert watched.look() is None
    watched.look()
    assert ids(index) >= {"1", "2", "3", "4", "5"}


def test_a_renamed_file_keeps_its_documents(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    steady(watched)
    (folder / "two.jsonl").rename(folder / "other.jsonl")
    assert numbers(steady(watched)) == (0, 0, 0)
    (folder / "one.txt").rename(folder / "uno.txt")
    assert numbers(steady(watched)) == (1, 0, 1)
    assert ids(index) == {"1", "2", "uno.txt#1"}


def test_a_new_process_finds_what_happened_meanwhile(index: IndexWriter, folder: Path) -> None:
    steady(opened(index, folder))
    version = index.active()
    assert steady(opened(index, folder)) is None and index.active() == version
    (folder / "one.txt").unlink()
    write_jsonl(folder / "two.jsonl", [{"_id": "2", "text": "乙"}])
    (folder / "new").mkdir()
    (folder / "new" / "a.md").write_text("# 失眠\n\n早睡。", "utf-8")
    assert numbers(steady(opened(index, folder))) == (1, 0, 2)
    assert ids(index) == {"2", "new/a.md#失眠"}


def test_a_process_that_was_killed_between_commits_goes_on(
    index: IndexWriter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.live.folder._COMMIT_DOCUMENTS", 1)
    killed = opened(index, folder)
    commit, calls = killed._live.commit, 0

    def commit_one(writes: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return commit(writes)  # type: ignore[arg-type]

    monkeypatch.setattr(killed._live, "commit", commit_one)
    with pytest.raises(KeyboardInterrupt):
        steady(killed)
    written = ids(index)
    assert len(written) == 2
    for path in folder.iterdir():  # what it has written is deleted, if its file is gone
        path.unlink()
    (folder / "b.txt").write_text("多喝水。", "utf-8")
    assert numbers(steady(opened(index, folder))) == (1, 0, 2)


def test_documents_of_others_stay(index: IndexWriter, folder: Path) -> None:
    write_jsonl(folder / "three.jsonl", [{"_id": "1", "text": "甲"}])
    watched = opened(index, folder)
    steady(watched)
    (folder / "two.jsonl").unlink()
    assert numbers(steady(watched)) == (0, 0, 1)  # the other file has document 1
    assert ids(index) == {"1", "one.txt#1"}
    assert IndexState.open(index, index.active()).find([OTHERS[0]["_id"]])


def test_a_file_that_cannot_be_read_deletes_nothing(
    index: IndexWriter, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = opened(index, folder)
    steady(watched)
    before = ids(index)
    (folder / "two.jsonl").write_bytes(b'{"_id": "3", "text": "\xe7\x94\xb2"}\n{"_id": "1", "te')
    (folder / "bad.docx").write_bytes(b"PK")
    (folder / "bad.parquet").write_bytes(b"PAR1")
    caplog.clear()
    steady(watched)
    assert {"bad.docx", "bad.parquet", "two.jsonl"} == {
        Path(record.getMessage().split()[0].rstrip(":")).name for record in caplog.records
    }
    assert ids(index) == before | {"3"}
    caplog.clear()
    assert steady(watched) is None and not caplog.records
    shutil.copy(folder / "one.txt", folder / "good.txt")
    write_jsonl(folder / "two.jsonl", [{"_id": "3", "text": "甲"}])
    assert numbers(steady(watched)) == (1, 0, 2)


def test_files_of_editors_are_not_read(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    steady(watched)
    for name in (".one.txt.swp", "one.txt~", "#one.txt#", "~$plan.docx", "one.txt.part", "4913"):
        (folder / name).write_text("甲", "utf-8")
    assert steady(watched) is None


def test_a_folder_that_is_gone_or_empty_deletes_nothing(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    steady(watched)
    for path in list(folder.iterdir()):
        path.unlink()
    assert steady(watched) is None and len(ids(index)) == 3
    folder.rmdir()
    with raises(CorpusError, "corpus_missing"):
        next(watched.watch())
    assert len(ids(index)) == 3


def test_without_an_encoder_the_folder_is_tried_again(
    index: IndexWriter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = opened(index, folder)
    commit = watched._live.commit
    failed = CareError("no encoder", code="encoding_failed")
    monkeypatch.setattr(watched._live, "commit", lambda writes: [failed])
    with raises(CareError, "encoding_failed"):
        steady(watched)
    monkeypatch.setattr(watched._live, "commit", commit)
    assert numbers(watched.look()) == (3, 0, 0)


def test_a_file_of_several_commits_is_read_again_if_one_fails(
    index: IndexWriter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.live.folder._COMMIT_DOCUMENTS", 1)
    watched = opened(index, folder)
    commit, calls = watched._live.commit, 0

    def commit_but_once(writes: Sequence[Write]) -> list[Written | CareError]:
        nonlocal calls
        calls += 1
        return [CareError("no encoder", code="encoding_failed")] if calls == 2 else commit(writes)

    monkeypatch.setattr(watched._live, "commit", commit_but_once)
    with raises(CareError, "encoding_failed"):
        steady(watched)
    watched.look()
    assert ids(index) == {"1", "2", "one.txt#1"}


def test_one_process_watches_a_folder(index: IndexWriter, folder: Path) -> None:
    watched = opened(index, folder)
    with (
        exclusive(index.path, "watch", f"{watched._path.stem}.lock"),
        raises(CareError, "locked"),
    ):
        next(watched.watch())


def test_a_file_with_an_old_time_is_new_if_its_size_differs(
    index: IndexWriter, folder: Path
) -> None:
    watched = opened(index, folder)
    steady(watched)
    status = (folder / "one.txt").stat()
    (folder / "one.txt").write_text("少吃盐，多喝水。", "utf-8")
    os.utime(folder / "one.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert numbers(steady(watched)) == (0, 1, 0)
    known = json.loads(watched._path.read_text("utf-8"))
    assert known["one.txt"][0] == ["one.txt#1"]
