"""Documents written over HTTP to an index in Milvus."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from care.live import LiveIndexes
from care.writer import Writer
from core.analysis import terms
from core.errors import CareError, IndexVersionError
from core.manifest import Chunking
from core.text import document_text
from core.types import Document
from core.versions import IndexFolder, read_manifest
from core.writes import Write, Written
from indexer.build import build
from indexer.live import index as live_index
from indexer.live.creation import create_index
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.state import own_id
from indexer.update import Changes, merge, update
from indexer.versions import prune, rollback
from search.snapshot import load_index
from service.app import create_app
from service.settings import Settings
from stores.lexical import idf
from stores.milvus.names import VERSIONS
from stores.milvus.store import MilvusStore
from stores.milvus.tables import term_shares
from stores.registry import MilvusAddress, VectorStores
from stores.segment import Segment
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import LATE_INTERACTION, BigramEncoder, TokenBigramEncoder
from tests.engines.distributed.conftest import milvus_settings
from tests.engines.distributed.milvus_server import MilvusAt, MilvusServer
from tests.engines.distributed.test_milvus_index import collections, local
from tests.engines.distributed.test_milvus_search import CHUNKING, assert_same, filters, records
from tests.errors import raises
from tests.indexer.builds import build_options
from tests.service.live import running_writer

# What scores of full text differ from those that are computed here, at most.
_SCORE = 5e-6
_DONE = ("added", "replaced", "deleted", "unchanged", "missing", "rejected", "code")


def quick(milvus: MilvusAt) -> VectorStores:
    """Stores whose requests fail soon."""
    return VectorStores(MilvusAddress(milvus.uri, timeout=2))


class Live:
    """Opens index 'test' for writes, as `care.live.LiveIndexes` does, with the test encoder."""

    def __init__(self, indexes: Path, stores: VectorStores) -> None:
        self._index = IndexWriter(indexes, "test", stores)

    def open(self, name: str) -> LiveIndex:
        return LiveIndex(self._index, BigramEncoder("document"))

    def create(self, name: str, like: str, fields: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def delete(self, name: str) -> dict[str, Any]:
        raise NotImplementedError


@contextmanager
def service(folder: Path, settings: Settings, stores: VectorStores) -> Iterator[TestClient]:
    """A service with a writer, whose socket is in a folder."""
    folder.mkdir()
    writer = Writer(Live(settings.indexes, stores), 1 << 20)
    with (
        running_writer(folder, writer) as path,
        local(create_app(settings, BigramEncoder(), writer=path)) as client,
    ):
        yield client


def write(client: TestClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    answer = client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()
    return done


def search(client: TestClient, **question: Any) -> list[dict[str, Any]]:
    answer = client.post("/search", json=question)
    assert answer.status_code == 200, answer.text
    hits: list[dict[str, Any]] = answer.json()["hits"]
    return hits


@dataclass
class Three:
    files: TestClient
    milvus: TestClient
    follower: TestClient  # on another folder


@pytest.fixture(params=[None, CHUNKING], ids=["documents", "chunks"])
def three(
    request: pytest.FixtureRequest, tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> Iterator[Three]:
    chunking: Chunking | None = request.param
    how: dict[str, Any] = {"chunking": chunking, "fusion": {"lexical": 0.1}}
    made = records(200)
    build_version(made, indexes=tmp_path / "files", **how)
    build_version(made, stores=milvus.stores, store="milvus", **how)
    on_files = Settings(
        indexes=tmp_path / "files", index="test", threads=1, cache_entries=0, watch_seconds=0
    )
    ours, other = (
        milvus_settings(tmp_path / name, milvus.uri).model_copy(
            update={"milvus_timeout_ms": 20_000, "timeout_ms": 30_000}
        )
        for name in ("empty", "other")
    )
    with ExitStack() as stack:
        yield Three(
            stack.enter_context(service(tmp_path / "a", on_files, VectorStores())),
            stack.enter_context(service(tmp_path / "b", ours, milvus.stores)),
            stack.enter_context(local(create_app(other, BigramEncoder()))),
        )


def random_write(chance: random.Random, made: list[dict[str, Any]]) -> tuple[str, str, Any]:
    """Returns method, path and body of a write."""
    kind = chance.choice(["put", "put", "put", "patch", "delete", "some", "where"])
    ids = [one["_id"] for one in chance.sample(made, 3)]
    if kind == "put":
        puts = [dict(one) for one in chance.sample(made, chance.randrange(1, 4))]
        for one in puts:
            if chance.random() < 0.6:
                one["_id"] = f"new{chance.randrange(30)}"
            one["text"] += f"复诊第{chance.randrange(90)}次。" * chance.randrange(1, 4)
        return "PUT", "/documents", puts
    if kind == "patch":
        metadata = {"year": chance.randrange(1999, 2009), "department": "新科"}
        return "PATCH", f"/documents/{ids[0]}", {"metadata": metadata}
    if kind == "delete":
        return "DELETE", f"/documents/{ids[0]}", None
    if kind == "some":
        return "POST", "/documents/delete", {"ids": ids}
    where = {"year": chance.randrange(2000, 2009), "tags": ["门诊", "急诊"], "seen": True}
    return "POST", "/documents/delete", {"filter": where}


class Scores:
    """Computes scores of full text by the statistics of a build."""

    def __init__(self, built: Segment) -> None:
        assert built.full_text
        self._text, self._count = built.full_text, built.count
        total = sum(len(terms(document_text(one.title, one.text))) for one in built.documents)
        self._mean = total / built.count
        self._written: set[str] = set()

    def write(self, text: str) -> None:
        """Lets terms of a text be known that no document of the build has."""
        self._written |= set(terms(text))

    def of(self, query: str, hit: dict[str, Any]) -> float:
        weights = {term: self._text.weight(term) for term in terms(query)}
        new = {term for term, weight in weights.items() if not weight} & self._written
        weights |= dict.fromkeys(new, idf(self._count, 1))
        shares = term_shares(Document(hit["id"], hit["text"], hit["title"]), self._mean)
        found = sum(weight * shares.get(term, 0.0) for term, weight in weights.items())
        return found / sum(weights.values())


def test_writes_change_hits_as_in_an_index_in_files(three: Three) -> None:
    chance, made = random.Random(5), records(200)
    app: Any = three.files.app
    scores = Scores(app.state.service.catalog.default.snapshot.segment)
    for number in range(24):
        method, path, body = random_write(chance, made)
        if method == "PUT":
            for one in body:
                scores.write(f"{one['title']} {one['text']}")
        answers = [c.request(method, path, json=body) for c in (three.files, three.milvus)]
        assert answers[0].status_code == answers[1].status_code, answers[1].text
        done = [{name: one.json().get(name) for name in _DONE} for one in answers]
        assert done[0] == done[1]
        if number % 4 == 3:
            write(three.follower, "POST", "/index/reload")
            for client in (three.milvus, three.follower):
                compare(three.files, client, scores, chance)


def compare(files: TestClient, ours: TestClient, scores: Scores, chance: random.Random) -> None:
    """Compares what two services answer."""
    for _ in range(4):
        query = f"发热患者第{chance.randrange(200)}号复诊的要点"
        question = {"query": query, "top_k": chance.choice([3, 10, 50]), "filter": filters(chance)}
        question["collapse"] = chance.random() < 0.5
        expected, found = (search(c, **question, mode="dense") for c in (files, ours))
        assert_same(found, expected, question["collapse"])
        question |= {"top_k": 1000, "query": chance.choice([query, "复诊", "发热"])}
        expected, found = (search(c, **question, mode="lexical") for c in (files, ours))
        assert len(found) == len(expected)
        if not question["collapse"]:  # else the best chunk of a document can be another one
            assert {hit["id"] for hit in found} == {hit["id"] for hit in expected}
        for hit in found:
            assert hit["score"] == pytest.approx(scores.of(question["query"], hit), abs=_SCORE)
    described = [client.get("/index").json() for client in (files, ours)]
    for name in ("count", "documents", "filters", "filter_counts", "filter_field_count"):
        assert described[0][name] == described[1][name], name
    for path in ("/indexes/test/documents?limit=9", "/indexes/test/documents/d0007"):
        listed = [client.get(path).json() for client in (files, ours)]
        for one in listed:
            for name in ("index", "request_id", "next"):
                one.pop(name, None)
        assert listed[0] == listed[1]


def put(live: LiveIndex, id_: str) -> Written | CareError:
    (done,) = live.commit([Write("test", put=({"_id": id_, "text": f"流感患者{id_}的要点。"},))])
    return done


def found(milvus: MilvusAt, folder: Path) -> set[str]:
    """Returns the ids that a service on an empty folder finds."""
    with local(create_app(milvus_settings(folder, milvus.uri), BigramEncoder())) as client:
        return {hit["id"] for hit in search(client, query="流感患者的要点", top_k=100)}


def new_live(milvus: MilvusAt, folder: Path) -> LiveIndex:
    """Opens the index for writes in a folder, where its files are made if they are not there."""
    stores = quick(milvus)
    index = IndexWriter(folder, "test", stores)
    stores.get("milvus").active_version(index)
    return LiveIndex(index, BigramEncoder("document"))


def stopping(
    monkeypatch: pytest.MonkeyPatch, name: str, stop: Callable[[], None], *, before: bool
) -> None:
    """Lets a method of the store, or of its client, stop Milvus before or after it is done."""
    real: Callable[..., Any] = getattr(MilvusStore, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if before:
            stop()
        done = real(*arguments, **named)
        stop()
        return done

    monkeypatch.setattr(MilvusStore, name, call)


@pytest.mark.parametrize("point", ["before the head", "after the head"])
def test_milvus_is_killed_during_a_commit(
    point: str,
    tmp_path: Path,
    build_version: Builder,
    own_milvus: MilvusServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(make_records(20), stores=own_milvus.stores, store="milvus")
    live = new_live(own_milvus, tmp_path / "one")
    assert isinstance(put(live, "first"), Written)
    with monkeypatch.context() as patched:
        if point == "before the head":
            stopping(patched, "_move", own_milvus.kill, before=True)
        else:
            heads = [0]
            real = MilvusStore._head

            def head(store: MilvusStore, index: str) -> Any:
                # The fifth of a commit is read after the head was moved.
                heads[0] += 1
                if heads[0] == 5:
                    own_milvus.kill()
                return real(store, index)

            patched.setattr(MilvusStore, "_head", head)
        failed = put(live, "second")
    assert isinstance(failed, CareError) and failed.code == "store_unavailable"
    own_milvus.start()
    ids = {"first", "second"} if point == "after the head" else {"first"}
    assert found(own_milvus, tmp_path / "two") & {"first", "second"} == ids
    assert isinstance(put(live, "third"), Written)
    assert isinstance(put(live, "second"), Written)  # unchanged, or added
    expected = {"first", "second", "third"}
    assert found(own_milvus, tmp_path / "three") & expected == expected


def test_a_part_that_is_missing_refuses_the_write(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    live = new_live(milvus, tmp_path / "one")
    monkeypatch.setattr("stores.milvus.versions._PART_CHARS", 300)
    client = live._index.stores.get("milvus")._client  # type: ignore[attr-defined]
    real = client.insert
    with monkeypatch.context() as patched:
        patched.setattr(client, "insert", lambda n, rows, **how: real(n, rows[::2], **how))
        failed = put(live, "first")
    assert isinstance(failed, CareError) and failed.code == "store_unavailable"
    assert "first" not in found(milvus, tmp_path / "two")
    assert isinstance(put(live, "second"), Written)
    assert found(milvus, tmp_path / "three") & {"first", "second"} == {"second"}


def test_a_segment_that_is_not_packed_is_found_by_others(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(20), store="milvus", stores=milvus.stores)
    monkeypatch.setattr("indexer.live.segment.MOST_ROWS", 1)
    puts = [{"_id": f"n{number}", "text": f"流感患者{number}的要点。"} for number in range(3)]
    (done,) = new_live(milvus, tmp_path / "one").commit([Write("test", put=tuple(puts))])
    assert isinstance(done, Written) and done.added == 3
    assert list((tmp_path / "one").rglob("vectors.faiss"))
    assert found(milvus, tmp_path / "two") >= {"n0", "n1", "n2"}
    assert isinstance(put(new_live(milvus, tmp_path / "one"), "first"), Written)


def test_a_document_that_milvus_does_not_take_is_rejected(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    large = {"_id": "large", "text": "长" * 22_000}
    metadata = {f"f{n}": list(range(1000)) for n in range(5)}
    many = {"_id": "many", "text": "多", "metadata": metadata}
    write = Write("test", put=(large, many, {"_id": "first", "text": "流感患者的要点。"}))
    (done,) = new_live(milvus, tmp_path / "one").commit([write])
    assert isinstance(done, Written) and done.added == 1
    assert [(one.id, one.code) for one in done.rejected] == [
        ("large", "too_large_for_milvus"),
        ("many", "too_large_for_milvus"),
    ]
    assert found(milvus, tmp_path / "two") >= {"first", "d0003"}


def names(milvus: MilvusAt) -> set[str]:
    with milvus.client() as client:
        client.load_collection(VERSIONS)
        found = client.query(VERSIONS, filter="part == 0", output_fields=["name"])
    return {one["name"] for one in found}


def test_what_a_killed_writer_left_is_deleted_by_the_next(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    live = new_live(milvus, tmp_path / "one")
    before = names(milvus)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MilvusStore, "_move", stop)
        put(live, "first")
    assert len(names(milvus)) == len(before) + 1
    live = new_live(milvus, tmp_path / "two")
    assert names(milvus) == before
    assert isinstance(put(live, "second"), Written)
    assert found(milvus, tmp_path / "three") & {"first", "second"} == {"second"}


def test_of_two_writers_the_first_stops(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    first = new_live(milvus, tmp_path / "one")
    assert isinstance(put(first, "first"), Written)
    second = new_live(milvus, tmp_path / "two")
    assert isinstance(put(second, "second"), Written)
    for _ in range(2):
        failed = put(first, "third")
        assert isinstance(failed, CareError) and failed.code == "other_writer"
        assert not first.merge()
    assert isinstance(put(second, "fourth"), Written)
    expected = {"first", "second", "fourth"}
    assert found(milvus, tmp_path / "three") & {*expected, "third"} == expected


def test_segments_are_joined_and_old_versions_deleted(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    live = new_live(milvus, tmp_path / "one")
    for number in range(9):
        assert isinstance(put(live, f"n{number}"), Written)
    assert live.merge()
    monkeypatch.setattr(live_index, "KEPT", live_index.timedelta(0))
    assert isinstance(put(live, "n9"), Written)
    live.merge()
    expected = {f"n{number}" for number in range(10)}
    assert found(milvus, tmp_path / "two") & expected == expected
    assert len(names(milvus)) == 3  # the base, what was joined, and the last write


def test_a_new_base_takes_over_what_was_written(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    live = new_live(milvus, tmp_path / "one")
    for id_ in ("first", "d0003"):
        assert isinstance(put(live, id_), Written)
    options = build_options(
        tmp_path, tmp_path / "corpus.jsonl", stores=milvus.stores, store="milvus"
    )
    encoders = BigramEncoder("document"), BigramEncoder()
    index = options.index  # in the folder of the build
    manifest = read_manifest(index.version(index.latest()))
    assert len(manifest.segments) == 3
    rebuilt = merge(replace(options, live=True), manifest, *encoders)
    assert rebuilt and not rebuilt.segments and rebuilt.count == 21
    assert isinstance(put(live, "second"), Written)
    expected = {"first", "second", "d0003"}
    assert found(milvus, tmp_path / "two") & expected == expected
    manifest = read_manifest(index.version(index.latest()))
    assert update(options, Changes(delete=["second"]), manifest, *encoders)
    assert found(milvus, tmp_path / "three") & expected == {"first", "d0003"}
    rollback(index)
    assert found(milvus, tmp_path / "four") & expected == expected
    prune(index, tmp_path / "builds", keep=1)
    assert found(milvus, tmp_path / "five") & expected == expected


@pytest.mark.usefixtures("test_encoders")
def test_a_service_builds_its_base_anew(
    tmp_path: Path,
    pair_file: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(make_records(20), stores=milvus.stores, store="milvus")
    settings = milvus_settings(tmp_path / "one", milvus.uri).model_copy(
        update={"pair": str(pair_file), "milvus_timeout_ms": 20_000}
    )
    milvus.stores.get("milvus").active_version(IndexFolder(settings.indexes, "test"))
    indexes = LiveIndexes(settings)
    live = indexes.open("test")
    puts = [{"_id": f"n{number}", "text": f"流感患者{number}的要点。"} for number in range(3)]
    live.commit([Write("test", put=tuple(puts), delete=("d0001",))])
    assert not live.is_large
    monkeypatch.setattr(live_index, "MOST_BESIDE", 4)
    assert live.is_large
    more = Write("test", put=({"_id": "n3", "text": "流感患者居家隔离的要点。"},))
    (refused,) = live.commit([more])
    assert isinstance(refused, CareError) and refused.code == "too_many_changes"
    rebuilt = indexes.rebuild("test")
    assert rebuilt and not rebuilt.segments and rebuilt.count == 22
    (done,) = live.commit([more])
    assert isinstance(done, Written) and not live.is_large
    ids = found(milvus, tmp_path / "two")
    assert {"n0", "n1", "n2", "n3"} < ids and "d0001" not in ids


@pytest.mark.usefixtures("test_encoders")
@pytest.mark.parametrize("chunking", [None, CHUNKING], ids=["documents", "chunks"])
def test_an_index_is_created_without_documents_and_deleted(
    tmp_path: Path,
    pair_file: Path,
    build_version: Builder,
    milvus: MilvusAt,
    chunking: Chunking | None,
) -> None:
    like = build_version(make_records(20), store="milvus", stores=milvus.stores, chunking=chunking)
    settings = milvus_settings(tmp_path / "one", milvus.uri).model_copy(
        update={"pair": str(pair_file), "milvus_timeout_ms": 20_000}
    )
    store = milvus.stores.get("milvus")
    store.fetch(settings.indexes)
    before = collections(milvus), names(milvus)
    indexes = LiveIndexes(settings)
    made = indexes.create("new", "test", ["department"])
    assert made["created"]
    assert indexes.create("new", "test", []) == made | {"created": False}
    elsewhere = IndexWriter(tmp_path / "two", "new", milvus.stores)
    found, created = create_index(elsewhere, like, BigramEncoder("document"))
    assert (found.version, created) == (made["version"], False)
    snapshot = load_index(elsewhere, BigramEncoder(), store)
    assert (snapshot.manifest.count, snapshot.manifest.store) == (0, "milvus")
    assert snapshot.segment.filters.fields == {"department": 0}
    (done,) = indexes.open("new").commit([Write("new", put=tuple(make_records(2)))])
    assert isinstance(done, Written) and done.added == 2
    segment = load_index(elsewhere, BigramEncoder(), store).segment
    assert segment.full_text
    for rows in (
        segment.vectors.search(BigramEncoder().encode(["高血压"]).vectors[0], 10)[1],
        segment.full_text.search("患者", 10)[1],
    ):
        assert {own_id(segment.documents[row]) for row in rows.tolist()} <= {"d0000", "d0001"}
    assert indexes.delete("new") == {"documents": 2}
    assert (collections(milvus), names(milvus)) == before
    store.fetch(tmp_path / "two")
    assert [one.parent.name for one in (tmp_path / "two").glob("*/CURRENT")] == ["test"]
    with raises(IndexVersionError, "no_active_version"):
        indexes.delete("new")
    assert indexes.create("new", "test", [])["created"]
    store.fetch(tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*/CURRENT"))) == 2


def test_token_vectors_of_base_and_segments_are_scored_together(
    tmp_path: Path, milvus: MilvusAt
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(20))
    options = build_options(
        tmp_path,
        corpus,
        stores=milvus.stores,
        token_vectors=LATE_INTERACTION.stored,
        store="milvus",
    )
    encoder = TokenBigramEncoder("document")
    build(options, encoder, BigramEncoder())
    live = LiveIndex(options.index, encoder)
    assert isinstance(put(live, "first"), Written)
    tokens = (
        load_index(
            IndexFolder(tmp_path / "one", "test"), BigramEncoder(), milvus.stores.get("milvus")
        )
    ).segment.tokens
    assert tokens
    query = TokenBigramEncoder().encode_token_vectors(["流感患者first的要点"])[1][0]
    scores = tokens.scores(query, np.arange(21))
    assert scores.argmax() == 20
    assert scores[3] == pytest.approx(tokens.scores(query, np.array([3]))[0])
