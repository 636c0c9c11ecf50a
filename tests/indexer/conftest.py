from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from core.manifest import IndexManifest
from core.text import document_text
from core.versions import IndexFolder
from indexer.build import BuildOptions, EncodedCorpus
from indexer.update import Changes, active_manifest, update, update_components
from stores.faiss.store import FaissStore
from stores.segment import Segment, open_segments
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder, make_spec
from tests.indexer.builds import build_options

OptionsMaker = Callable[..., BuildOptions]
Records = list[dict[str, Any]]

OLD = make_records(60)
NEW = make_records(70)[60:]
# More than a fifth: the version is built anew.
MANY = make_records(80)[60:]


class Updated(NamedTuple):
    manifest: IndexManifest
    encoded: EncodedCorpus | None
    texts: int  # that the encoder has seen


class Index:
    """Index 'test', builds of it, and updates of its active version."""

    def __init__(self, folder: Path, build: Builder) -> None:
        self.folder = folder
        self.build = build
        self.options = build_options(folder, Path("unread"))
        self.builds = folder / "builds" / "test"
        self.versions = self.options.index

    def changes(
        self, add: Records | None = None, delete: Sequence[str] = (), **more: bool
    ) -> Changes:
        """Writes the files of an update."""
        added = write_jsonl(self.folder / "new.jsonl", add) if add is not None else None
        ids = self.folder / "ids.txt"
        ids.write_text("".join(f"{id_}\n" for id_ in delete), encoding="utf-8")
        return Changes(str(added) if added else None, ids if delete else None, **more)

    def update(
        self,
        add: Records | None = None,
        delete: Sequence[str] = (),
        encoder: BigramEncoder | None = None,
        query: BigramEncoder | None = None,
        *,
        encode_all: bool = False,
        missing_ok: bool = False,
        **options: Any,
    ) -> Any:
        """Returns what was `Updated`, or None if nothing changes."""
        changes = self.changes(add, delete, encode_all=encode_all, missing_ok=missing_ok)
        encoder = encoder or BigramEncoder("document")
        encoders = encoder, query or BigramEncoder("query")
        base = active_manifest(self.versions)
        found = update(replace(self.options, **options), changes, base, *encoders)
        return found and Updated(*found, encoder.texts_seen)

    def change(self, base: IndexManifest, space: str = "bigrams-1", **options: Any) -> Any:
        """Returns the manifest of a version with other components, or None."""
        return update_components(
            replace(self.options, **options), base, make_spec("document", space)
        )

    def path(self, manifest: IndexManifest) -> Path:
        return self.versions.path / manifest.version

    def open(self, manifest: IndexManifest) -> Segment:
        return open_segments(self.path(manifest), manifest, FaissStore()).all

    def nearest(
        self, manifest: IndexManifest, records: Records, k: int = 10
    ) -> list[list[tuple[tuple[str, str], float]]]:
        """The nearest documents of each record, by id and text, with their scores."""
        segment = self.open(manifest)
        texts = [document_text(one.get("title", ""), one["text"]) for one in records]
        hits = []
        for vector in BigramEncoder().encode(texts).vectors:
            scores, rows = segment.vectors.search(vector, k)
            documents = map(segment.documents.__getitem__, rows.tolist())
            own = zip(((one.id, one.text) for one in documents), scores.tolist(), strict=True)
            hits.append(sorted(own, key=lambda hit: (-round(hit[1], 5), hit[0]))[:k])
        return hits


@pytest.fixture
def options(tmp_path: Path) -> OptionsMaker:
    """Writes records as a corpus and returns the options to build it."""

    def make(records: list[dict[str, Any]], **changes: Any) -> BuildOptions:
        return build_options(tmp_path, write_jsonl(tmp_path / "corpus.jsonl", records), **changes)

    return make


@pytest.fixture
def published(build_version: Builder, indexes: Path) -> Path:
    """The folder of a published version with 60 documents."""
    return IndexFolder(indexes, "test").path / build_version(make_records(60)).version


@pytest.fixture
def index(tmp_path: Path, build_version: Builder) -> Index:
    return Index(tmp_path, build_version)


@pytest.fixture
def old(index: Index) -> IndexManifest:
    """The active version, with the documents OLD."""
    return index.build(OLD)
