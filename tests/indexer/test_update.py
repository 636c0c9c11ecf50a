import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError
from core.manifest import Chunking, IndexManifest
from core.terms import TermList
from core.versions import read_manifest
from indexer.build import up_to_date
from indexer.publication import verify_version
from indexer.update import merge
from indexer.versions import activate, prune, rollback
from tests.conftest import make_records
from tests.encoders import BigramEncoder, make_spec
from tests.errors import error_code, raises
from tests.indexer.builds import build_options, only_folder, state
from tests.indexer.conftest import MANY, NEW, OLD, Index, Records


def records_after(old: Records, added: Records, deleted: Sequence[str]) -> Records:
    """Reference result of an update: kept in order, replaced in place, new ones appended."""
    new = {record["_id"]: record for record in added}
    kept = [new.pop(r["_id"], r) for r in old if r["_id"] not in deleted]
    return kept + list(new.values())


def content(manifest: IndexManifest) -> tuple[Any, ...]:
    """What versions of equal corpora have alike; files by their checksums."""
    counts = {"documents", "chunks", "unique_texts", "rejected"}
    return (
        manifest.files,
        manifest.components,
        manifest.filter_fields,
        manifest.canaries,
        manifest.corpus.model_dump(include=counts),
    )


# Of 60 documents: 3 with another text, 1 with another title, 2 with other metadata, 1 unchanged.
REPLACED = [
    *(OLD[i] | {"text": f"新的说明第{i}号。"} for i in (40, 3, 21)),
    OLD[7] | {"title": "新题"},
    OLD[8] | {"metadata": {"department": "外科", "weight": 1.5}},
    OLD[9] | {"metadata": {}},
    OLD[10],
]
ADDED = [NEW[0], *REPLACED, *NEW[1:]]
DELETED = ["d0000", "d0059", "d0030", "d0031"]


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "HNSW8,Flat", "HNSW8,SQ8"])
def test_an_update_equals_a_build_of_the_resulting_corpus(index: Index, factory: str) -> None:
    index.build(OLD, factory=factory)
    manifest, encoded, texts = index.update(ADDED, DELETED, factory=factory)
    counts = {"added": 10, "replaced": 6, "deleted": 4, "unchanged": 50}
    assert manifest.corpus.update.model_dump(exclude={"base"}) == counts
    assert texts == encoded.summary.new_texts == 10 + 3 + 1
    assert manifest.corpus.reused_texts == 66 - 14
    rebuilt = index.build(records_after(OLD, ADDED, DELETED), factory=factory)
    assert content(manifest) == content(rebuilt)
    assert manifest.recall == rebuilt.recall


@pytest.mark.e2e
@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8"])
def test_an_index_of_chunks_is_updated_by_documents(index: Index, factory: str) -> None:
    def long(records: Records) -> Records:
        """Every third document has six sentences, each of one or two chunks."""
        texts = ["".join(f"{r['text']}（{n}）。" for n in range(6)) for r in records[::3]]
        return [r | {"text": texts[i // 3]} if i % 3 == 0 else r for i, r in enumerate(records)]

    old, added = long(OLD), long(ADDED)
    # The 8-bit codes of such similar texts are hard to distinguish.
    settings = {"factory": factory, "recall": 0.9}
    chunking = Chunking(tokens=40, overlap=5)
    index.build(old, chunking=chunking, **settings)
    manifest, _, texts = index.update(added, DELETED, **settings)
    assert manifest.chunking == chunking
    counts = manifest.corpus.update
    assert (counts.deleted, counts.added, counts.replaced + counts.unchanged) == (4, 10, 56)
    assert texts == manifest.corpus.unique_texts - manifest.corpus.reused_texts
    assert 10 < texts < manifest.corpus.reused_texts

    rebuilt = index.build(records_after(old, added, DELETED), chunking=chunking, **settings)
    assert content(manifest) == content(rebuilt)
    assert rebuilt.corpus.chunks > rebuilt.corpus.documents
    assert index.update(added, **settings) is None
    for other in (None, Chunking(tokens=30)):
        index.build(old, chunking=other)
        with raises(CareError, "other_chunking"):
            index.update(added, chunking=chunking)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "HNSW8,SQ8"])
def test_segments_find_what_a_build_does_and_a_merge_is_equal_to_it(
    index: Index, factory: str
) -> None:
    settings = {"factory": factory, "recall": 0.5}
    options = replace(index.options, **settings)
    old = make_records(200)
    index.build(old, **settings)
    resulting = old
    for number in range(3):
        added = make_records(203 + 3 * number)[200 + 3 * number :]
        added = [old[7 * number] | {"title": "新题"}, *added]
        deleted = [old[100 + number]["_id"]]
        manifest, *_ = index.update(added, deleted, **settings)
        new = {record["_id"] for record in added}
        resulting = [r for r in resulting if r["_id"] not in (new | {*deleted})] + added
    assert len(manifest.segments) == 4
    assert manifest.count == len(resulting) == manifest.corpus.documents
    assert [one.id for one in index.open(manifest).documents] == [r["_id"] for r in resulting]
    before = index.nearest(manifest, resulting[-20:])
    encoder = BigramEncoder("document")
    merged = merge(options, manifest, encoder, BigramEncoder("query"))
    assert merged
    assert encoder.texts_seen == 0
    assert merge(options, merged, encoder, BigramEncoder("query")) is None
    rebuilt = index.build(resulting, **settings)
    assert content(merged) == content(rebuilt)
    if factory == "Flat":
        assert before == index.nearest(rebuilt, resulting[-20:])


@pytest.mark.parametrize(
    ("add", "delete", "encoded"),
    [
        pytest.param([OLD[5] | {"metadata": {"department": "外科"}}], [], 0, id="metadata"),
        # The same text after the text rules.
        pytest.param([OLD[5] | {"text": f" {OLD[5]['text']}\u200b "}], [], 0, id="white space"),
        pytest.param([OLD[5] | {"_id": "copy"}], [], 1, id="copy of one that stays"),
        pytest.param([OLD[5] | {"_id": "renamed"}], ["d0005"], 0, id="copy of a deleted one"),
        pytest.param([OLD[5] | {"_id": "copy", "title": ""}], [], 1, id="title"),
        pytest.param([NEW[0] | {"_id": f"n{i}"} for i in range(3)], [], 1, id="new copies"),
    ],
)
def test_texts_with_known_vectors_are_not_encoded(
    index: Index, old: IndexManifest, add: Records, delete: list[str], encoded: int
) -> None:
    manifest, _, texts = index.update(add, delete)
    assert texts == encoded
    assert [entry.count for entry in manifest.segments] == [60, len(add)]
    (((document, score),),) = index.nearest(manifest, add[:1], 1)
    assert document == (add[0]["_id"], add[0]["text"])
    assert score == pytest.approx(1, abs=1e-6)


def test_encode_all_encodes_all_texts_after_an_interrupted_update(
    index: Index, old: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("indexer.build._write_version", interrupted)
        index.update(MANY)
    assert index.update(MANY, encode_all=True).texts == 80


def test_updates_are_built_on_each_other_and_rolled_back(index: Index) -> None:
    settings = {"factory": "HNSW8,SQ8", "recall": 0.9}
    built = index.build(OLD, **settings)
    first = index.update(NEW, **settings).manifest
    second, _, texts = index.update(delete=["d0001"], **settings)
    assert texts == 0
    assert (first.count, second.count) == (70, 69)
    assert (first.corpus.files, second.corpus.files) == (["corpus.jsonl", "new.jsonl"],) * 2
    assert second.corpus.update.base == first.version
    assert rollback(index.versions) == first.version
    assert rollback(index.versions) == built.version
    # The active version is the base; different changes of one base have different builds.
    for id_ in ("d0001", "d0002"):
        again = index.update(delete=[id_], **settings).manifest
        ids = {document.id for document in index.open(again).documents}
        assert ids == {record["_id"] for record in OLD} - {id_}
        activate(index.versions, built.version)


def test_the_vectors_of_a_lossy_index_are_read_from_its_shards(index: Index) -> None:
    manifest = index.build(OLD, factory="HNSW8,SQ8")
    shard = only_folder(index.builds) / "shard-00001.npy"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = state(index.options.indexes)
    other = TermList({"压力大": ("高血压",)})
    with raises(IndexVersionError, "vectors_gone", version=manifest.version):
        index.update(NEW, terms=other)
    assert state(index.options.indexes) == before
    shutil.rmtree(index.options.builds)
    with raises(IndexVersionError, "vectors_gone"):
        index.update(NEW, terms=other)
    assert len(index.update(MANY).manifest.segments) == 2
    assert index.update([OLD[0] | {"title": ""}], encode_all=True).manifest.count == 80


def test_an_exact_index_needs_no_shards(index: Index, old: IndexManifest) -> None:
    shutil.rmtree(index.options.builds)
    assert index.update(NEW).texts == 10


def test_vectors_of_another_text_normalisation_are_not_reused(
    index: Index, old: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("staging", "state"):
        monkeypatch.setattr(f"indexer.{module}.document_text", "{} {}".format)
    for records in (NEW, MANY):
        with raises(IndexVersionError, "text_rules_changed"):
            index.update(records)


def test_another_encoder_is_an_error_that_names_both_spaces(
    index: Index, old: IndexManifest
) -> None:
    with raises(EmbeddingSpaceError, "other_encoder", differ=["embedding_space"]):
        index.update(NEW, encoder=BigramEncoder("document", "other-9"))


@pytest.mark.parametrize("other", [{"backend": "vllm"}, {"dtype": "float16"}])
def test_vectors_of_another_backend_or_dtype_are_not_mixed(
    index: Index, other: dict[str, str]
) -> None:
    same = {"backend": "transformers", "dtype": "bfloat16"}
    index.build(OLD, **same)
    with raises(EmbeddingSpaceError, "other_precision", before=[*same.values()]):
        index.update(NEW, **same | other)
    assert index.update(NEW[:5], **same).manifest.corpus.reused_texts == 60
    changed = index.update(NEW, encode_all=True, **same | other).manifest
    assert {"backend": changed.backend, "dtype": changed.dtype} == same | other


def test_unknown_ids_are_an_error_unless_missing_ok(index: Index, old: IndexManifest) -> None:
    delete = ["d0001", "", "none-2", "  ", "none-1"]
    with raises(CorpusError, "unknown_id", path=index.folder / "ids.txt", id="none-2", count=2):
        index.update(delete=delete)
    assert index.update(delete=delete, missing_ok=True).manifest.count == 59


@pytest.mark.parametrize(
    ("add", "delete", "code", "fields"),
    [
        ([NEW[0], OLD[4]], ["d0001", "d0004"], "added_and_deleted", {"id": "d0004", "count": 1}),
        (None, [record["_id"] for record in OLD], "empty_corpus", {}),
        (None, (), "no_changes", {}),
        ([NEW[0], NEW[0]], (), "duplicate_id", {"line": 2, "id": "d0060"}),
        ([NEW[0], {"_id": "bad"}], (), "too_many_rejects", {"rejected": 1, "total": 2}),
        ([], (), "empty_corpus", {}),
    ],
    ids=["both", "all", "nothing", "duplicate", "reject", "empty"],
)
def test_invalid_changes_do_not_change_the_index(
    index: Index,
    old: IndexManifest,
    add: Records | None,
    delete: Sequence[str],
    code: str,
    fields: dict[str, Any],
) -> None:
    before = state(index.options.indexes)
    with raises(CorpusError, code, **fields):
        index.update(add, delete)
    assert state(index.options.indexes) == before


def test_a_damaged_version_is_not_updated(index: Index, old: IndexManifest) -> None:
    path = index.path(old) / "vectors.faiss"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises(IndexVersionError, "wrong_checksum"):
        index.update(MANY)


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


def test_an_update_keeps_only_its_shards(index: Index, old: IndexManifest) -> None:
    assert index.update([OLD[0]]) is None
    manifest = index.update(NEW).manifest
    folders = {path.name for path in index.builds.iterdir()}
    versions = (old.version, manifest.version)
    assert {name[:8] for name in folders} == {each.rpartition("-")[2] for each in versions}
    prune(index.versions, index.options.builds, keep=1)
    # The segment of the base is still needed, and its shards by a merge.
    assert {path.name for path in index.builds.iterdir()} == folders
    assert merge(index.options, manifest, BigramEncoder("document"), BigramEncoder("query"))
    prune(index.versions, index.options.builds, keep=0)
    assert only_folder(index.builds).name not in folders


def test_an_interrupted_update_resumes_after_a_prune(index: Index) -> None:
    for records in (OLD, OLD[:40]):
        index.build(records)
    new = make_records(110)[60:]
    with raises(CareError, "no_more"):
        index.update(new, encoder=FailingEncoder(8))
    assert len(list(index.builds.iterdir())) == 4
    prune(index.versions, index.options.builds, keep=1)
    assert len(list(index.builds.iterdir())) == 2
    manifest, _, texts = index.update(new)
    assert manifest.count == 90
    assert 0 < texts <= 50 - 16


def test_prune_deletes_an_interrupted_update_of_a_deleted_version(
    index: Index, old: IndexManifest
) -> None:
    with raises(CareError, "no_more"):
        index.update(NEW, encoder=FailingEncoder(1))
    kept = index.build(OLD[:40])
    prune(index.versions, index.options.builds, keep=1)
    assert kept.version.endswith(only_folder(index.builds).name[:8])


def test_rejects_of_an_update_are_counted_and_listed(index: Index, old: IndexManifest) -> None:
    manifest, encoded, _ = index.update([*NEW, {"_id": "bad"}], max_reject_rate=0.1)
    assert manifest.corpus.rejected == 1
    (line,) = (encoded.folder / "rejects.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["line"] == 11


def test_changes_without_effect_do_not_create_a_version(index: Index, old: IndexManifest) -> None:
    index.update(ADDED, DELETED)
    before = state(index.options.indexes)
    assert index.update(ADDED, DELETED, missing_ok=True) is None
    assert state(index.options.indexes) == before
    # 1 equals True in Python, but not in JSON and in filters.
    one, flag = ([NEW[0] | {"metadata": {"rare": value}}] for value in (0, False))
    assert index.update(one)
    assert index.update(one) is None
    assert index.update(flag).manifest.corpus.update.replaced == 1


def test_an_updated_index_is_not_up_to_date_with_the_corpus_it_was_built_from(
    index: Index, old: IndexManifest
) -> None:
    spec = make_spec("document")
    corpus, new = (
        build_options(index.folder, index.folder / name) for name in ("corpus.jsonl", "new.jsonl")
    )
    assert up_to_date(corpus, spec)
    manifest = index.update(NEW).manifest
    assert not up_to_date(corpus, spec)
    assert not up_to_date(new, spec)
    assert manifest.corpus.checksum != old.corpus.checksum
    built = index.update(MANY).manifest
    assert built.corpus.checksum == built.files["documents.arrow"].sha256


class SwitchingEncoder(BigramEncoder):
    """Activates the previous version while an update runs, and prunes."""

    def __init__(self, index: Index, keep: int) -> None:
        super().__init__("query")
        self._index, self._keep = index, keep
        self.deleted: list[str] | None = None

    def encode(self, texts: Any) -> Any:
        if self.deleted is None:
            rollback(self._index.versions)
            builds = self._index.options.builds
            self.deleted = prune(self._index.versions, builds, keep=self._keep)
        return super().encode(texts)


@pytest.mark.parametrize("keep", [0, 1])
def test_an_update_is_not_published_if_its_base_is_no_longer_active(
    index: Index, keep: int
) -> None:
    first, second = index.build(OLD[:50]).version, index.build(OLD).version
    encoder = SwitchingEncoder(index, keep)
    with raises(IndexVersionError, "base_not_active", version=second):
        index.update(NEW, query=encoder)
    assert encoder.deleted == [second][keep:]
    assert index.versions.active() == first
    assert index.versions.versions() == [first, second][: 1 + keep]
    assert index.update(NEW).manifest.count == 60


@pytest.mark.usefixtures("test_encoders")
def test_the_command_reports_its_changes(
    index: Index, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index.build(OLD, factory="HNSW8", recall=0.5)
    index.changes(ADDED, DELETED)
    common = ["--index", "test", "--indexes", str(index.options.indexes)]
    command = ["update", *common, "--builds", str(index.options.builds), "--pair", str(pair_file)]
    command += ["--add", str(index.folder / "new.jsonl")]
    delete = ["--delete", str(index.folder / "ids.txt")]
    assert main([*command, *delete]) == 0
    output = capsys.readouterr().out
    path = index.versions.path / index.versions.active()
    assert output.startswith(
        "update  10 documents added, 6 replaced, 4 deleted, 50 unchanged; "
        "14 texts encoded, 52 reused\n"
    )
    assert "\nencode  14 texts in" in output
    assert output.endswith(f"active  {path}\n")
    manifest = read_manifest(path)
    assert (manifest.factory, manifest.recall.target) == ("HNSW8", 0.5)

    assert main(command) == 0
    assert capsys.readouterr().out.endswith(f"{path.name}: nothing changes\n")
    assert main([*command, *delete]) == 1
    assert error_code(capsys.readouterr().err) == "unknown_id"
    assert main(["versions", "list", *common]) == 0
    assert f"* {path.name}  66 documents" in capsys.readouterr().out
    assert main(["versions", "rollback", *common]) == 0
    verify_version(index.versions.path / index.versions.active())
