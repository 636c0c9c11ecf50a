import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.conditions import parse_filter
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.manifest import Chunking, IndexManifest
from core.types import Document
from core.versions import read_manifest
from core.writes import Write, Written, document_tag
from indexer.build import build
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter, verify_version
from indexer.update import Changes, merge, update
from indexer.versions import prune, rollback
from stores.faiss.store import FaissStore
from stores.segment import Segment, open_segments
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import build_options, state
from tests.indexer.writing import unneeded

Record = dict[str, Any]
BASE = make_records(60)


@pytest.fixture
def index(indexes: Path) -> IndexWriter:
    return IndexWriter(indexes, "test")


@pytest.fixture
def live(build_version: Builder, index: IndexWriter) -> LiveIndex:
    build_version(BASE)
    return LiveIndex(index, BigramEncoder("document"))


def active(index: IndexWriter) -> IndexManifest:
    return read_manifest(index.version(index.active()))


def opened(index: IndexWriter) -> Segment:
    manifest = active(index)
    return open_segments(index.version(manifest.version), manifest, FaissStore()).all


def content(index: IndexWriter) -> dict[str, tuple[str, str, Any]]:
    return {one.id: (one.title, one.text, one.metadata) for one in opened(index).documents}


def expected(records: dict[str, Record]) -> dict[str, tuple[str, str, Any]]:
    return {
        id_: (one.get("title", ""), one["text"], one.get("metadata", {}))
        for id_, one in records.items()
    }


def write(**parts: Any) -> Write:
    return Write("test", **parts)


def one(live: LiveIndex, **parts: Any) -> Written:
    (result,) = live.commit([write(**parts)])
    assert isinstance(result, Written), result
    return result


def counts(written: Written) -> tuple[int, int, int, int]:
    return written.added, written.replaced, written.deleted, written.unchanged


def test_a_write_is_found_and_a_repeated_one_changes_nothing(
    live: LiveIndex, index: IndexWriter
) -> None:
    record = {"_id": "new", "title": "咳嗽", "text": "多喝水。", "metadata": {"department": "内科"}}
    written = one(live, put=(record, BASE[3] | {"text": "改了。"}), delete=("d0007", "none"))
    assert counts(written) == (1, 1, 1, 0)
    assert written.missing == ("none",)
    assert (written.version, written.number) == (index.active(), 2)
    manifest = verify_version(index.version(written.version))
    assert (manifest.count, manifest.corpus.documents) == (60, 60)
    assert manifest.filter_fields == {"department": 4, "rare": 2, "tags": 6}
    segment = opened(index)
    vector = BigramEncoder().encode(["咳嗽\n多喝水。"]).vectors[0]
    assert segment.documents[int(segment.vectors.search(vector, 1)[1][0])].id == "new"
    assert segment.full_text
    assert segment.documents[int(segment.full_text.search("多喝水", 1)[1][0])].id == "new"
    before = state(index.root)
    again = one(live, put=(record,), delete=("d0007",))
    found = counts(again), again.version, again.missing
    assert found == ((0, 0, 0, 1), written.version, ("d0007",))
    reordered = BASE[4] | {"metadata": dict(reversed(BASE[4]["metadata"].items()))}
    assert [*reordered["metadata"]] != [*BASE[4]["metadata"]]
    assert counts(one(live, put=(reordered,))) == (0, 0, 0, 1)
    assert state(index.root) == before


def test_requests_of_a_commit_are_one_version_and_apply_in_order(
    live: LiveIndex, index: IndexWriter
) -> None:
    a, b = {"_id": "a", "text": "一"}, {"_id": "a", "text": "二"}
    results = live.commit(
        [
            write(put=(a, {"id": 7}, {"_id": "\n", "text": "一"})),
            write(put=(b,), delete=("d0000",)),
            write(delete=("a",)),
            write(put=(BASE[0],)),
            write(patch=(("d0001", {"x": 1}),)),
        ]
    )
    assert all(isinstance(result, Written) for result in results)
    assert [counts(each) for each in results if isinstance(each, Written)] == [
        (1, 0, 0, 0),
        (0, 1, 1, 0),
        (0, 0, 1, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
    ]
    assert isinstance(results[0], Written)
    found = [(one.position, one.id, one.code) for one in results[0].rejected]
    assert found == [(1, "7", "invalid_record"), (2, None, "invalid_record")]
    assert len(index.versions()) == 2
    # What is as it was before is not written.
    assert [entry.count for entry in active(index).segments] == [60, 1]
    assert content(index)["d0001"][2] == {"x": 1}
    assert content(index).keys() == {record["_id"] for record in BASE}


def test_a_random_sequence_of_commits_merges_and_updates_is_what_a_model_says(
    live: LiveIndex, index: IndexWriter, tmp_path: Path
) -> None:
    choose = random.Random(38)
    model = {record["_id"]: record for record in BASE}
    options = build_options(tmp_path, Path("unread"))
    for step in range(40):
        if step % 13 == 12:
            add = {"_id": f"u{step}", "text": f"更新{step}", "metadata": {"n": step}}
            path = write_jsonl(tmp_path / "add.jsonl", [add])
            gone = choose.choice(sorted(model))
            changes = Changes(str(path), [gone])
            assert update(options, changes, active(index), *encoders())
            del model[gone]
            model[add["_id"]] = add
            continue
        put = tuple(
            {
                "_id": f"n{choose.randrange(30)}",
                "text": f"文字{choose.randrange(5)}",
                "metadata": {"n": choose.randrange(3)},
            }
            for _ in range(choose.randrange(3))
        )
        patch = tuple(
            (choose.choice(sorted(model)), {"n": step}) for _ in range(choose.randrange(2))
        )
        delete = tuple(choose.choice(sorted(model)) for _ in range(choose.randrange(2)))
        where = parse_filter({"n": 1}) if step % 5 == 4 else None
        written = one(live, put=put, patch=patch, delete=delete, delete_where=where)
        for record in put:
            model[record["_id"]] = record
        for id_, metadata in patch:
            model[id_] = model[id_] | {"metadata": metadata}
        for id_ in delete:
            model.pop(id_, None)
        if where:
            model = {
                id_: each for id_, each in model.items() if each.get("metadata", {}).get("n") != 1
            }
        if step % 8 == 7:
            live.merge()
        assert content(index) == expected(model)
        assert active(index).corpus.documents == len(model)
        assert written.version in index.versions()
        rows = opened(index).filters.rows(parse_filter({"n": step}))
        assert len(rows) == sum(
            each.get("metadata", {}).get("n") == step for each in model.values()
        )
    assert len(active(index).segments) < 20
    verify_version(index.version(index.active()))
    prune(index, tmp_path / "builds", keep=1)
    assert content(index) == expected(model)
    merged = merge(options, active(index), *encoders())
    assert merged and not merged.segments
    assert content(index) == expected(model)
    prune(index, tmp_path / "builds", keep=1)
    assert {path.name for path in index.path.glob("[!.]*/")} == {merged.version}


def encoders() -> tuple[BigramEncoder, BigramEncoder]:
    return BigramEncoder("document"), BigramEncoder("query")


def test_a_write_by_another_command_between_two_commits(
    live: LiveIndex, index: IndexWriter
) -> None:
    other = LiveIndex(index, BigramEncoder("document"))
    one(live, put=({"_id": "a", "text": "一"},))
    assert counts(one(other, put=({"_id": "a", "text": "二"},))) == (0, 1, 0, 0)
    assert counts(one(live, put=({"_id": "a", "text": "二"},))) == (0, 0, 0, 1)
    assert rollback(index) == index.versions()[0]
    assert counts(one(live, put=({"_id": "a", "text": "二"},))) == (1, 0, 0, 0)
    assert active(index).number == 4


def test_if_match(live: LiveIndex) -> None:
    document = Document("d0001", BASE[1]["text"], BASE[1]["title"], BASE[1]["metadata"])
    tag = document_tag(document)
    new = BASE[1] | {"text": "新"}

    def reasons(**parts: Any) -> list[str]:
        return [each.code for each in one(live, **parts).rejected]

    assert reasons(put=(new,), if_match={"d0001": "0" * 16}) == ["document_changed"]
    assert reasons(put=(new,), if_match={"d0001": ""}) == ["document_changed"]
    assert reasons(put=(new,), if_match={"d0001": tag}) == []
    assert reasons(delete=("d0001",), if_match={"d0001": tag}) == ["document_changed"]
    assert reasons(patch=(("no", {}),), if_match={"no": "*"}) == ["document_changed"]
    assert reasons(put=({"_id": "x", "text": "y"},), if_match={"x": ""}) == []
    assert reasons(delete=("d0001",), if_match={"d0001": "*"}) == []


def test_other_documents_do_not_exist_for_a_bounded_caller(
    live: LiveIndex, index: IndexWriter
) -> None:
    within = parse_filter({"department": "儿科"})
    own, other = BASE[1], BASE[0]
    assert own["metadata"]["department"] == "儿科"
    written = one(
        live,
        put=(other | {"text": "x"}, own | {"metadata": {}}, own | {"text": "改"}),
        patch=((other["_id"], {"department": "儿科"}), (own["_id"], {"department": "骨科"})),
        delete=(other["_id"],),
        within=within,
    )
    assert [(each.position, each.code) for each in written.rejected] == [
        (0, "outside_grant"),
        (1, "outside_grant"),
        (1, "outside_grant"),
    ]
    assert written.missing == (other["_id"], other["_id"])
    assert counts(written) == (0, 1, 0, 0)
    kept = [record for record in BASE if record["metadata"]["department"] != "儿科"]
    gone = one(live, delete_where=parse_filter({}), within=within)
    assert gone.deleted == len(BASE) - len(kept)
    assert content(index) == expected({record["_id"]: record for record in kept})


def test_a_bound_with_a_field_that_no_document_has_opens_nothing(
    live: LiveIndex, index: IndexWriter
) -> None:
    id_, before = BASE[0]["_id"], content(index)
    within = parse_filter({"none": {"not": "x"}})
    put = (BASE[0] | {"text": "改"}, {"_id": "new", "text": "新"})
    written = one(live, put=put, patch=((id_, {}),), delete=(id_,), within=within)
    assert [each.code for each in written.rejected] == ["outside_grant", "outside_grant"]
    assert written.missing == (id_, id_)
    assert one(live, delete_where=parse_filter({}), within=within).deleted == 0
    assert content(index) == before


def test_the_last_document_can_be_deleted(
    live: LiveIndex, index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.live.index.LEAST_CHANGED", 1)
    assert one(live, delete_where=parse_filter({})).deleted == 60
    assert content(index) == {}
    assert active(index).count == 0
    live.merge()
    assert not live.is_large
    options = build_options(index.root.parent, index.root, indexes=index.root)
    assert merge(options, active(index), *encoders()) is None
    assert one(live, put=({"_id": "a", "text": "一"},)).added == 1
    assert content(index) == {"a": ("", "一", {})}


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8"])
def test_metadata_is_replaced_without_encoding_if_the_vectors_are_stored(
    build_version: Builder, index: IndexWriter, factory: str
) -> None:
    build_version(BASE, factory=factory, recall=0.5)
    encoder = BigramEncoder("document")
    live = LiveIndex(index, encoder)
    one(live, patch=(("d0001", {"x": 1}),))
    assert encoder.texts_seen == (factory != "Flat")
    one(live, patch=(("d0001", {"x": 2}),))
    assert encoder.texts_seen == (factory != "Flat")
    segment = opened(index)
    row = segment.documents.find("d0001").start
    text = f"{BASE[1]['title']}\n{BASE[1]['text']}"
    expected_vector = BigramEncoder("document").encode([text]).vectors[0]
    np.testing.assert_allclose(segment.vectors.take(np.array([row]))[0], expected_vector, atol=1e-6)


def test_chunks(build_version: Builder, index: IndexWriter) -> None:
    build_version(BASE, chunking=Chunking(tokens=40, overlap=5))
    live = LiveIndex(index, BigramEncoder("document"))
    long = {"_id": "long", "text": "。".join(f"第{n}句话说明护理" for n in range(20))}
    assert counts(one(live, put=(long,))) == (1, 0, 0, 0)
    assert len(opened(index).documents.find("long")) > 3
    assert counts(one(live, put=(long,))) == (0, 0, 0, 1)
    taken = one(live, put=({"_id": "long#1", "text": "x"},))
    assert [each.code for each in taken.rejected] == ["id_is_a_chunk"]
    assert counts(one(live, patch=(("long", {"a": "b"}),))) == (0, 1, 0, 0)
    rows = opened(index).filters.rows(parse_filter({"a": "b"}))
    assert len(rows) == len(opened(index).documents.find("long"))
    assert counts(one(live, delete=("long",))) == (0, 0, 1, 0)
    assert active(index).count == active(index).corpus.chunks
    assert counts(one(live, put=({"_id": "long#1", "text": "x"},))) == (1, 0, 0, 0)


def test_the_same_files_elsewhere_are_the_same_encoder(
    build_version: Builder, index: IndexWriter
) -> None:
    build_version(make_records(5))
    encoder = BigramEncoder("document")
    encoder.spec = encoder.spec.model_copy(update={"weights": "../w", "tokenizer": "../t"})
    (written,) = LiveIndex(index, encoder).commit(
        [Write("test", put=({"_id": "n", "text": "新"},))]
    )
    assert isinstance(written, Written) and written.added == 1
    encoder.spec = encoder.spec.model_copy(update={"weights_sha256": "1" * 64})
    with raises(EmbeddingSpaceError, "other_encoder", differ=["weights", "weights_sha256"]):
        LiveIndex(index, encoder)
    with raises(EmbeddingSpaceError, "other_encoder", differ=["embedding_space"]):
        LiveIndex(index, BigramEncoder("document", "other-9"))


def test_a_commit_costs_as_the_change(
    live: LiveIndex, index: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(live, put=({"_id": "a", "text": "一"},))
    synced: list[int] = []
    hashed: list[Path] = []
    monkeypatch.setattr("os.fsync", synced.append)
    for module in ("indexer.live.segment", "stores.lexical", "core.verification"):
        real = __import__(module, fromlist=["x"]).sha256_file
        monkeypatch.setattr(
            f"{module}.sha256_file", lambda path, real=real: hashed.append(path) or real(path)
        )
    before = {path.name for path in index.path.iterdir()}
    one(live, put=({"_id": "b", "text": "二"},))
    (new,) = {path.name for path in index.path.iterdir()} - before
    assert all(new in str(path) or "care-tmp" in str(path) for path in hashed)
    size = sum(path.stat().st_size for path in index.version(new).rglob("*") if path.is_file())
    assert size < 8_000
    assert len(synced) == 7


class WritingEncoder(BigramEncoder):
    """Commits writes when it is first used, and then joins segments so many times."""

    def __init__(self, index: IndexWriter, *writes: Write, joins: int = 0) -> None:
        super().__init__("query")
        self._live: LiveIndex | None = LiveIndex(index, BigramEncoder("document"))
        self._writes = writes
        self._joins = joins

    def encode(self, texts: Any) -> Any:
        if live := self._live:
            self._live = None
            results = live.commit(self._writes)
            assert all(isinstance(each, Written) for each in results)
            for _ in range(self._joins):
                assert live.merge()
            assert not self._joins or not live.merge()
        return super().encode(texts)


ADDED = {"_id": "added", "text": "新增", "metadata": {"only": "here"}}
CHANGED = BASE[5] | {"text": "改了"}


@pytest.mark.parametrize("joins", [0, 1])
@pytest.mark.parametrize("command", ["build", "update", "rewrite", "merge"])
def test_what_was_written_during_a_command_stays(
    live: LiveIndex,
    index: IndexWriter,
    tmp_path: Path,
    command: str,
    joins: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if joins:
        monkeypatch.setattr("indexer.live.joining.TIER", 2)
    one(live, put=({"_id": "before", "text": "以前"}, BASE[9] | {"text": "一"}), delete=("d0002",))
    one(live, put=({"_id": "short", "text": "短"},))
    records = {record["_id"]: record for record in [*BASE, ADDED, CHANGED]}
    for id_ in ("d0007", "d0011"):
        del records[id_]
    encoder = WritingEncoder(
        index,
        write(put=(ADDED, CHANGED), delete=("d0007", "short")),
        write(delete=("d0011", "d0010")),
        write(put=(BASE[10],)),
        joins=joins,
    )
    other = {"_id": "other", "text": "另外"}
    corpus = write_jsonl(tmp_path / "new.jsonl", [other, BASE[3] | {"text": "三"}])
    options = build_options(tmp_path, Path("unread"))
    both = BigramEncoder("document"), encoder
    if command == "build":
        whole = write_jsonl(tmp_path / "whole.jsonl", [*BASE, other])
        build(build_options(tmp_path, whole), *both)
        records |= {"other": other}
    elif command == "merge":
        assert merge(options, active(index), *both)
    else:
        changes = Changes(str(corpus), encode_all=command == "rewrite")
        assert update(options, changes, active(index), *both)
        records |= {"other": other, "d0003": BASE[3] | {"text": "三"}}
    if command != "build":
        records |= {"before": {"_id": "before", "text": "以前"}, "d0009": BASE[9] | {"text": "一"}}
        del records["d0002"]
    assert content(index) == expected(records)
    manifest = verify_version(index.version(index.active()))
    assert manifest.count == manifest.corpus.documents == len(records)
    assert manifest.number == max(index.numbers().values())
    prune(index, tmp_path / "builds", keep=0)
    assert content(index) == expected(records)
    merged = merge(options, active(index), *encoders())
    assert merged and merged.filter_fields.get("only") == 1
    assert content(index) == expected(records)


def test_documents_of_several_chunks_are_joined_during_a_build(
    build_version: Builder, index: IndexWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.live.joining.TIER", 2)
    chunking = Chunking(tokens=30, overlap=5)
    build_version(BASE, chunking=chunking)
    old, new = ({"_id": id_, "text": f"{id_}号患者要少吃盐。" * 20} for id_ in ("old", "new"))
    one(LiveIndex(index, BigramEncoder("document")), put=(old,))
    encoder = WritingEncoder(index, write(put=(new,)), joins=1)
    corpus = write_jsonl(tmp_path / "whole.jsonl", BASE)
    build(build_options(tmp_path, corpus, chunking=chunking), BigramEncoder("document"), encoder)
    found = {one.parent for one in opened(index).documents}
    assert found == {record["_id"] for record in [*BASE, new]}
    assert active(index).corpus.documents == len(found)


def test_a_build_of_another_encoder_does_not_lose_what_was_written(
    live: LiveIndex, index: IndexWriter, tmp_path: Path
) -> None:
    encoder = WritingEncoder(index, write(put=(ADDED,)))
    corpus = write_jsonl(tmp_path / "whole.jsonl", BASE)
    options = build_options(tmp_path, corpus, full_text=False)
    with raises(IndexVersionError, "written_meanwhile"):
        build(options, BigramEncoder("document"), encoder)
    assert "added" in content(index)


def test_joining_after_most_documents_were_deleted(live: LiveIndex, index: IndexWriter) -> None:
    for number in range(8):
        one(live, put=({"_id": f"n{number}", "text": f"文字{number}"},))
    one(live, delete=tuple(record["_id"] for record in BASE))
    assert live.merge()
    assert active(index).corpus.documents == 8
    assert one(live, delete=("n0",)).deleted == 1
    assert len(content(index)) == active(index).corpus.documents == 7


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
def test_versions_of_live_writes_are_kept_an_hour_and_a_rollback_skips_them(
    build_version: Builder, index: IndexWriter, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    built = build_version(BASE, factory=factory).version
    live = LiveIndex(index, BigramEncoder("document"))
    for number in range(10):
        one(live, put=({"_id": f"n{number}", "text": f"文字{number}"},))
    before = content(index)
    assert live.merge()
    assert not live.merge()
    assert [entry.count for entry in active(index).segments] == [60, 10]
    assert active(index).corpus.documents == 70
    assert content(index) == before
    assert len(index.versions()) == 12
    monkeypatch.setattr("indexer.live.index.MOST_KEPT", 3)
    live.merge()
    assert len(index.versions()) == 5
    monkeypatch.setattr("indexer.live.index.KEPT", timedelta(0))
    live.merge()
    assert index.versions() == [built, index.active()]
    assert unneeded(index.path.parents[1]) == set()
    assert rollback(index) == built
    assert one(live, put=({"_id": "n0", "text": "文字0"},)).added == 1
    assert len(content(index)) == 61


def test_versions_that_another_command_has_deleted_are_not_deleted_again(
    live: LiveIndex, index: IndexWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        one(live, put=({"_id": f"n{number}", "text": f"文字{number}"},))
    prune(index, tmp_path / "builds", keep=1)
    before = content(index)
    monkeypatch.setattr("indexer.live.index.KEPT", timedelta(0))
    for number in range(3, 6):
        live.merge()
        one(live, put=({"_id": f"n{number}", "text": f"文字{number}"},))
    assert len(index.versions()) == 2
    assert content(index).items() > before.items()
