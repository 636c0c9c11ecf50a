import errno
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from core.errors import IndexVersionError
from core.files import sha256_file
from core.manifest import (
    SCHEMA_VERSION,
    Canary,
    CorpusRecord,
    FileRecord,
    IndexManifest,
    RecallReport,
)
from core.verification import verify_files
from core.versions import (
    IndexFolder,
    opening,
    read_manifest,
    with_version,
)
from tests.encoders import make_spec
from tests.errors import raises

FILES = ("documents.arrow", "filters.arrow", "vectors.faiss")
CONTENT = b"content"


def make_version(root: Path, version: str, **changes: Any) -> Path:
    """Writes a version of index 'test' with the files that each has; returns its folder."""
    folder = root / "test" / version
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).write_bytes(CONTENT)
    manifest = IndexManifest(
        schema_version=SCHEMA_VERSION,
        name="test",
        version=version,
        parent=None,
        backend="onnx",
        dtype="auto",
        store="faiss",
        encoder=make_spec("document"),
        metric="cosine",
        factory="Flat",
        search_parameters={},
        count=1,
        filter_fields={},
        files=dict.fromkeys(
            FILES, FileRecord(bytes=len(CONTENT), sha256=sha256_file(folder / FILES[0]))
        ),
        corpus=CorpusRecord(
            checksum="0", files=[], documents=1, unique_texts=1, rejected=0, truncated=0, tokens=1
        ),
        recall=RecallReport(k=10, queries=1, source="s", target=1, recall=1, tried={}),
        canaries=[Canary(text="a", vector="AAAAAA==")],
        created_at=datetime.now(UTC),
        build_seconds=1,
        libraries={},
    )
    document = manifest.model_dump(mode="json") | changes
    (folder / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.fixture
def index(tmp_path: Path) -> IndexFolder:
    return IndexFolder(tmp_path, "test")


@pytest.mark.parametrize("name", ["a", "sample", "A-1_b.c", "x" * 64])
def test_a_plain_name_is_a_folder_under_the_root(tmp_path: Path, name: str) -> None:
    assert IndexFolder(tmp_path, name).path == tmp_path / name


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", ".a", "a b", "a\n", "x" * 65])
def test_a_name_that_could_leave_the_root_is_an_error(tmp_path: Path, name: str) -> None:
    with raises(IndexVersionError, "bad_index_name"):
        IndexFolder(tmp_path, name)


def test_versions_with_a_manifest_are_listed_oldest_first(
    tmp_path: Path, index: IndexFolder
) -> None:
    for version in ("3", "1", "2"):
        make_version(tmp_path, version)
    make_version(tmp_path, "4").rename(tmp_path / "test" / ".4.tmp")
    (tmp_path / "test" / "2" / "manifest.json").unlink()
    (index.path / "CURRENT").write_text("1\n")
    assert index.versions() == ["1", "3"]
    assert IndexFolder(tmp_path, "other").versions() == []


def test_versions_are_ordered_by_number_not_by_id(tmp_path: Path, index: IndexFolder) -> None:
    for version, number in (("b", 1), ("c", 2), ("a", 3)):
        make_version(tmp_path, version, number=number)
    assert index.numbers() == {"b": 1, "c": 2, "a": 3}
    assert index.versions() == ["b", "c", "a"]
    assert [m.version for m in index.manifests()] == ["b", "c", "a"]


def test_a_damaged_manifest_has_a_place(tmp_path: Path, index: IndexFolder) -> None:
    for version in ("1", "2"):
        make_version(tmp_path, version, number=int(version), schema_version=9)
    for version, content in (("3", b"{"), ("4", b'{"number": "7"}'), ("5", b"[]")):
        (make_version(tmp_path, version) / "manifest.json").write_bytes(content)
    assert index.numbers() == {"3": 0, "4": 0, "5": 0, "1": 1, "2": 2}


def test_a_reader_tries_again_only_if_another_version_is_active() -> None:
    active = iter("aabbcc")
    tried: list[str] = []

    def use(version: str) -> str:
        tried.append(version)
        if version == "c":
            return version
        raise IndexVersionError(version)

    with pytest.raises(IndexVersionError):
        with_version(lambda: next(active), use)
    assert tried == ["a"]
    active = iter("abc")
    assert with_version(lambda: next(active), use) == "c"


def test_the_version_set_last_is_active(tmp_path: Path, index: IndexFolder) -> None:
    for version in ("1", "2"):
        make_version(tmp_path, version)
        index.set_active(version)
        assert index.active() == version
    index.set_active("1")
    with pytest.raises(RuntimeError), index.activating("2"):
        raise RuntimeError
    with raises(IndexVersionError, "unknown_version", version="3"):
        index.set_active("3")
    assert index.active() == "1"


def test_without_an_active_version_the_error_names_the_build_command(index: IndexFolder) -> None:
    with raises(IndexVersionError, "no_active_version"):
        index.active()


@pytest.mark.parametrize("content", ["", "../../etc", "a b"])
def test_a_damaged_current_file_is_an_error(
    tmp_path: Path, index: IndexFolder, content: str
) -> None:
    (tmp_path / "test").mkdir()
    (index.path / "CURRENT").write_text(content)
    with raises(IndexVersionError, "bad_current"):
        index.active()


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    folder = make_version(tmp_path, "1", count=7)
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.version, manifest.count) == ("test", "1", 7)
    assert json.loads((folder / "manifest.json").read_text()) == manifest.model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"count": -1}, "count"),
        ({"metric": "l2"}, "metric"),
        ({"store": "tape"}, "store"),
        ({"canaries": []}, "canaries"),
        ({"surprise": 1}, "surprise"),
        ({"encoder": {}}, "encoder.model"),
    ],
)
def test_a_manifest_with_an_invalid_field_is_an_error(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    folder = make_version(tmp_path, "1", **changes)
    with raises(IndexVersionError, "invalid_manifest", path=folder / "manifest.json", field=field):
        read_manifest(folder)


@pytest.mark.parametrize("schema", [0, 4, 2.5, "x", None])
def test_a_manifest_of_another_schema_is_an_error(tmp_path: Path, schema: Any) -> None:
    folder = make_version(tmp_path, "1", schema_version=schema, surprise=1)
    with raises(IndexVersionError, "unsupported_schema", schema=schema):
        read_manifest(folder)


def test_unknown_components_are_ignored(tmp_path: Path) -> None:
    later = {"format": 7, "files": {"later.bin": {"bytes": 1, "sha256": "0"}}, "shape": [3]}
    folder = make_version(tmp_path, "1", components={"later": later})
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    assert manifest.components["later"].format == 7
    assert manifest.model_dump(mode="json")["components"]["later"]["shape"] == [3]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (OSError(errno.EFBIG, "File too large"), OSError),
        (OSError(errno.EMFILE, "Too many open files"), OSError),
        (OSError(errno.EIO, "Input/output error"), IndexVersionError),
        (OSError("no number"), IndexVersionError),
        (RuntimeError("of a library"), IndexVersionError),
    ],
)
def test_limits_of_the_machine_are_no_fault_of_a_version(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    with pytest.raises(Exception) as caught, opening(tmp_path):
        raise error
    assert type(caught.value) is kind
