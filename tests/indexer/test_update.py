import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from core.analysis import terms
from core.documents import DocumentReader
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError
from core.manifest import Chunking, IndexManifest
from core.terms import TermList
from core.text import document_text
from core.versions import read_manifest
from indexer.build import BuildOptions, EncodedCorpus, up_to_date
from indexer.publication import IndexWriter, verify_version
from indexer.update import (
    Changes,
    active_manifest,
    merge,
    requested_factory,
    update,
    update_components,
)
from indexer.versions import activate, prune, rollback
from stores.faiss.store import FaissStore
from stores.lexical import open_full_text
from stores.segment import open_segments
from stores.term_list import GIVEN, read_terms
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder, make_spec
from tests.errors import error_code, raises
from tests.indexer.builds import build_options, edit_manifest, only_folder, state

Records = list[dict[str, Any]]
Change = Callable[..., Changes]


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return build_options(tmp_path, Path("unread.jsonl"))


@pytest.fixture
def change(tmp_path: Path) -> Change:
    """Writes the files of an update."""

    def make(add: Records | None = None, delete: list[str] | None = None, **more: bool) -> Changes:
        added = write_jsonl(tmp_path / "new.jsonl", add) if add is not None else None
        ids = tmp_path / "ids.txt"
        ids.write_text("".join(f"{id_}\n" for id_ in delete or ()), encoding="utf-8")
        return Changes(str(added) if added else None, ids if delete else None, **more)

    return make


def run(
    options: BuildOptions, changes: Changes, encoder: BigramEncoder | None = None
) -> tuple[IndexManifest, EncodedCorpus]:
    """Updates the active version of index 'test'; asserts that it changes."""
    base = active_manifest(IndexWriter(options.indexes, options.name))
    result = update(
        options, changes, base, encoder or BigramEncoder("document"), BigramEncoder("query")
    )
    assert result
    return result


def folder_of(options: BuildOptions, manifest: IndexManifest) -> Path:
    return options.index.path / manifest.version


def documents_of(options: BuildOptions, manifest: IndexManifest) -> DocumentReader:
    return open_segments(folder_of(options, manifest), manifest, FaissStore()).all.documents


def records_after(old: Records, added: Records, deleted: list[str]) -> Records:
    """Reference result of an update: kept in order, replaced in place, new ones appended."""
    new = {record["_id"]: record for record in added}
    kept = [new.pop(r["_id"], r) for r in old if r["_id"] not in deleted]
    return kept + list(new.values())


def changed(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return record | fields


OLD = make_records(60)
NEW = make_records(70)[60:]
# More than a fifth: the version is built anew.
MANY = make_records(80)[60:]
# Of 60 documents: 3 with another text, 1 with another title, 2 with other metadata, 1 unchanged.
REPLACED = [
    *(changed(OLD[i], text=f"新的说明第{i}号。") for i in (40, 3, 21)),
    changed(OLD[7], title="新题"),
    changed(OLD[8], metadata={"department": "外科", "weight": 1.5}),
    changed(OLD[9], metadata={}),
    OLD[10],
]
ADDED = [NEW[0], *REPLACED, *NEW[1:]]
DELETED = ["d0000", "d0059", "d0030", "d0031"]


@pytest.fixture
def old(build_version: Builder) -> IndexManifest:
    """The active version, with the documents OLD."""
    return build_version(OLD)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "HNSW8,Flat", "HNSW8,SQ8"])
def test_an_update_equals_a_build_of_the_resulting_corpus(
    tmp_path: Path,
    build_version: Builder,
    options: BuildOptions,
    change: Change,
    factory: str,
) -> None:
    build_version(OLD, factory=factory)
    settings = build_options(tmp_path, Path("unread"), factory=factory)
    encoder = BigramEncoder("document")
    manifest, encoded = run(settings, change(ADDED, DELETED), encoder)
    assert manifest.corpus.update
    assert manifest.corpus.update.model_dump(exclude={"base"}) == {
        "added": 10,
        "replaced": 6,
        "deleted": 4,
        "unchanged": 50,
    }
    assert encoder.texts_seen == encoded.summary.new_texts == 10 + 3 + 1
    assert manifest.corpus.reused_texts == 66 - 14

    rebuilt = build_version(records_after(OLD, ADDED, DELETED), factory=factory)
    assert manifest.files == rebuilt.files  # documents, filters and vectors, byte for byte
    assert manifest.canaries == rebuilt.canaries
    assert manifest.recall == rebuilt.recall
    assert manifest.filter_fields == rebuilt.filter_fields
    counts = {"documents", "unique_texts", "rejected"}
    assert manifest.corpus.model_dump(include=counts) == rebuilt.corpus.model_dump(include=counts)


@pytest.mark.e2e
@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8"])
def test_an_index_of_chunks_is_updated_by_documents(
    tmp_path: Path, build_version: Builder, change: Change, factory: str
) -> None:
    def long(records: Records) -> Records:
        """Every third document has six sentences, each of one or two chunks."""
        return [
            changed(r, text="".join(f"{r['text']}（{n}）。" for n in range(6))) if i % 3 == 0 else r
            for i, r in enumerate(records)
        ]

    old, added = long(OLD), long(ADDED)
    # The 8-bit codes of such similar texts are hard to distinguish.
    index = {"factory": factory, "recall": 0.9}
    chunking = Chunking(tokens=40, overlap=5)
    build_version(old, chunking=chunking, **index)
    settings = build_options(tmp_path, Path("unread"), **index)
    encoder = BigramEncoder("document")
    manifest, _ = run(settings, change(added, DELETED), encoder)
    assert manifest.chunking == chunking
    assert manifest.corpus.update
    assert manifest.corpus.update.deleted == 4
    assert manifest.corpus.update.added == 10
    assert manifest.corpus.update.replaced + manifest.corpus.update.unchanged == 56
    assert encoder.texts_seen == manifest.corpus.unique_texts - manifest.corpus.reused_texts
    assert 10 < encoder.texts_seen < manifest.corpus.reused_texts

    rebuilt = build_version(records_after(old, added, DELETED), chunking=chunking, **index)
    assert manifest.files == rebuilt.files
    counts = {"documents", "chunks", "unique_texts", "rejected"}
    assert manifest.corpus.model_dump(include=counts) == rebuilt.corpus.model_dump(include=counts)
    assert (rebuilt.corpus.chunks or 0) > rebuilt.corpus.documents
    base = active_manifest(IndexWriter(settings.indexes, "test"))
    encoders = BigramEncoder("document"), BigramEncoder("query")
    assert update(settings, change(added), base, *encoders) is None
    for other in (None, Chunking(tokens=30)):
        build_version(old, chunking=other)
        with raises(CareError, "other_chunking"):
            run(build_options(tmp_path, Path("unread"), chunking=chunking), change(added))


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "HNSW8,SQ8"])
def test_segments_find_what_a_build_does_and_a_merge_is_equal_to_it(
    build_version: Builder, options: BuildOptions, change: Change, factory: str
) -> None:
    index = {"factory": factory, "recall": 0.5}
    settings = build_options(options.indexes.parent, Path("unread"), **index)
    old = make_records(200)
    build_version(old, **index)
    resulting = old
    for number in range(3):
        added = make_records(203 + 3 * number)[200 + 3 * number :]
        added = [changed(old[7 * number], title="新题"), *added]
        deleted = [old[100 + number]["_id"]]
        manifest, _ = run(settings, change(added, deleted))
        new = {record["_id"]: record for record in added}
        kept = [r for r in resulting if r["_id"] not in new and r["_id"] not in deleted]
        resulting = kept + added
    assert len(manifest.segments) == 4
    assert manifest.count == len(resulting) == manifest.corpus.documents
    segment = open_segments(folder_of(settings, manifest), manifest, FaissStore()).all
    assert [document.id for document in segment.documents] == [r["_id"] for r in resulting]
    before = found(settings, manifest, resulting[-20:])
    encoder = BigramEncoder("document")
    merged = merge(settings, manifest, encoder, BigramEncoder("query"))
    assert merged
    assert encoder.texts_seen == 0
    assert merge(settings, merged, encoder, BigramEncoder("query")) is None
    rebuilt = build_version(resulting, **index)
    assert merged.files == rebuilt.files
    assert merged.components == rebuilt.components
    assert merged.filter_fields == rebuilt.filter_fields
    assert merged.canaries == rebuilt.canaries
    if factory == "Flat":
        assert before == found(settings, rebuilt, resulting[-20:])


@pytest.mark.parametrize(
    ("add", "delete", "encoded"),
    [
        pytest.param([changed(OLD[5], metadata={"department": "外科"})], [], 0, id="metadata"),
        # The same text after the text rules.
        pytest.param([changed(OLD[5], text=f" {OLD[5]['text']}\u200b ")], [], 0, id="white space"),
        pytest.param([changed(OLD[5], _id="copy")], [], 1, id="copy of one that stays"),
        pytest.param([changed(OLD[5], _id="renamed")], ["d0005"], 0, id="copy of a deleted one"),
        pytest.param([changed(OLD[5], _id="copy", title="")], [], 1, id="title"),
        pytest.param([changed(NEW[0], _id=f"n{i}") for i in range(3)], [], 1, id="new copies"),
    ],
)
def test_texts_with_known_vectors_are_not_encoded(
    build_version: Builder,
    options: BuildOptions,
    change: Change,
    add: Records,
    delete: list[str],
    encoded: int,
) -> None:
    build_version(OLD)
    encoder = BigramEncoder("document")
    manifest, _ = run(options, change(add, delete), encoder)
    assert encoder.texts_seen == encoded
    assert [entry.count for entry in manifest.segments] == [60, len(add)]
    (added,) = found(options, manifest, add[:1], 1)
    assert added[0][0] == (add[0]["_id"], add[0]["text"])
    assert added[0][1] == pytest.approx(1, abs=1e-6)


def found(
    options: BuildOptions, manifest: IndexManifest, records: Records, k: int = 10
) -> list[list[tuple[tuple[str, str], float]]]:
    """Returns the nearest documents of each record, by id and text, with their scores."""
    segment = open_segments(folder_of(options, manifest), manifest, FaissStore()).all
    texts = [document_text(one.get("title", ""), one["text"]) for one in records]
    hits = []
    for vector in BigramEncoder().encode(texts).vectors:
        scores, rows = segment.vectors.search(vector, k)
        documents = map(segment.documents.__getitem__, rows.tolist())
        own = [(one.id, one.text) for one in documents]
        hits.append(
            sorted(
                zip(own, scores.tolist(), strict=True), key=lambda hit: (-round(hit[1], 5), hit[0])
            )[:k]
        )
    return hits


def test_encode_all_encodes_all_texts(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    encoder = BigramEncoder("document")
    manifest, _ = run(options, change(NEW, encode_all=True), encoder)
    assert (encoder.texts_seen, manifest.corpus.reused_texts) == (70, 0)


def test_encode_all_encodes_all_texts_after_an_interrupted_update(
    old: IndexManifest, options: BuildOptions, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("indexer.build._write_version", raise_interrupt)
        run(options, change(MANY))
    encoder = BigramEncoder("document")
    run(options, change(MANY, encode_all=True), encoder)
    assert encoder.texts_seen == 80


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_updates_are_built_on_each_other_and_rolled_back(
    build_version: Builder, options: BuildOptions, change: Change
) -> None:
    built = build_version(OLD, factory="HNSW8,SQ8", recall=0.9)
    settings = build_options(
        options.indexes.parent, Path("unread"), factory="HNSW8,SQ8", recall=0.9
    )
    first, _ = run(settings, change(NEW))
    encoder = BigramEncoder("document")
    second, _ = run(settings, change(delete=["d0001"]), encoder)
    assert encoder.texts_seen == 0
    assert (first.count, second.count) == (70, 69)
    assert (first.corpus.files, second.corpus.files) == (["corpus.jsonl", "new.jsonl"],) * 2
    assert second.corpus.update
    assert second.corpus.update.base == first.version
    assert rollback(options.index) == first.version
    assert rollback(options.index) == built.version
    # The active version is the base; different changes of one base have different builds.
    for id_ in ("d0001", "d0002"):
        again, _ = run(settings, change(delete=[id_]))
        ids = {document.id for document in documents_of(settings, again)}
        assert ids == {record["_id"] for record in OLD} - {id_}
        activate(options.index, built.version)


def test_the_vectors_of_a_lossy_index_are_read_from_its_shards(
    build_version: Builder, options: BuildOptions, change: Change
) -> None:
    manifest = build_version(OLD, factory="HNSW8,SQ8")
    shard = only_folder(options.builds / "test") / "shard-00001.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = state(options.indexes)
    other = replace(options, terms=TermList({"压力大": ("高血压",)}))
    with raises(IndexVersionError, "vectors_gone", version=manifest.version):
        run(other, change(NEW))
    assert state(options.indexes) == before
    shutil.rmtree(options.builds)
    with raises(IndexVersionError, "vectors_gone"):
        run(other, change(NEW))
    assert len(run(options, change(MANY))[0].segments) == 2
    assert run(options, change([changed(OLD[0], title="")], encode_all=True))[0].count == 80


def test_an_exact_index_needs_no_shards(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    shutil.rmtree(options.builds)
    encoder = BigramEncoder("document")
    run(options, change(NEW), encoder)
    assert encoder.texts_seen == 10


def test_vectors_of_another_text_normalisation_are_not_reused(
    old: IndexManifest, options: BuildOptions, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(title: str, text: str) -> str:
        return f"{title} {text}"

    for module in ("staging", "state"):
        monkeypatch.setattr(f"indexer.{module}.document_text", rule)
    for records in (NEW, MANY):
        with raises(IndexVersionError, "text_rules_changed"):
            run(options, change(records))


def test_another_encoder_is_an_error_that_names_both_spaces(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    with raises(EmbeddingSpaceError, "other_encoder", differ=["embedding_space"]):
        run(options, change(NEW), BigramEncoder("document", "other-9"))


@pytest.mark.parametrize("other", [{"backend": "vllm"}, {"dtype": "float16"}])
def test_vectors_of_another_backend_or_dtype_are_not_mixed(
    build_version: Builder, options: BuildOptions, change: Change, other: dict[str, str]
) -> None:
    build_version(OLD, backend="transformers", dtype="bfloat16")
    same = replace(options, backend="transformers", dtype="bfloat16")
    with raises(EmbeddingSpaceError, "other_precision", before=["transformers", "bfloat16"]):
        run(replace(same, **other), change(NEW))
    assert run(same, change(NEW[:5]))[0].corpus.reused_texts == 60
    changed, _ = run(replace(same, **other), change(NEW, encode_all=True))
    assert {"backend": changed.backend, "dtype": changed.dtype}.items() >= other.items()


def test_unknown_ids_are_an_error_unless_missing_ok(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    delete = ["d0001", "", "none-2", "  ", "none-1"]
    ids = options.indexes.parent / "ids.txt"
    with raises(CorpusError, "unknown_id", path=ids, id="none-2", count=2):
        run(options, change(delete=delete))
    assert run(options, change(delete=delete, missing_ok=True))[0].count == 59


@pytest.mark.parametrize(
    ("add", "delete", "code", "fields"),
    [
        ([NEW[0], OLD[4]], ["d0001", "d0004"], "added_and_deleted", {"id": "d0004", "count": 1}),
        (None, [record["_id"] for record in OLD], "empty_corpus", {}),
        (None, None, "no_changes", {}),
        ([NEW[0], NEW[0]], None, "duplicate_id", {"line": 2, "id": "d0060"}),
        ([NEW[0], {"_id": "bad"}], None, "too_many_rejects", {"rejected": 1, "total": 2}),
        ([], None, "empty_corpus", {}),
    ],
    ids=["both", "all", "nothing", "duplicate", "reject", "empty"],
)
def test_invalid_changes_do_not_change_the_index(
    old: IndexManifest,
    options: BuildOptions,
    change: Change,
    add: Records | None,
    delete: list[str] | None,
    code: str,
    fields: dict[str, Any],
) -> None:
    before = state(options.indexes)
    with raises(CorpusError, code, **fields):
        run(options, change(add, delete))
    assert state(options.indexes) == before


@pytest.mark.parametrize("factory", ["HNSW8", "HNSW8,SQ8"])
def test_full_text_changes_without_a_new_file_of_vectors(
    build_version: Builder, options: BuildOptions, factory: str
) -> None:
    base = build_version(OLD, factory=factory, builds=options.builds.parent / "others")
    spec = BigramEncoder("document").spec
    assert update_components(options, base, spec) is None
    versions = [base]
    for full_text, weight in ((True, 0.25), (False, 0.0), (True, 0.5)):
        fusion = {"lexical": weight} if weight else {}
        changed = replace(options, full_text=full_text, fusion=fusion)
        manifest = update_components(changed, versions[-1], spec)
        assert manifest
        assert manifest == verify_version(folder_of(options, manifest))
        assert (manifest.files, manifest.canaries) == (base.files, base.canaries)
        assert (manifest.parent, manifest.number) == (versions[-1].version, len(versions) + 1)
        assert (manifest.fusion, "lexical" in manifest.components) == (fusion, full_text)
        assert (folder_of(options, manifest) / "lexical").is_dir() == full_text
        files = [folder_of(options, each) / "vectors.faiss" for each in (base, manifest)]
        assert files[0].samefile(files[1])
        versions.append(manifest)
    assert options.index.active() == versions[-1].version
    # Links are independent of the versions that they were made from.
    prune(IndexWriter(options.indexes, options.name), options.builds, keep=1)
    assert options.index.versions() == [versions[-1].version]
    assert verify_version(folder_of(options, versions[-1])) == versions[-1]


def test_a_term_list_is_kept_replaced_and_removed(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    spec = BigramEncoder("document").spec
    first, second = (TermList({word: ("高血压",)}) for word in ("压力大", "血压高"))
    listed = update_components(replace(options, terms=first), old, spec)
    assert listed
    assert update_components(replace(options, terms=first), listed, spec) is None
    assert listed.components["lexical"] == old.components["lexical"]
    assert read_terms(folder_of(options, listed), listed, GIVEN) == first
    added, _ = run(replace(options, terms=first), change(NEW))
    assert added.segments[0].folder == listed.version
    assert added.components == listed.components
    replaced, _ = run(replace(options, terms=second), change())
    assert read_terms(folder_of(options, replaced), replaced, GIVEN) == second
    removed = update_components(options, replaced, spec)
    assert removed
    assert removed.components.keys() == {"lexical"}
    assert not (folder_of(options, removed) / "terms").exists()


@pytest.mark.parametrize("documents", [False, True])
def test_full_text_of_an_older_release_is_searched_as_it_is_until_an_update(
    build_version: Builder,
    options: BuildOptions,
    change: Change,
    monkeypatch: pytest.MonkeyPatch,
    documents: bool,
) -> None:
    def found(manifest: IndexManifest) -> dict[str, list[int]]:
        folder = folder_of(options, manifest)
        full_text = open_full_text(folder, manifest)
        assert full_text
        names = ("CA125", "CA-125")
        return {name: full_text.search(name, 2)[1].tolist() for name in names}

    records = [{"_id": str(i), "text": f"查{name}"} for i, name in enumerate(("CA-125", "CA125"))]
    with monkeypatch.context() as patch:
        patch.setattr("stores.lexical.terms", partial(terms, names=False))
        built = build_version(records)
    built.components["lexical"].settings.clear()
    edit_manifest(folder_of(options, built), lambda m: m["components"]["lexical"].pop("settings"))
    old = verify_version(folder_of(options, built))
    assert old == built
    assert found(old) == {"CA125": [1], "CA-125": [0]}
    # Nothing is encoded again because of it.
    corpus = replace(options, corpus=str(options.indexes.parent / "corpus.jsonl"))
    assert up_to_date(corpus, BigramEncoder("document").spec) == old
    if documents:
        new, _ = run(options, change(records[:1]))
    else:
        updated = update_components(options, old, BigramEncoder("document").spec)
        assert updated
        new = updated
        assert new.files == old.files
    assert found(new) == {"CA125": [1, 0], "CA-125": [0, 1]}
    assert update_components(options, new, BigramEncoder("document").spec) is None


def test_full_text_of_a_version_that_is_no_longer_active(
    build_version: Builder, options: BuildOptions
) -> None:
    base = build_version(OLD)
    build_version(NEW)
    before = state(options.indexes)
    changed = replace(options, full_text=False)
    with raises(IndexVersionError, "base_not_active"):
        update_components(changed, base, BigramEncoder("document").spec)
    with raises(EmbeddingSpaceError, "other_encoder"):
        update_components(changed, base, BigramEncoder("document", "other").spec)
    assert state(options.indexes) == before


def test_the_weight_changes_with_documents_that_do_not(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    manifest, encoded = run(replace(options, fusion={"lexical": 0.25}), change(OLD[:5]))
    assert (manifest.fusion, encoded, manifest.count) == ({"lexical": 0.25}, None, old.count)
    assert [entry.folder for entry in manifest.segments] == [old.version]


def test_a_damaged_version_is_not_updated(
    published: Path, options: BuildOptions, change: Change
) -> None:
    path = published / "vectors.faiss"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises(IndexVersionError, "wrong_checksum"):
        run(options, change(MANY))


class FailingEncoder(BigramEncoder):
    """Encodes some batches, then fails."""

    def __init__(self, batches: int) -> None:
        super().__init__("document")
        self._batches = batches

    def encode(self, texts: Any) -> Any:
        if not self._batches:
            raise CareError("no more", code="no_more")
        self._batches -= 1
        return super().encode(texts)


def test_an_update_keeps_only_its_shards(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    encoders = BigramEncoder("document"), BigramEncoder("query")
    assert update(options, change([OLD[0]]), old, *encoders) is None
    manifest, _ = run(options, change(NEW))
    folders = {path.name for path in (options.builds / "test").iterdir()}
    assert {name[:8] for name in folders} == {
        version.rpartition("-")[2] for version in (old.version, manifest.version)
    }
    prune(options.index, options.builds, keep=1)
    # The segment of the base is still needed, and its shards by a merge.
    assert {path.name for path in (options.builds / "test").iterdir()} == folders
    assert merge(options, manifest, *encoders)
    prune(options.index, options.builds, keep=0)
    assert only_folder(options.builds / "test").name not in folders


def test_an_interrupted_update_resumes_after_a_prune(
    build_version: Builder, options: BuildOptions, change: Change
) -> None:
    build_version(OLD)
    build_version(OLD[:40])
    new = make_records(110)[60:]
    with raises(CareError, "no_more"):
        run(options, change(new), FailingEncoder(8))
    assert len(list((options.builds / "test").iterdir())) == 4
    prune(options.index, options.builds, keep=1)
    assert len(list((options.builds / "test").iterdir())) == 2
    encoder = BigramEncoder("document")
    assert run(options, change(new), encoder)[0].count == 90
    assert 0 < encoder.texts_seen <= 50 - 16


def test_prune_deletes_an_interrupted_update_of_a_deleted_version(
    build_version: Builder, options: BuildOptions, change: Change
) -> None:
    build_version(OLD)
    with raises(CareError, "no_more"):
        run(options, change(NEW), FailingEncoder(1))
    kept = build_version(OLD[:40])
    prune(options.index, options.builds, keep=1)
    folder = only_folder(options.builds / "test")
    assert kept.version.endswith(folder.name[:8])


def test_rejects_of_an_update_are_counted_and_listed(
    tmp_path: Path, old: IndexManifest, change: Change
) -> None:
    settings = build_options(tmp_path, Path("unread"), max_reject_rate=0.1)
    manifest, encoded = run(settings, change([*NEW, {"_id": "bad"}]))
    assert manifest.corpus.rejected == 1
    (line,) = (encoded.folder / "rejects.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["line"] == 11


def test_changes_without_effect_do_not_create_a_version(
    old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    run(options, change(ADDED, DELETED))
    base = active_manifest(options.index)
    before = state(options.indexes)
    encoders = BigramEncoder("document"), BigramEncoder("query")
    changes = change(ADDED, DELETED, missing_ok=True)
    assert update(options, changes, base, *encoders) is None
    assert state(options.indexes) == before
    # 1 equals True in Python, but not in JSON and in filters.
    one = [changed(NEW[0], metadata={"rare": 0})]
    assert update(options, change(one), base, *encoders) is not None
    assert update(options, change(one), active_manifest(options.index), *encoders) is None
    flag = [changed(NEW[0], metadata={"rare": False})]
    assert run(options, change(flag))[0].corpus.update.replaced == 1  # type: ignore[union-attr]


def test_an_updated_index_is_not_up_to_date_with_the_corpus_it_was_built_from(
    tmp_path: Path, old: IndexManifest, options: BuildOptions, change: Change
) -> None:
    settings = build_options(tmp_path, tmp_path / "corpus.jsonl")
    spec = make_spec("document")
    assert up_to_date(settings, spec)
    manifest, _ = run(options, change(NEW))
    assert not up_to_date(settings, spec)
    assert not up_to_date(build_options(tmp_path, tmp_path / "new.jsonl"), spec)
    assert manifest.corpus.checksum != old.corpus.checksum
    built, _ = run(options, change(MANY))
    assert built.corpus.checksum == built.files["documents.arrow"].sha256


class SwitchingEncoder(BigramEncoder):
    """Activates the previous version while an update runs, and prunes."""

    def __init__(self, indexes: Path, *, keep: int) -> None:
        super().__init__("query")
        self._indexes = indexes
        self._keep = keep
        self.deleted: list[str] | None = None

    def encode(self, texts: Any) -> Any:
        if self.deleted is None:
            rollback(IndexWriter(self._indexes, "test"))
            builds = self._indexes.parent / "builds"
            self.deleted = prune(IndexWriter(self._indexes, "test"), builds, keep=self._keep)
        return super().encode(texts)


@pytest.mark.parametrize("keep", [0, 1])
def test_an_update_is_not_published_if_its_base_is_no_longer_active(
    build_version: Builder, options: BuildOptions, change: Change, keep: int
) -> None:
    first = build_version(OLD[:50])
    second = build_version(OLD)
    encoder = SwitchingEncoder(options.indexes, keep=keep)
    base = active_manifest(options.index)
    with raises(IndexVersionError, "base_not_active", version=second.version):
        update(options, change(NEW), base, BigramEncoder("document"), encoder)
    assert encoder.deleted == [second.version][keep:]
    assert options.index.active() == first.version
    assert options.index.versions() == [first.version, second.version][: 1 + keep]
    assert run(options, change(NEW))[0].count == 60


@pytest.mark.parametrize(
    ("factory", "kept"), [("Flat", None), ("HNSW8", "HNSW8"), ("HNSW8,SQ8", "HNSW8,SQ8")]
)
def test_the_requested_factory_is_kept(
    build_version: Builder, factory: str, kept: str | None
) -> None:
    assert requested_factory(build_version(OLD, factory=factory, recall=0.5)) == kept


@pytest.mark.usefixtures("test_encoders")
def test_the_command_reports_its_changes(
    tmp_path: Path,
    build_version: Builder,
    options: BuildOptions,
    change: Change,
    pair_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build_version(OLD, factory="HNSW8", recall=0.5)
    change(ADDED, DELETED)
    common = ["--index", "test", "--indexes", str(options.indexes)]
    command = ["update", *common, "--builds", str(options.builds), "--pair", str(pair_file)]
    command += ["--add", str(tmp_path / "new.jsonl")]
    delete = ["--delete", str(tmp_path / "ids.txt")]
    assert main([*command, *delete]) == 0
    output = capsys.readouterr().out
    version = options.index.active()
    assert output.startswith(
        "update  10 documents added, 6 replaced, 4 deleted, 50 unchanged; "
        "14 texts encoded, 52 reused\n"
    )
    assert "\nencode  14 texts in" in output
    assert output.endswith(f"active  {options.indexes / 'test' / version}\n")
    manifest = read_manifest(options.indexes / "test" / version)
    assert (manifest.factory, manifest.recall.target) == ("HNSW8", 0.5)

    assert main(command) == 0
    assert capsys.readouterr().out.endswith(f"{version}: nothing changes\n")
    assert main([*command, *delete]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_id"
    assert main(["versions", "list", *common]) == 0
    assert f"* {version}  66 documents" in capsys.readouterr().out
    assert main(["versions", "rollback", *common]) == 0
    verify_version(options.indexes / "test" / options.index.active())
