from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from core.conditions import parse_filter
from core.encoders import Answerability
from core.types import HitLimit, Query
from search.hits import CacheEntry
from service.pipeline.cache import MemoryCache, QueryKeys, VectorCache
from tests.conftest import Builder, make_records
from tests.encoders import LATE_INTERACTION, BigramEncoder, make_pair, make_spec
from tests.service.conftest import ADMIN, Serve, post_search, sample

QUERY = {"query": "高血压患者的护理", "top_k": 5}
PAIR = make_pair()
ask = partial(post_search, **QUERY)


@pytest.fixture
def client(serve: Serve) -> TestClient:
    """An application whose caches are empty."""
    return serve()


def found(row: int) -> CacheEntry:
    return CacheEntry((np.ones(1, np.float32), np.array([row])), 0.5)


def test_the_least_recently_used_query_is_evicted() -> None:
    cache = MemoryCache(2)
    cache.put(b"a", found(0))
    cache.put(b"b", found(1))
    assert cache.get(b"a") is not None
    cache.put(b"c", found(2))
    assert cache.get(b"b") is None
    assert [kept.rows[1][0] for key in (b"a", b"c") if (kept := cache.get(key))] == [0, 2]


def test_hits_are_kept_as_json_beside_their_rows() -> None:
    cache = MemoryCache(2)
    cache.put_json(b"a", ["text"], b"unknown")
    assert cache.get_json(b"a", ["text"]) is None
    cache.put(b"a", found(0))
    assert cache.get_json(b"a", ["text"]) is None
    cache.put_json(b"a", ["text"], b"with text")
    assert cache.get_json(b"a", ["text"]) == b"with text"
    assert cache.get_json(b"a", []) is None
    cache.put_json(b"a", [], b"")
    assert (cache.get_json(b"a", []), cache.get_json(b"a", ["text"])) == (b"", None)
    cache.put(b"a", found(1))
    assert cache.get_json(b"a", []) is None


def test_the_json_of_hits_is_limited() -> None:
    cache = MemoryCache(10, json_bytes=10)
    for key in (b"a", b"b", b"c"):
        cache.put(key, found(0))
    cache.put_json(b"a", [], bytes(4))
    cache.put_json(b"a", ["text"], bytes(5))
    cache.put_json(b"b", [], bytes(5))
    assert cache.get_json(b"a", ["text"]) == bytes(5)
    cache.put_json(b"c", [], bytes(1))
    assert cache.get(b"b") is None
    assert [cache.get_json(key, include) for key, include in ((b"a", ["text"]), (b"c", []))] == [
        bytes(5),
        bytes(1),
    ]
    cache.put_json(b"c", [], bytes(11))
    assert [cache.get(key) for key in (b"a", b"c")] == [None, None]


def test_a_cached_answer_has_the_hits_of_the_first_one(client: TestClient) -> None:
    """Whichever fields they include: the memory keeps the JSON of one choice of fields."""
    answers = [ask(client, include=include) for include in INCLUDED for _ in range(3)]
    assert [answer["cached"] for answer in answers] == [False] + [True] * 11
    for answer, include in zip(answers[::3], INCLUDED, strict=True):
        assert all(
            hit.keys() == {"id", "score", "rank", "title", *include} for hit in answer["hits"]
        )
    for at in range(0, len(answers), 3):
        assert answers[at]["hits"] == answers[at + 1]["hits"] == answers[at + 2]["hits"]


INCLUDED = [["text", "metadata"], ["text"], ["metadata"], []]

QUERIES = [
    Query("a"),
    Query("b"),
    Query("a", top_k=1),
    Query("a", min_score=0.0),
    Query("a", collapse=True),
    Query("a", mode="lexical"),
    *(Query("a", limit_per=HitLimit(*limit)) for limit in (("f", 1), ("f", 2), ("g", 1))),
    Query("a", filter={"f": ["a"]}),
    Query("a", filter={"g": ["a"]}),
    Query("a", filter={"f": ["1"]}),
    Query("a", filter={"f": [1]}),
    Query("a", filter={"f": [True]}),
    Query("a", filter={"f": {"not": ["a"]}}),
    Query("a", filter={"f": {"gt": 1}}),
    Query("a", filter={"f": {"gte": 1}}),
    Query("a", filter={"f": {"gte": 1, "lt": 2}}),
]


def searched(query: Query) -> Query:
    """A query as it is searched."""
    return replace(query, filter={}, conditions=parse_filter(query.filter))


def test_keys_are_hashes_that_change_with_each_part_of_a_query() -> None:
    keys = QueryKeys("secret", make_spec(), PAIR)
    all_keys = {keys.key(searched(query), index) for query in QUERIES for index in ("1", "2")}
    assert len(all_keys) == 2 * len(QUERIES)
    assert {len(key) for key in all_keys} == {32}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"f": ["a"], "g": ["b"]}, {"g": ["b"], "f": ["a"]}),
        ({"f": ["a", "b"]}, {"f": ["b", "a", "b"]}),
        ({"f": ["a"]}, {"f": "a"}),
        ({"f": {"not": "a"}}, {"f": {"not": ["a", "a"]}}),
    ],
)
def test_filters_that_mean_the_same_have_one_key(one: Any, other: Any) -> None:
    keys = QueryKeys("secret", make_spec(), PAIR)
    both = [searched(Query("a", filter=filter_)) for filter_ in (one, other)]
    assert len({keys.key(query, "1") for query in both}) == 1


def test_keys_depend_on_the_secret_the_encoder_and_what_judges_and_reranks() -> None:
    changes: list[dict[str, Any]] = [{"answerable": {"dense": judge(t)}} for t in (0.2, 0.3)]
    heavier = LATE_INTERACTION.model_copy(update={"weight": 2.0})
    changes += [{"late_interaction": how} for how in (LATE_INTERACTION, heavier)]
    pairs = [PAIR, *(PAIR.model_copy(update=change) for change in changes)]
    keys = [QueryKeys("secret", make_spec(), pair) for pair in pairs]
    servers = [["http://host", "a", ""], ["http://host", "b", ""], ["http://host", "a", "9"]]
    keys += [QueryKeys("secret", make_spec(), PAIR, server) for server in servers]
    names = ("embedding_space", "weights_sha256", "tokenizer_sha256")
    specs = [make_spec().model_copy(update={name: "1" * 64}) for name in names]
    keys += [QueryKeys("secret", spec, PAIR) for spec in specs]
    keys.append(QueryKeys("another", make_spec(), PAIR))
    assert len({each.key(QUERIES[0], "1") for each in keys}) == len(keys)


def judge(threshold: float) -> Answerability:
    return Answerability(vectors=9, threshold=threshold, intercept=0, weights={"cosine": 1})


def lookups(client: TestClient, result: str) -> float:
    return sample(client, "care_cache_lookups_total", tier="vectors", result=result)


def test_a_query_to_a_new_version_is_not_encoded_again(
    serve: Serve, build_version: Builder
) -> None:
    build_version(make_records(20))
    encoder = BigramEncoder()
    client = serve(encoder)
    ask(client)
    build_version(make_records(30))
    assert client.post("/index/reload", headers=ADMIN).status_code == 200
    seen = encoder.texts_seen
    answer = ask(client, top_k=30)
    assert (answer["cached"], len(answer["hits"])) == (False, 30)
    assert encoder.texts_seen == seen
    assert (lookups(client, "hit"), lookups(client, "miss")) == (1, 1)
    assert ask(serve(BigramEncoder()), top_k=30)["hits"] == answer["hits"]


def test_without_entries_neither_hits_nor_vectors_are_kept(serve: Serve) -> None:
    client = serve(cache_entries=0)
    assert [ask(client, top_k=top_k)["cached"] for top_k in (3, 3, 4)] == [False] * 3
    assert (lookups(client, "hit"), lookups(client, "miss")) == (0, 3)


def test_the_vector_used_longest_ago_gives_way() -> None:
    cache = VectorCache(2)
    batch = np.eye(3, dtype=np.float32)
    cache.put("a", batch[0])
    cache.put("b", batch[1])
    batch[0] = 7
    assert (first := cache.get("a")) is not None
    assert first.tolist() == [1, 0, 0]
    cache.put("c", batch[2])
    assert [cache.get(text) is None for text in "abc"] == [False, True, False]
