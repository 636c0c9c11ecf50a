"""The search for vectors in Milvus."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from core.errors import IndexVersionError
from core.filters import Selection
from core.manifest import Chunking
from core.versions import IndexFolder
from search.snapshot import Snapshot, load_index
from service.app import create_app
from service.settings import Settings
from tests.conftest import DEPARTMENTS, SUBJECTS, Builder
from tests.encoders import BigramEncoder
from tests.engines.distributed.conftest import milvus_settings
from tests.engines.distributed.milvus_server import MilvusAt
from tests.errors import raises

COUNT = 400
CHUNKING = Chunking(tokens=40, overlap=10)
Hit = dict[str, Any]


def records(count: int) -> list[dict[str, Any]]:
    """Documents of one to nine sentences with filter values of all types."""
    chance = random.Random(1)
    return [
        {
            "_id": f"d{i:04d}",
            "title": f"{SUBJECTS[i % len(SUBJECTS)]}第{i}讲",
            "text": "".join(
                f"{SUBJECTS[(i + j) % len(SUBJECTS)]}患者第{i}号的要点{i * 7919 % 10007 + j}。"
                for j in range(1 + i % 9)
            ),
            "metadata": {
                "department": DEPARTMENTS[i % len(DEPARTMENTS)],
                "year": 2000 + i % 9,
                "seen": i % 7 == 0,
                "mixed": [1, "1", True, "a\"b'\\", [i % 2], None, 1.5][i % 7],
                "tags": chance.sample(["门诊", "急诊", "住院", "1", "0"], chance.randrange(5)),
            },
        }
        for i in range(count)
    ]


def filters(chance: random.Random) -> dict[str, Any]:
    values = {
        "department": [*DEPARTMENTS, "无此科"],
        "year": list(range(1999, 2010)),
        "seen": [True, False],
        "mixed": [1, "1", True, False, "a\"b'\\", 0],
        "tags": ["门诊", "急诊", "住院", "1", "0"],
    }
    fields = chance.sample(sorted(values), chance.randrange(4))

    def condition(field: str) -> Any:
        chosen = chance.sample(values[field], chance.randrange(1, 3))
        if field == "year" and chance.random() < 0.5:
            return {"gte": chosen[0], "lt": chosen[0] + 4.5}
        return chance.choice([chosen, chosen[0], {"not": chosen}])

    return {field: condition(field) for field in fields}


def questions(number: int) -> list[dict[str, Any]]:
    chance = random.Random(number)
    return [
        {
            "query": f"{chance.choice(SUBJECTS)}患者第{chance.randrange(COUNT)}号的要点",
            "top_k": chance.choice([1, 3, 10, 50, COUNT]),
            "filter": filters(chance),
            "min_score": chance.choice([None, None, 0.2, 0.5]),
            "collapse": chance.random() < 0.5,
        }
        for _ in range(number)
    ]


# Scores of the two stores may differ in the last bits, so that rounding makes them a step apart.
STEPS = 2e-6


def by_document(hits: list[Hit], collapse: bool) -> dict[str, Hit]:
    """Returns hits without what may differ, by document if they are collapsed, else by id."""
    found: dict[str, Hit] = {}
    for hit in hits:
        # If the best chunks of a document have equal scores, either may be found.
        parent = hit.get("parent") if collapse else None
        hidden = {"score", "rank"} | ({"id", "text", "chunk"} if parent else set())
        found[parent or hit["id"]] = {name: hit[name] for name in hit.keys() - hidden}
    return found


def assert_same(ours: list[Hit], expected: list[Hit], collapse: bool) -> None:
    assert [hit["rank"] for hit in ours] == list(range(1, len(expected) + 1))
    scores = [hit["score"] for hit in ours]
    np.testing.assert_allclose(scores, [hit["score"] for hit in expected], atol=STEPS)
    order = [(hit["score"], hit["id"]) for hit in ours]
    assert order == sorted(order, reverse=True)
    for one, other in [(ours, expected), (expected, ours)]:
        # Hits with about the score of the last one may be others.
        sure = [hit for hit in one if hit["score"] > scores[-1] + STEPS]
        assert by_document(sure, collapse).items() <= by_document(other, collapse).items()


def load(tmp_path: Path, milvus: MilvusAt) -> Snapshot:
    settings = milvus_settings(tmp_path / "indexes", milvus.uri)
    return load_index(
        IndexFolder(settings.indexes, "test"),
        BigramEncoder(),
        milvus.stores.get("milvus"),
    )


def selected(index: Snapshot, filter_: dict[str, Any]) -> Selection:
    filters = index.segment.filters
    return Selection(filters, filters.check(filter_))


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
def test_a_filter_loses_no_hits(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, factory: str
) -> None:
    made = records(600)
    build_version(made, store="milvus", stores=milvus.stores, factory=factory, recall=0.5)
    index = load(tmp_path, milvus)
    for text in ("发热患者第3号", "头痛", "贫血患者的要点"):
        query = BigramEncoder().encode([text]).vectors[0]
        for filter_ in ({"seen": [True]}, {"tags": ["1"]}, {"year": [2001, 2005]}):
            rows = selected(index, filter_).rows()
            scores, found = index.segment.vectors.search(query, len(rows), selected(index, filter_))
            assert sorted(found) == rows.tolist()
            assert (np.diff(scores) <= 0).all()
            documents = index.segment.documents.read(found.tolist())
            texts = [f"{document.title}\n{document.text}" for document in documents]
            vectors = BigramEncoder("document").encode(texts).vectors
            np.testing.assert_allclose(scores, vectors @ query, atol=2e-6)


def test_more_hits_than_milvus_returns_are_compared_in_this_process(
    tmp_path: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(records(COUNT), store="milvus", stores=milvus.stores)
    index = load(tmp_path, milvus)
    query = BigramEncoder().encode(["发热患者第3号"]).vectors[0]
    filter_ = {"department": ["儿科"]}
    rows = selected(index, filter_).rows()
    expected = [
        index.segment.vectors.search(query, 50),
        index.segment.vectors.search(query, 50, selected(index, filter_)),
    ]
    monkeypatch.setattr("stores.milvus.vectors.MAX_HITS", 49)
    monkeypatch.setattr("stores.milvus.vectors._READ_ROWS", 30)
    ours = [
        index.segment.vectors.search(query, 50),
        index.segment.vectors.search(query, 50, Selection.of_rows(rows)),
    ]
    for (scores, _), (expected_scores, _) in zip(ours, expected, strict=True):
        np.testing.assert_allclose(scores, expected_scores, atol=2e-6)
    assert set(ours[1][1]) <= set(rows)


def test_a_range_of_too_many_values_for_an_expression_loses_no_hits(
    tmp_path: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(records(COUNT), store="milvus", stores=milvus.stores)
    index = load(tmp_path, milvus)
    query = BigramEncoder().encode(["发热患者第3号"]).vectors[0]
    filter_ = {"year": {"gt": 2001, "lte": 2007}, "department": {"not": "儿科"}}
    rows = selected(index, filter_).rows()
    depths = (1, 10, len(rows))
    expected = [index.segment.vectors.search(query, k, selected(index, filter_))[0] for k in depths]
    monkeypatch.setattr("stores.milvus.names._MAX_EXPRESSION_LABELS", 2)
    for k, scores in zip(depths, expected, strict=True):
        ours, found = index.segment.vectors.search(query, k, selected(index, filter_))
        assert set(found) <= set(rows)
        np.testing.assert_allclose(ours, scores, atol=2e-6)


def test_the_comparison_of_all_matching_rows_ends_at_the_check(
    tmp_path: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(records(COUNT), store="milvus", stores=milvus.stores)
    index = load(tmp_path, milvus)
    monkeypatch.setattr("stores.milvus.vectors.MAX_HITS", 1)
    monkeypatch.setattr("stores.milvus.vectors._READ_ROWS", 30)
    checks = iter(range(3))

    def check() -> None:
        if next(checks, None) is None:
            raise TimeoutError

    query = BigramEncoder().encode(["发热"]).vectors[0]
    with pytest.raises(TimeoutError):
        index.segment.vectors.search(query, 50, check=check)
    assert len(index.segment.vectors.search(query, 50)[0]) == 50


def test_more_rows_than_are_read_give_what_milvus_finds(
    tmp_path: Path,
    build_version: Builder,
    milvus: MilvusAt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_version(records(COUNT), store="milvus", stores=milvus.stores)
    index = load(tmp_path, milvus)
    query = BigramEncoder().encode(["发热患者第3号"]).vectors[0]
    filter_ = {"department": ["儿科"]}
    rows = selected(index, filter_).rows()
    cases = [None, selected(index, filter_), Selection.of_rows(rows)]
    expected = [index.segment.vectors.search(query, COUNT, case) for case in cases]
    monkeypatch.setattr("stores.milvus.vectors.MAX_HITS", 60)
    monkeypatch.setattr("stores.milvus.vectors._MOST_READ", len(rows) - 1)
    monkeypatch.setattr(type(index.segment.vectors), "_read", None)
    for case, (scores, found) in zip(cases, expected, strict=True):
        ours, own = index.segment.vectors.search(query, COUNT, case)
        # Of rows without a filter, those among the 60 nearest of all.
        assert len(own) == 60 or (case is cases[-1] and 0 < len(own) < 60)
        np.testing.assert_allclose(ours, scores[: len(own)], atol=STEPS)
        assert set(own) <= set(found)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
def test_a_shorter_list_is_the_beginning_of_a_longer_one(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt, factory: str
) -> None:
    made = records(COUNT)
    # 60 documents with the same vector, more than one list of candidates has.
    made += [{**made[3], "_id": f"t{i:02d}"} for i in range(60)]
    build_version(made, store="milvus", stores=milvus.stores, factory=factory, recall=0.5)
    settings = milvus_settings(tmp_path / "indexes", milvus.uri)
    with TestClient(create_app(settings, BigramEncoder())) as client:
        for filter_ in ({}, {"year": [2003, 2005]}, {"seen": {"not": True}}):

            def ids(top_k: int, filter_: dict[str, Any] = filter_) -> list[str]:
                body = {"query": "头痛患者第3号的要点", "top_k": top_k, "filter": filter_}
                return [hit["id"] for hit in client.post("/search", json=body).json()["hits"]]

            longest = ids(50)
            assert len(longest) == 50
            assert [ids(k) for k in (1, 2, 10, 49)] == [longest[:k] for k in (1, 2, 10, 49)]
            tied = [id_ for id_ in longest if id_.startswith("t")]
            assert tied == [f"t{i:02d}" for i in range(59, 59 - len(tied), -1)]
            assert tied


def test_values_without_documents_give_no_hits(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    build_version(records(COUNT), store="milvus", stores=milvus.stores)
    settings = milvus_settings(tmp_path / "indexes", milvus.uri)
    with TestClient(create_app(settings, BigramEncoder())) as client:
        for filter_ in ({"year": [1]}, {"seen": [True], "year": [1]}):
            answer = client.post("/search", json={"query": "发热", "filter": filter_})
            assert (answer.status_code, answer.json()["hits"]) == (200, [])


def test_a_version_of_the_other_store_is_an_error(
    tmp_path: Path, build_version: Builder, milvus: MilvusAt
) -> None:
    build_version(records(60), store="milvus", stores=milvus.stores)
    settings = Settings(indexes=tmp_path / "indexes", index="test")
    with raises(IndexVersionError, "wrong_store"):
        load_index(IndexFolder(settings.indexes, "test"), BigramEncoder())
