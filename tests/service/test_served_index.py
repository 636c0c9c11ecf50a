"""Damaged, vanished, replaced and half-copied versions, at start and under a running service."""

import asyncio
import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.documents import DocumentReader
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.files import sha256_file
from core.manifest import IndexManifest
from core.versions import IndexFolder
from search.snapshot import load_index
from service.app import create_app
from service.pipeline.served_index import versions_before
from service.settings import Settings
from stores.base import StoreError
from stores.faiss.store import FaissStore
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import edit_manifest
from tests.service.conftest import ADMIN, Serve, build_in, sample, wait_until
from tests.service.test_engine import served

FILES = ("documents.arrow", "filters.arrow", "vectors.faiss")
EVERY = 0.02
SEARCH = {"query": "高血压患者的护理", "top_k": 50, "filter": {"department": ["儿科", "骨科"]}}


@pytest.fixture(scope="module")
def built_versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[IndexManifest]]:
    """Versions of 20, 30 and 40 documents, built once; each is the parent of the next."""
    root = tmp_path_factory.mktemp("versions")
    built = [build_in(root, make_records(count)) for count in (20, 30, 40)]
    return root / "indexes", [manifest for _, manifest in built]


@pytest.fixture
def versions(
    settings: Settings, built_versions: tuple[Path, list[IndexManifest]]
) -> list[IndexManifest]:
    """A copy of the three versions; the last one is active."""
    indexes, manifests = built_versions
    shutil.copytree(indexes, settings.indexes)
    return manifests


@pytest.fixture
def index(settings: Settings) -> IndexFolder:
    return IndexFolder(settings.indexes, "test")


@pytest.fixture
def folders(settings: Settings, versions: list[IndexManifest]) -> list[Path]:
    return [settings.indexes / "test" / manifest.version for manifest in versions]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def overwrite(path: Path) -> None:
    """Changes one byte in place."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nest(path: Path) -> None:
    """Replaces a manifest by deeply nested JSON, without a checksum."""
    path.with_name("manifest.sha256").unlink()
    path.write_bytes(b"[" * 200_000)


def link_folder(path: Path) -> None:
    elsewhere = path.parents[2] / "elsewhere"
    path.parent.rename(elsewhere)
    path.parent.symlink_to(elsewhere)


def forge(path: Path) -> None:
    """Replaces a file by one of another kind and makes manifest and checksums agree with it."""
    path.write_bytes(b"ARROW1\0\0" + bytes(100))
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    edit_manifest(path.parent, lambda manifest: manifest["files"].update({path.name: record}))


def errors(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of all logged errors."""
    records = (r for r in caplog.records if (r.name, r.levelname) == ("care.service", "ERROR"))
    return [r.fields for r in records]  # type: ignore[attr-defined]


def assert_fallback(client: TestClient, version: str) -> None:
    described = client.get("/index").json()
    assert (described["version"], described["active"]) == (version, False)
    assert sample(client, "care_index_fallback") == 1
    assert client.get("/health/ready").status_code == 200
    answer = client.post("/search", json=SEARCH)
    assert (answer.status_code, answer.json()["index"]["version"]) == (200, version)


def assert_active(client: TestClient, version: str) -> None:
    wait_until(lambda: served(client) == version)
    wait_until(lambda: sample(client, "care_index_fallback") == 0)
    assert client.get("/index").json()["active"] is True


@pytest.mark.parametrize(
    ("damage", "name", "code"),
    [
        (Path.unlink, "vectors.faiss", "file_missing"),
        (truncate, "documents.arrow", "wrong_size"),
        (overwrite, "filters.arrow", "wrong_checksum"),
        (Path.unlink, "manifest.json", "manifest_missing"),
        (truncate, "manifest.json", "wrong_checksum"),
        (remove_folder, "manifest.json", "manifest_missing"),
        (fifo, "manifest.json", "unreadable_file"),
        (fifo, "filters.arrow", "linked_file"),
        (nest, "manifest.json", "invalid_manifest"),
        (link_folder, "manifest.json", "linked_file"),
        (forge, "filters.arrow", "unreadable_filters"),
        (forge, "documents.arrow", "unreadable_documents"),
        (forge, "vectors.faiss", "unreadable_vectors"),
    ],
)
def test_a_service_starts_on_the_last_whole_version(
    serve: Serve,
    versions: list[IndexManifest],
    folders: list[Path],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    name: str,
    code: str,
) -> None:
    damage(folders[2] / name)
    client = serve()
    assert_fallback(client, versions[1].version)
    (logged,) = errors(caplog)
    assert (logged["code"], logged["served"]) == (code, versions[1].version)
    response = client.post("/index/reload", headers=ADMIN)
    assert (response.status_code, response.json()["code"]) == (503, code)
    assert_fallback(client, versions[1].version)
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize(
    "error", [RecursionError(), MemoryError(), RuntimeError("std::bad_alloc"), KeyError("x")]
)
def test_any_error_of_a_library_that_opens_a_version_is_damage(
    serve: Serve,
    versions: list[IndexManifest],
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    opened = DocumentReader.__init__

    def open_documents(reader: DocumentReader, path: Path) -> None:
        if path.parent == folders[2]:
            raise error
        opened(reader, path)

    monkeypatch.setattr(DocumentReader, "__init__", open_documents)
    client = serve()
    assert_fallback(client, versions[1].version)
    response = client.post("/index/reload", headers=ADMIN)
    assert (response.status_code, response.json()["code"]) == (503, "unreadable_version")


@pytest.mark.parametrize("name", ["CURRENT", "manifest.json"])
def test_a_watching_service_goes_on_after_a_fifo_is_gone(
    serve: Serve, versions: list[IndexManifest], folders: list[Path], name: str
) -> None:
    root = folders[2].parent
    IndexFolder(root.parent, "test").set_active(versions[1].version)
    client = serve(watch_seconds=0.05)
    assert_active(client, versions[1].version)
    path = root / name if name == "CURRENT" else folders[2] / name
    content = path.read_bytes()
    fifo(path)
    if name != "CURRENT":
        IndexFolder(root.parent, "test").set_active(versions[2].version)
    assert client.post("/index/reload", headers=ADMIN).status_code == 503
    assert served(client) == versions[1].version
    path.unlink()
    path.write_bytes(content)
    IndexFolder(root.parent, "test").set_active(versions[2].version)
    assert_active(client, versions[2].version)


def test_a_changed_weight_of_a_version_is_refused_or_has_other_entries_of_caches(
    serve: Serve, settings: Settings, versions: list[IndexManifest], folders: list[Path]
) -> None:
    before = load_index(IndexFolder(settings.indexes, "test"), BigramEncoder()).identity
    path = folders[2] / "manifest.json"
    changed = json.loads(path.read_bytes()) | {"fusion": {"lexical": 0.9}}
    path.write_text(json.dumps(changed))
    assert_fallback(serve(), versions[1].version)
    (folders[2] / "manifest.sha256").unlink()
    assert load_index(IndexFolder(settings.indexes, "test"), BigramEncoder()).identity != before


def test_damaged_ancestors_are_passed_over(
    serve: Serve, versions: list[IndexManifest], folders: list[Path]
) -> None:
    truncate(folders[2] / "vectors.faiss")
    (folders[1] / "manifest.json").unlink()
    assert_fallback(serve(), versions[0].version)


def test_without_a_whole_version_the_error_is_that_of_the_active_one(
    settings: Settings, folders: list[Path]
) -> None:
    truncate(folders[2] / "vectors.faiss")
    overwrite(folders[1] / "documents.arrow")
    (folders[0] / "filters.arrow").unlink()
    with raises(IndexVersionError, "wrong_size", path=folders[2] / "vectors.faiss"):
        create_app(settings, BigramEncoder())


def test_newer_versions_are_not_served_in_place_of_the_active_one(
    settings: Settings, index: IndexFolder, versions: list[IndexManifest], folders: list[Path]
) -> None:
    index.set_active(versions[0].version)
    truncate(folders[0] / "vectors.faiss")
    with raises(IndexVersionError, "wrong_size"):
        create_app(settings, BigramEncoder())


def test_another_embedding_space_is_not_damage(
    settings: Settings, versions: list[IndexManifest], build_version: Builder
) -> None:
    build_version(make_records(20), space="other-1")
    with raises(EmbeddingSpaceError, "embedding_space_mismatch"):
        create_app(settings, BigramEncoder())


def test_a_file_that_cannot_be_read_is_damage(
    serve: Serve,
    versions: list[IndexManifest],
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read(path: Path) -> str:
        if path.parent == folders[2]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sha256_file(path)

    monkeypatch.setattr("core.verification.sha256_file", read)
    assert_fallback(serve(), versions[1].version)
    assert [fields["code"] for fields in errors(caplog)] == ["unreadable_file"]


def test_the_versions_before_are_the_parents_then_the_older_ones(
    index: IndexFolder, versions: list[IndexManifest], build_version: Builder
) -> None:
    """A version that is built after a rollback has another parent than the version before it."""
    first, second, third = (manifest.version for manifest in versions)
    index.set_active(first)
    fourth = build_version(make_records(50)).version
    assert list(versions_before(index, fourth)) == [
        first,
        third,
        second,
    ]
    assert list(versions_before(index, second)) == [first]


@pytest.mark.parametrize("name", FILES)
def test_a_version_that_is_overwritten_in_place_is_replaced_by_the_last_whole_one(
    serve: Serve,
    versions: list[IndexManifest],
    folders: list[Path],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    client = serve(watch_seconds=EVERY)
    overwrite(folders[2] / name)
    wait_until(lambda: served(client) == versions[1].version)
    assert_fallback(client, versions[1].version)
    overwrite(folders[2] / name)
    assert_active(client, versions[2].version)
    assert [fields["code"] for fields in errors(caplog)] == ["wrong_checksum"]


def test_without_a_whole_version_an_overwritten_one_stays(
    serve: Serve, index: IndexFolder, versions: list[IndexManifest], folders: list[Path]
) -> None:
    index.set_active(versions[0].version)
    client = serve(watch_seconds=EVERY)
    overwrite(folders[0] / "filters.arrow")
    wait_until(lambda: sample(client, "care_index_fallback") == 1)
    assert served(client) == versions[0].version


def replace_file(folder: Path) -> None:
    other = folder / "new"
    other.write_bytes(b"other bytes")
    other.replace(folder / "vectors.faiss")


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize("remove", [shutil.rmtree, rename, replace_file])
def test_a_version_whose_files_are_gone_is_served_until_another_one_can_be_loaded(
    serve: Serve,
    versions: list[IndexManifest],
    folders: list[Path],
    caplog: pytest.LogCaptureFixture,
    remove: Callable[[Path], None],
) -> None:
    client = serve(watch_seconds=EVERY)
    remove(folders[2])
    wait_until(lambda: sample(client, "care_index_fallback") == 1)
    assert client.post("/index/reload", headers=ADMIN).status_code == 503
    answer = client.post("/search", json=SEARCH).json()
    assert answer["index"]["version"] == versions[2].version
    assert {hit["id"] for hit in answer["hits"]} == {f"d{i:04d}" for i in range(40) if i % 3}
    assert len(errors(caplog)) == 1
    IndexFolder(folders[0].parents[1], "test").set_active(versions[0].version)
    assert_active(client, versions[0].version)


def test_copying_a_version_in_any_order_ends_with_that_version(
    serve: Serve,
    index: IndexFolder,
    versions: list[IndexManifest],
    folders: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`CURRENT` arrives first, then the manifest, then one half of each file, then the other."""
    source = folders[2].with_name("source")
    folders[2].rename(source)
    index.set_active(versions[1].version)
    client = serve(watch_seconds=EVERY)

    def wait_for(code: str) -> None:
        wait_until(lambda: errors(caplog)[-1:] != [] and errors(caplog)[-1]["code"] == code)
        failures = sample(client, "care_index_reloads_total", result="failure")
        wait_until(lambda: sample(client, "care_index_reloads_total", result="failure") > failures)
        assert served(client) == versions[1].version

    (folders[2].parent / "CURRENT").write_text(versions[2].version)
    wait_for("manifest_missing")
    folders[2].mkdir()
    shutil.copy(source / "manifest.json", folders[2])
    wait_for("file_missing")
    shutil.copytree(source / "lexical", folders[2] / "lexical")
    for name in FILES:
        content = (source / name).read_bytes()
        (folders[2] / name).write_bytes(content[: len(content) // 2])
    wait_for("wrong_size")
    for name in FILES:
        shutil.copy(source / name, folders[2])
    assert_active(client, versions[2].version)
    logged = [(fields["code"], fields["reason"]) for fields in errors(caplog)]
    assert len(logged) == len(set(logged))


def test_a_store_that_does_not_respond_is_logged_once_and_causes_no_reload(
    serve: Serve, versions: list[IndexManifest], caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(watch_seconds=EVERY)
    served_index = client.app.state.service.catalog.served  # type: ignore[attr-defined]
    active = served_index._active
    looks: list[int] = []

    def look() -> str:
        looks.append(len(looks))
        if len(looks) < 5:
            raise StoreError("no response")
        return str(active())

    served_index._active = look
    wait_until(lambda: len(looks) > 8)
    assert [fields["code"] for fields in errors(caplog)] == ["store_unavailable"]
    for result in ("success", "failure"):
        assert sample(client, "care_index_reloads_total", result=result) == 0
    assert client.get("/index").json()["active"] is True


def test_a_reload_logs_the_old_and_the_new_version(
    serve: Serve,
    index: IndexFolder,
    versions: list[IndexManifest],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    client = serve()
    index.set_active(versions[0].version)
    assert client.post("/index/reload", headers=ADMIN).status_code == 200
    (logged,) = [r.fields for r in caplog.records if "old" in getattr(r, "fields", {})]  # type: ignore[attr-defined]
    assert logged == {"old": versions[2].version, "version": versions[0].version}


def test_a_version_that_is_pruned_before_it_is_opened_gives_way_to_the_new_one(
    index: IndexFolder, versions: list[IndexManifest], folders: list[Path]
) -> None:
    class Slow(FaissStore):
        """Another version becomes active, and the first one is deleted, after CURRENT was read."""

        def active_version(self, index: IndexFolder) -> str:
            version = super().active_version(index)
            if version == versions[2].version:
                index.set_active(versions[1].version)
                shutil.rmtree(folders[2])
            return version

    index = load_index(index, BigramEncoder(), Slow())
    assert index.manifest == versions[1]


def test_the_event_loop_runs_while_the_service_ends_during_a_reload(
    serve: Serve, versions: list[IndexManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()
    client = serve()
    served_index = client.app.state.service.catalog.served  # type: ignore[attr-defined]

    def load(_: Path, **_options: Any) -> Any:
        started.set()
        assert release.wait(30)
        raise RuntimeError("abandoned")

    monkeypatch.setattr(served_index, "_open", load)

    async def end_during_a_reload() -> None:
        reloading = asyncio.ensure_future(served_index.reload())
        await asyncio.to_thread(started.wait, 30)
        served_index.close()
        assert not reloading.done()
        release.set()
        with pytest.raises(RuntimeError):
            await reloading

    client.portal.call(end_during_a_reload)  # type: ignore[union-attr]
