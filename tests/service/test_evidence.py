from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from search.evidence import asked, best_sentence
from stores.lexical import LexicalIndex
from tests.conftest import Builder
from tests.service.conftest import Serve, post_search

QUERY = "发烧吃什么药"
search = partial(post_search, query=QUERY, evidence=True)


def records(count: int = 20) -> list[dict[str, Any]]:
    """Texts whose second sentence has the words of the query; 𠀀 is two units of UTF-16."""
    return [
        {
            "_id": f"d{i:02}",
            "title": f"第{i}讲",
            "text": f"  𠀀这是第{i}篇。发烧可以吃退烧药{i}，多喝水。\n注意休息。",
            "metadata": {},
        }
        for i in range(count)
    ]


@pytest.fixture
def client(serve: Serve, build_version: Builder) -> TestClient:
    build_version(records())
    return serve()


def test_a_hit_quotes_the_sentence_of_its_text(client: TestClient) -> None:
    for hit in search(client, top_k=5)["hits"]:
        evidence = hit["evidence"]
        assert evidence["text"] == hit["text"][evidence["start"] : evidence["end"]]
        assert evidence["text"].startswith("发烧可以吃退烧药")
    (hit,) = search(client, top_k=1, include=[])["hits"]
    assert hit.keys() == {"id", "score", "rank", "title", "evidence"}


def test_hits_have_no_evidence_unless_asked(client: TestClient) -> None:
    assert "evidence" not in search(client, evidence=False, top_k=1)["hits"][0]


def test_cached_hits_have_the_same_evidence(client: TestClient) -> None:
    first, plain = search(client), search(client, evidence=False)
    again = search(client)
    assert (plain["cached"], again["cached"]) == (False, True)
    assert again["hits"] == first["hits"]
    # Another selection of fields is read from the cached rows.
    fewer = search(client, include=[])
    assert fewer["cached"]
    assert [hit["evidence"] for hit in fewer["hits"]] == [hit["evidence"] for hit in first["hits"]]


def test_each_query_of_a_batch_says_whether_it_wants_evidence(client: TestClient) -> None:
    queries = [{"query": QUERY, "evidence": True}, {"query": QUERY}]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    assert [["evidence" in hit for hit in result["hits"]] for result in results] == [
        [True] * 10,
        [False] * 10,
    ]


def test_many_hits_that_are_read_late_have_evidence(serve: Serve, build_version: Builder) -> None:
    build_version(records(80))
    hits = search(serve(), top_k=80)["hits"]
    assert len(hits) == 80
    assert all(hit["evidence"]["text"].startswith("发烧") for hit in hits)


def test_a_text_without_words_has_no_evidence(serve: Serve, build_version: Builder) -> None:
    build_version([*records(), {"_id": "empty", "title": "发烧吃什么药", "text": "……"}])
    hit = next(hit for hit in search(serve())["hits"] if hit["id"] == "empty")
    assert hit["evidence"] is None


@pytest.mark.parametrize(
    ("weights", "expected", "certain"),
    [
        ({"rest": 1.0, "water": 2.0}, "Drink water.", False),
        ({"rest": 1.0, "water": 3.0}, "Drink water.", True),
        ({"rest": 2.0, "water": 1.0}, "Rest is best.", False),
        ({"cough": 1.0}, "Rest is best.", False),
        ({}, "Rest is best.", False),
    ],
)
def test_of_a_text_that_the_model_does_not_know_the_heaviest_terms_choose(
    weights: dict[str, float], expected: str, certain: bool
) -> None:
    question = asked("", None)._replace(weights=weights)
    found = best_sentence(question, "Rest is best. Drink water.")
    assert found is not None
    assert (found.text, found.certain) == (expected, certain)


def test_the_model_points_out_an_answer_that_has_fewer_words_of_the_question() -> None:
    text = (
        "您好，乙肝大三阳是慢性乙肝的一种。"
        "建议您到正规医院检查肝功能，使用抗病毒药物治疗。"
        "祝您早日康复。"
    )
    found = best_sentence(asked("乙肝大三阳怎么办？", None), text)
    assert found is not None
    assert found.text.startswith("建议")
    assert found.certain
    assert text[found.start : found.end] == found.text


def test_terms_weigh_as_in_the_full_text_of_the_index(serve: Serve, folder: Path) -> None:
    index = serve().app.state.service.catalog.served.index  # type: ignore[attr-defined]
    assert isinstance(index.segment.full_text, LexicalIndex)
    weights = asked("高血压的护理", index.segment.full_text.weight).weights
    assert weights["护理"] < weights["血压"]
    assert asked("高血压的护理", None).weights == dict.fromkeys(weights, 1.0)
