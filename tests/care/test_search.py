import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import care
from care.cli.main import main
from core.errors import CareError, EmbeddingSpaceError, IndexVersionError, QueryError
from core.manifest import Chunking
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("test_encoders")


@pytest.fixture
def index(build_version: Builder, indexes: Path, pair_file: Path) -> Iterator[care.SearchIndex]:
    build_version(make_records(60))
    with care.open_index("test", pair=str(pair_file), indexes=indexes) as opened:
        yield opened


BODIES: list[dict[str, Any]] = [
    {"query": "高血压的护理"},
    {"query": "骨折", "top_k": 3},
    {"query": "发热", "top_k": 100, "filter": {"department": ["儿科", "骨科"], "rare": [False]}},
    {"query": "发热", "filter": {"department": "儿科", "tags": {"not": ["组1", "组2"]}}},
    {"query": "咳嗽", "min_score": 0.2},
    {"query": "咳嗽的护理", "evidence": True, "mode": "lexical"},
    {"query": "发热", "limit_per": {"field": "department", "hits": 2}, "evidence": True},
    {"query": " 失眠\u200b  怎么办 ", "top_k": 5, "filter": {"tags": ["组1"]}, "collapse": True},
]


@pytest.mark.parametrize("body", BODIES)
def test_python_and_the_command_return_what_the_service_returns(
    client: TestClient,
    indexes: Path,
    pair_file: Path,
    capsys: pytest.CaptureFixture[str],
    body: dict[str, Any],
) -> None:
    expected = client.post("/search", json=body).json()
    assert expected["hits"]
    with care.open_index("test", pair=str(pair_file), indexes=indexes) as index:
        hits = index.search(**body)
    names = ["rank", "id", "score", "title", "text", "metadata"]
    names += ["evidence"] if body.get("evidence") else []
    found = [{name: asdict(hit)[name] for name in names} for hit in hits]
    assert found == [{name: hit[name] for name in names} for hit in expected["hits"]]
    assert all(hit.keys() == set(names) for hit in expected["hits"])
    arguments = ["search", body["query"], "--index", "test", "--json"]
    arguments += ["--pair", str(pair_file), "--indexes", str(indexes)]
    for option in ("top_k", "min_score", "mode"):
        if option in body:
            arguments += [f"--{option.replace('_', '-')}", str(body[option])]
    for field, values in body.get("filter", {}).items():
        sign, accepted = ("!=", values["not"]) if isinstance(values, dict) else ("=", values)
        for value in accepted if isinstance(accepted, list) else [accepted]:
            arguments += ["--filter", f"{field}{sign}{value if value is not False else 'false'}"]
    arguments += [f"--{flag}" for flag in ("collapse", "evidence") if body.get(flag)]
    if limit := body.get("limit_per"):
        arguments += ["--limit-per", f"{limit['field']}={limit['hits']}"]
    capsys.readouterr()
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hits"] == expected["hits"]
    assert answer["index"] == expected["index"]
    assert answer.keys() == expected.keys()


def test_hits_of_chunks_name_their_documents(
    build_version: Builder, indexes: Path, pair_file: Path, settings: Any
) -> None:
    from core.manifest import Chunking
    from service.app import create_app

    records = [*make_records(5), {"_id": "long", "text": "很长的一段话。" * 50}]
    build_version(records, chunking=Chunking(tokens=70))
    body = {"query": "一段话", "top_k": 4, "collapse": True}
    with TestClient(create_app(settings, BigramEncoder())) as client:
        expected = client.post("/search", json=body).json()["hits"]
    with care.open_index("test", pair=str(pair_file), indexes=indexes) as index:
        assert index.chunked
        hits = index.search("一段话", 4, collapse=True)
    names = ("id", "score", "parent", "chunk", "chunks")
    assert [{name: getattr(hit, name) for name in names} for hit in hits] == [
        {name: hit[name] for name in names} for hit in expected
    ]
    assert hits[0].parent == "long"


def test_passages_are_found_by_their_id_and_by_that_of_their_document(
    build_version: Builder, indexes: Path, pair_file: Path
) -> None:
    text = "".join(f"高血压患者第{i}号的护理要点。" for i in range(20))
    records = [{"_id": "a/b", "text": text, "metadata": {"n": 1}}, {"_id": "short", "text": "骨折"}]
    build_version(records, chunking=Chunking(tokens=40, overlap=10))
    with care.open_index("test", pair=str(pair_file), indexes=indexes) as index:
        split = index.passages("a/b")
        assert [each.id for each in split] == [f"a/b#{i}" for i in range(len(split))]
        assert len(split) > 3 and split == list(index.documents())[: len(split)]
        assert index.passages("a/b#1") == split[1:2]
        assert [each.text for each in index.passages("short")] == ["骨折"]
        for unknown in ("a", "short#0", "", "\ud800"):
            with raises(CareError, "unknown_document", index="test"):
                index.passages(unknown)


def test_many_queries_are_searched_in_order(index: care.SearchIndex) -> None:
    queries = [f"{subject}怎么办" for subject in ("高血压", "骨折", "咳嗽")] * 15
    found = index.search_many(queries, top_k=3)
    assert found == [index.search(query, 3) for query in queries]
    assert index.search_many([]) == []
    with raises(QueryError, "empty_text", field="queries.1.query"):
        index.search_many(["骨折", " "])
    with raises(CareError, "not_a_list", argument="queries"):
        index.search_many("骨折")


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        ({"query": " \u200b"}, "empty_text", "query"),
        ({"query": "长" * 2001}, "text_too_long", "query"),
        ({"query": 3}, "string_type", "query"),
        ({"query": "骨折", "top_k": 0}, "greater_than_equal", "top_k"),
        ({"query": "骨折", "top_k": 1001}, "top_k_too_large", "top_k"),
        ({"query": "骨折", "min_score": 100.5}, "less_than_equal", "min_score"),
        ({"query": "骨折", "filter": {"unknown": ["a"]}}, "unknown_filter_field", "filter.unknown"),
        ({"query": "骨折", "filter": {"rare": []}}, "invalid_filter", "filter.rare"),
        ({"query": "骨折", "filter": {"rare": {"gt": 1}}}, "filter_not_numeric", "filter.rare"),
        ({"query": "骨折", "filter": {"rare": ["a"] * 101}}, "filter_too_large", "filter.rare"),
        (
            {"query": "骨折", "limit_per": {"field": "unknown", "hits": 1}},
            *("unknown_filter_field", "limit_per.field"),
        ),
        (
            {"query": "骨折", "limit_per": {"field": "rare", "hits": 0}},
            *("greater_than_equal", "limit_per.hits"),
        ),
    ],
)
def test_what_the_service_refuses_is_refused_by_the_same_code(
    index: care.SearchIndex,
    client: TestClient,
    arguments: dict[str, Any],
    code: str,
    field: str,
) -> None:
    with raises(QueryError, code, field=field):
        index.search(**arguments)
    (error,) = client.post("/search", json=arguments).json()["errors"]
    assert (error["code"], error["field"]) == (code, field)


def test_an_index_can_be_described(index: care.SearchIndex, indexes: Path) -> None:
    assert (index.name, len(index), index.chunked) == ("test", 60, False)
    assert index.version == (indexes / "test" / "CURRENT").read_text().strip()
    assert index.filter_fields == ["department", "rare", "tags"]
    assert [document.id for document in index.documents()][:2] == ["d0000", "d0001"]


def test_a_closed_index_cannot_be_searched(index: care.SearchIndex) -> None:
    index.close()
    with raises(CareError, "index_closed"):
        index.search("骨折")
    with raises(CareError, "index_closed"):
        index.reload()
    assert repr(index) == "SearchIndex('test', closed)"


def test_an_open_index_takes_another_version_when_it_is_asked_to(
    build_version: Builder, index: care.SearchIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = index.version
    assert not index.reload()
    second = build_version(make_records(61))
    assert (index.version, len(index)) == (first, 60)
    assert repr(index) == f"SearchIndex('test', '{first}', 60 documents)"
    # The encoder is not loaded again.
    monkeypatch.setattr("models.encoders.factory.OnnxEncoder", None)
    assert index.reload()
    assert (index.version, len(index)) == (second.version, 61)
    assert index.search(make_records(61)[60]["text"])[0].id == "d0060"


def test_an_open_index_keeps_its_version_if_the_active_one_is_damaged(
    build_version: Builder, index: care.SearchIndex, indexes: Path
) -> None:
    second = build_version(make_records(61))
    (indexes / "test" / second.version / "documents.arrow").write_bytes(b"")
    with raises(IndexVersionError, "wrong_size"):
        index.reload()
    assert len(index.search("骨折")) == 10


def test_a_hit_is_represented_in_a_line(index: care.SearchIndex) -> None:
    hit = index.search("高血压第0讲", 1)[0]
    assert repr(hit).startswith(
        f"Hit(rank=1, score={hit.score:.3f}, id='d0000', title='高血压第0讲', "
    )
    assert len(repr(replace(hit, text="长" * 1000))) < 150


def test_the_space_is_checked_before_the_encoder_is_downloaded(
    build_version: Builder, indexes: Path
) -> None:
    build_version(make_records(20))
    with raises(EmbeddingSpaceError, "embedding_space_mismatch", encoder_space="bge-m3"):
        care.open_index("test", pair="bge-m3", indexes=indexes)


def test_a_missing_index_is_named(indexes: Path, pair_file: Path) -> None:
    with raises(IndexVersionError, "no_active_version", index="test"):
        care.open_index("test", pair=str(pair_file), indexes=indexes)


def test_the_variables_of_the_service_say_where_indexes_are(
    build_version: Builder, indexes: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(12))
    monkeypatch.setenv("CARE_INDEXES", str(indexes))
    monkeypatch.setenv("CARE_PAIR", str(pair_file))
    with care.open_index("test") as index:
        assert len(index) == 12
