"""Small segments, of which each is one compressed file."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import packs
from core.errors import CareError, IndexVersionError
from core.files import sha256_file
from core.packs import MOST_ROWS, PACK_FILE
from core.versions import read_manifest, read_parts, write_manifest
from core.writes import Write, Written
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter, verify_version
from stores.faiss.store import FaissStore
from stores.segment import Segment, open_segments
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises

RECORDS = make_records(21 + MOST_ROWS + 1)


@pytest.fixture
def index(build_version: Builder, indexes: Path) -> IndexWriter:
    build_version(RECORDS[:20])
    return IndexWriter(indexes, "test")


def put(index: IndexWriter, *records: dict[str, Any]) -> Path:
    live = LiveIndex(index, BigramEncoder("document"))
    (written,) = live.commit([Write("test", put=records)])
    assert isinstance(written, Written), written
    return index.version(written.version)


def last(folder: Path) -> Segment:
    segments = open_segments(folder, read_manifest(folder), FaissStore())
    return list(segments.opened.values())[-1]


def content(path: Path) -> bytes:
    dictionary = Path(packs.__file__).with_name("packs.zdict").read_bytes()
    return zlib.decompressobj(zdict=dictionary).decompress(path.read_bytes())


def replace(path: Path, pack: bytes) -> None:
    """Writes other content of the last pack of a version, with its checksum in the manifest."""
    path.write_bytes(pack)
    manifest = read_manifest(path.parent)
    *others, own = manifest.segments
    own = own.model_copy(update={"sha256": sha256_file(path)})
    write_manifest(path.parent, manifest.model_copy(update={"segments": (*others, own)}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_small_segment_is_one_file_and_a_larger_one_has_several(index: IndexWriter) -> None:
    small = put(index, RECORDS[20])
    assert names(small) == {PACK_FILE, "manifest.json", "manifest.sha256"}
    large = put(index, *RECORDS[21 : 21 + MOST_ROWS + 1])
    assert {"segment.json", "documents.arrow", "lexical"} < names(large)
    for folder in (small, large):
        verify_version(folder)
    assert [one.id for one in last(small).documents] == [RECORDS[20]["_id"]]


def test_unpacked_files_are_removed_with_their_segment(index: IndexWriter) -> None:
    segment = last(put(index, RECORDS[20]))
    unpacked = segment.folder
    assert "documents.arrow" in names(unpacked)
    del segment
    assert not unpacked.exists()


def test_a_pack_without_the_dictionary_is_read_too(index: IndexWriter) -> None:
    path = put(index, RECORDS[20]) / PACK_FILE
    with_dictionary = path.stat().st_size
    older = zlib.compress(content(path))
    assert with_dictionary < 0.75 * len(older)
    replace(path, older)
    verify_version(path.parent)
    assert [one.id for one in last(path.parent).documents] == [RECORDS[20]["_id"]]


def test_the_dictionary_of_packs_stays() -> None:
    dictionary = Path(packs.__file__).with_name("packs.zdict")
    assert (
        sha256_file(dictionary)
        == "9293ba031807a5656b53fa5a13961eca40cee28bd9b758728e5f342382ad0fd3"
    )  # packs on disk need it


def test_every_damage_of_a_pack_is_found(index: IndexWriter) -> None:
    folder = put(index, RECORDS[20])
    path = folder / PACK_FILE
    content = path.read_bytes()
    damaged = [content[:size] for size in range(0, len(content), 97)]
    damaged += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in (0, 9, -2)]
    for wrong in damaged:
        path.write_bytes(wrong)
        with raises(IndexVersionError, "wrong_checksum"):
            verify_version(folder)


def _resize(size: int) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts["files"]["documents.arrow"].update(bytes=size)


def _add(facts: dict[str, Any]) -> None:
    facts["files"]["../x"] = {"bytes": 0, "sha256": ""}


def _rename(facts: dict[str, Any]) -> None:
    files = facts["components"]["lexical"]["files"]
    files["lexical/../../x"] = files.pop("lexical/meta.json")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_resize(1), "unreadable_version"),
        (_resize(1 << 40), "unreadable_version"),
        (_add, "invalid_manifest"),
        (_rename, "invalid_manifest"),
        (None, "unreadable_version"),
    ],
)
def test_a_pack_that_is_not_what_it_says_is_not_opened(
    index: IndexWriter, change: Callable[[dict[str, Any]], None] | None, code: str
) -> None:
    folder = put(index, RECORDS[20])
    path = folder / PACK_FILE
    head, _, rest = content(path).partition(b"\n")
    facts = json.loads(head)
    if change:
        change(facts)
    whole = b"\n".join([json.dumps(facts).encode(), rest])
    replace(path, zlib.compress(whole) if change else whole)
    with raises(CareError, code):
        open_segments(folder, read_manifest(folder), FaissStore())


def test_known_segments_are_not_read_again(
    index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = put(index, RECORDS[20]), put(index, RECORDS[21])
    known = read_parts(first, read_manifest(first))
    (first / PACK_FILE).unlink()
    parts = read_parts(second, read_manifest(second), known)
    assert parts[:-1] == known
    assert parts[-1].folder == second
