"""An index in Milvus: a service without files answers as one that has them."""

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from core.errors import CareError, IndexVersionError
from core.filters import Selection
from core.manifest import Chunking
from core.versions import IndexFolder
from indexer.build import build
from indexer.publication import IndexWriter
from indexer.update import Changes, update
from indexer.versions import activate, prune, rollback
from search.snapshot import load_index
from service.app import create_app
from service.settings import Settings
from stores.milvus.names import VERSIONS, collection_name, table_names
from stores.milvus.segment import MilvusFilters
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import LATE_INTERACTION, BigramEncoder, TokenBigramEncoder
from tests.engines.distributed.conftest import milvus_settings
from tests.engines.distributed.milvus_server import MilvusAt
from tests.engines.distributed.test_milvus_search import (
    CHUNKING,
    COUNT,
    STEPS,
    assert_same,
    filters,
    questions,
    records,
)
from tests.errors import raises
from tests.indexer.builds import build_options


@dataclass
class Both:
    files: TestClient
    milvus: TestClient
    indexes: Path  # of the service that has no files

    def ask(self, method: str, path: str, body: Any = None) -> tuple[Any, Any]:
        """Returns the answers of both, which have the same status."""
        answers = [c.request(method, path, json=body) for c in (self.files, self.milvus)]
        assert answers[0].status_code == answers[1].status_code, answers[1].text
        return answers[0].json(), answers[1].json()


def local(app: Any) -> TestClient:
    """A client that needs no key."""
    return TestClient(
        app, "http://127.0.0.1", raise_server_exceptions=False, client=("127.0.0.1", 50_000)
    )


@pytest.fixture(scope="module", params=[None, CHUNKING], ids=["documents", "chunks"])
def chunking(request: pytest.FixtureRequest) -> Chunking | None:
    return request.param


@pytest.fixture
def both(
    chunking: Chunking | None, tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> Iterator[Both]:
    made = records(COUNT)
    how: dict[str, Any] = {"chunking": chunking, "fusion": {"lexical": 0.1}}
    build_version(made, indexes=tmp_path / "files", **how)
    build_version(made, store="milvus", stores=milvus.stores, **how)
    on_files = Settings(indexes=tmp_path / "files", index="test", threads=1, cache_entries=0)
    empty = tmp_path / "empty"
    patient = {"milvus_timeout_ms": 20_000, "channel_timeout_ms": 20_000, "timeout_ms": 60_000}
    with ExitStack() as stack:
        apps = (on_files, milvus_settings(empty, milvus.uri).model_copy(update=patient))
        clients = [stack.enter_context(local(create_app(s, BigramEncoder()))) for s in apps]
        yield Both(*clients, empty)


def test_a_service_without_files_gives_the_same_answers(both: Both) -> None:
    files = [path.name for path in both.indexes.rglob("*") if path.is_file()]
    assert sorted(files) == ["CURRENT", "manifest.json", "manifest.sha256", "vectors.milvus"]
    chance, found = random.Random(2), 0
    for question in questions(60):
        question |= {
            "mode": chance.choice(["dense", "lexical", "hybrid"]),
            "evidence": chance.random() < 0.3,
        }
        if chance.random() < 0.3 and not question["collapse"]:
            question["limit_per"] = {"field": chance.choice(["year", "tags"]), "hits": 2}
        if chance.random() < 0.3:
            question["query"] = question["query"][:2]  # a short query, of which all words count
        expected, ours = both.ask("POST", "/search", question)
        assert_same(ours["hits"], expected["hits"], question["collapse"])
        found += len(ours["hits"])
    assert found > 500


def test_a_service_without_files_describes_index_and_documents_alike(both: Both) -> None:
    described = both.ask("GET", "/index")
    for one in described:
        del one["version"], one["created_at"]
    assert described[0] == described[1]
    shown = both.ask("GET", "/indexes/test/documents?limit=7")
    for _ in range(3):
        assert shown[0]["documents"] == shown[1]["documents"]
        assert len(shown[0]["documents"]) == 7
        shown = both.ask("GET", f"/indexes/test/documents?limit=7&after={shown[0]['next']}")
    first = both.ask("GET", "/indexes/test/documents/d0008")
    for one in first:
        del one["index"]
    assert first[0] == first[1]
    both.ask("GET", "/indexes/test/documents/unknown")
    refused = both.ask("POST", "/search", {"query": "发热", "filter": {"unknown": 1}})
    assert refused[0]["detail"] == refused[1]["detail"]
    assert both.milvus.get("/health/ready").status_code == 200


def test_what_a_search_reads_is_the_same(
    chunking: Chunking | None, tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    made = records(120)
    made[7]["metadata"]["year"] = 2**63 + 1
    made[8]["metadata"]["year"] = 2**63 + 2
    build_version(made, chunking=chunking, indexes=tmp_path / "files")
    build_version(made, chunking=chunking, store="milvus", stores=milvus.stores)
    opened = [
        load_index(IndexFolder(tmp_path / "files", "test"), BigramEncoder()).segment,
        load_index(
            IndexFolder(tmp_path / "empty", "test"), BigramEncoder(), milvus.stores.get("milvus")
        ).segment,
    ]
    files, ours = (one.documents for one in opened)
    assert list(ours) == list(files)
    rows = np.arange(len(files))[::3]
    assert ours.first_chunks(rows).tolist() == files.first_chunks(rows).tolist()
    seen = opened[0].filters.rows(opened[0].filters.check({"seen": False}))
    for id_ in ("d0007", "d0008", files[3].id, "unknown"):
        for within in (None, seen, np.arange(len(files))):
            assert ours.find(id_, within) == files.find(id_, within), (id_, within)
    ids = ["d0003", "d0110", "unknown"]
    assert ours.find_documents(ids) == files.find_documents(ids)
    with pytest.raises(IndexError):
        ours.read([0, len(files)])
    values, own = (one.filters for one in opened)
    assert own.frequent_values() == values.frequent_values()
    assert own.count_values(rows) == values.count_values(rows)
    assert own.values_within(rows) == values.values_within(rows)
    assert [own.has_numbers(f) for f in own.fields] == [values.has_numbers(f) for f in own.fields]
    chance = random.Random(4)
    asked = [filters(chance) for _ in range(40)]
    asked += [{"year": {"gt": 2**63 + 1}}, {"year": {"gte": 2**63 + 1, "lt": 2**63 + 2}}]
    for filter_ in asked:
        conditions = values.check(filter_)
        expected = values.rows(conditions).tolist()
        assert own.check(filter_) == conditions
        assert own.rows(conditions).tolist() == expected, filter_
        assert own.count(conditions) == len(expected)


def test_a_range_of_more_values_than_a_condition_takes(
    tmp_path: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(records(120), store="milvus", stores=milvus.stores)
    index = load_index(
        IndexFolder(tmp_path / "empty", "test"), BigramEncoder(), milvus.stores.get("milvus")
    )
    filter_ = {"year": {"gt": 2001, "lte": 2007}, "department": {"not": "儿科"}}
    segment = index.segment
    conditions = segment.filters.check(filter_)
    expected = segment.filters.rows(conditions).tolist()
    selection = Selection(segment.filters, conditions)
    assert segment.full_text
    scores = segment.full_text.search("发热患者的要点", 20, selection)
    monkeypatch.setattr("stores.milvus.names._MAX_EXPRESSION_LABELS", 2)
    monkeypatch.setattr("stores.milvus.segment.MAX_LABELS", 2)
    narrow = MilvusFilters(
        segment.filters._rows_table,  # type: ignore[attr-defined]
        segment.filters._values,  # type: ignore[attr-defined]
        segment.filters.fields,
        120,
    )
    assert narrow.rows(conditions).tolist() == expected
    assert narrow.count(conditions) == len(expected)
    found = segment.full_text.search("发热患者的要点", 20, Selection(narrow, conditions))
    np.testing.assert_allclose(found[0], scores[0], atol=STEPS)
    assert set(found[1]) <= set(expected)


def collections(milvus: MilvusAt) -> set[str]:
    with milvus.client() as client:
        return set(client.list_collections()) - {VERSIONS}


def tables(version: str) -> set[str]:
    collection = collection_name("test", version)
    return {collection, *table_names(collection)}


def test_a_service_without_files_follows_new_versions(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    how: dict[str, Any] = {"store": "milvus", "stores": milvus.stores}
    first = build_version(make_records(30), **how).version
    settings = milvus_settings(tmp_path / "empty", milvus.uri)
    app = create_app(settings, BigramEncoder())
    with local(app) as client:
        assert client.get("/index").json()["count"] == 30
        second = build_version(make_records(31), **how).version
        assert client.post("/index/reload").json()["count"] == 31
        index = IndexWriter(tmp_path / "indexes", "test", milvus.stores)
        assert rollback(index) == first
        assert client.post("/index/reload").json()["count"] == 30
        activate(index, second)
        assert prune(index, tmp_path / "builds", keep=1) == [first]
        assert collections(milvus) == tables(second)
        assert client.post("/index/reload").json()["count"] == 31
        body = {"query": "高血压患者", "filter": {}}
        assert client.post("/search", json=body).json()["hits"]
        third = build_version(make_records(32), **how).version
        with milvus.client() as plain:
            plain.drop_collection(collection_name("test", third))
        assert client.post("/index/reload").status_code == 503


def test_an_index_moves_to_milvus_and_back_without_its_corpus(
    tmp_path: Path, milvus: MilvusAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(30))
    options = build_options(tmp_path, corpus, stores=milvus.stores)
    encoders = BigramEncoder("document"), BigramEncoder()
    base, _ = build(options, *encoders)
    Path(corpus).unlink()
    shutil.rmtree(options.builds)
    # Nothing is encoded but canaries and first sentences, as queries.
    monkeypatch.setattr(encoders[0], "encode_tokens", None)
    found = []
    for settings in (replace(options, store="milvus"), options):
        updated = update(settings, Changes(), base, *encoders)
        assert updated
        base = updated[0]
        assert base.store == settings.store
        segment = load_index(
            IndexFolder(options.indexes, "test"), BigramEncoder(), milvus.stores.get(base.store)
        ).segment
        found.append(segment.vectors.search(BigramEncoder().encode(["高血压"]).vectors[0], 10)[1])
    assert found[0].tolist() == found[1].tolist()


def test_an_index_that_is_not_the_default_one_is_found(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    how: dict[str, Any] = {"store": "milvus", "stores": milvus.stores}
    build_version(make_records(30), **how)
    build_version(make_records(20), name="other", **how)
    settings = milvus_settings(tmp_path / "empty", milvus.uri)
    with local(create_app(settings, BigramEncoder())) as client:
        answer = client.post("/indexes/other/search", json={"query": "高血压患者"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["index"]["name"] == "other"


def test_token_vectors_are_read_from_milvus(tmp_path: Path, milvus: MilvusAt) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(30))
    options = build_options(tmp_path, corpus, token_vectors=LATE_INTERACTION.stored)
    in_milvus = replace(options, store="milvus", stores=milvus.stores)
    encoders = TokenBigramEncoder("document"), BigramEncoder()
    build(replace(options, indexes=tmp_path / "files"), *encoders)
    build(in_milvus, *encoders)
    files, ours = (
        load_index(IndexFolder(tmp_path / folder, "test"), BigramEncoder(), store).segment.tokens
        for folder, store in (("files", None), ("empty", milvus.stores.get("milvus")))
    )
    assert files and ours
    rows, query = np.array([3, 29, 0]), TokenBigramEncoder().encode_token_vectors(["高血压"])[1][0]
    assert np.array_equal(ours.row(3), files.row(3))
    assert np.array_equal(ours.scores(query, rows), files.scores(query, rows))
    assert ours.scores(query, rows[:0]).tolist() == []


def test_what_is_not_complete_is_an_error(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    how: dict[str, Any] = {"store": "milvus", "stores": milvus.stores}
    version = build_version(make_records(30), **how).version
    rows, _, values = table_names(collection_name("test", version))

    def load(folder: str) -> None:
        store = milvus.stores.get("milvus")
        load_index(IndexFolder(tmp_path / folder, "test"), BigramEncoder(), store)

    load("first")
    with milvus.client() as client:
        client.delete(rows, filter="row == 29")
        with raises(IndexVersionError, "wrong_document_count"):
            load("first")
        (part,) = client.query(VERSIONS, filter="part == 0", output_fields=["*"])
        foreign = part["text"].replace(version, f"../{version[3:]}")
        client.upsert(VERSIONS, [part | {"text": foreign}])
        with raises(IndexVersionError, "unreadable_version"):
            load("second")
        client.delete(VERSIONS, filter="part == 0")
        with raises(IndexVersionError, "manifest_missing"):
            load("second")
        client.drop_collection(values)
        with raises(IndexVersionError, "vectors_missing"):
            load("first")


def test_a_text_that_milvus_does_not_take_leaves_the_last_version(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    how: dict[str, Any] = {"store": "milvus", "stores": milvus.stores}
    version = build_version(make_records(10), **how).version
    made = make_records(11)
    made[10]["text"] = "长" * 22_000
    with raises(CareError, "too_large_for_milvus", field="text", limit=65_535):
        build_version(made, **how)
    assert collections(milvus) == tables(version)
    assert IndexFolder(tmp_path / "indexes", "test").active() == version
