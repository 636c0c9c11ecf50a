"""The score that says whether an index seems to answer a query, in the service and in Python."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

import care
from care.cli.main import main
from core.encoders import Answerability
from core.errors import PairError
from core.manifest import IndexManifest
from models.pairs import load_pair, write_pair
from search.answerable import answerable, is_unanswered, measure
from service.settings import Settings
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.service.conftest import BlockingEncoder, Serve, post_search, sample
from tests.service.test_pipeline import blocked

QUERY, OTHER = "高血压患者的护理", "xyzzy plugh"
JUDGE = Answerability(vectors=60, threshold=0.5, intercept=-2, weights={"cosine": 4})
BOTH = Answerability(vectors=60, threshold=0.5, intercept=-2, weights={"cosine": 2, "lexical": 1})
COUNTER = "care_unanswered_queries_total"
search = partial(post_search, query=QUERY, mode="dense")


def rows(*found: tuple[float, int]) -> Any:
    return np.array([s for s, _ in found], np.float32), np.array([r for _, r in found], np.int64)


@pytest.fixture
def judged(tmp_path: Path, pair_file: Path) -> Path:
    path = tmp_path / "judged.toml"
    judges = {"dense": JUDGE, "hybrid": BOTH}
    write_pair(load_pair(str(pair_file)).model_copy(update={"answerable": judges}), path)
    return path


@pytest.fixture
def client(serve: Serve, manifest: IndexManifest, judged: Path) -> TestClient:
    return serve(pair=str(judged))


def test_features_are_the_nearest_cosine_and_what_the_nearest_rows_say_of_the_query() -> None:
    dense = rows(*((0.9 - i / 100, i) for i in range(12)))
    # Row 11 is not among the ten nearest, and row 50 is not near at all.
    lexical = rows((0.8, 50), (0.7, 11), (0.5, 9), (0.2, 0))
    features = measure(QUERY, 60, dense, lexical, idf=20.0)
    alone = {"cosine": 0.9, "length": math.log(8), "size": math.log(60)}
    # Of the ten nearest rows two have 0.5 and 0.2 of the query.
    expected = {"lexical": math.log1p(10), "overlap": math.log1p(1.4), "idf": math.log1p(20)}
    assert features == pytest.approx(alone | expected)
    assert measure(QUERY, 60, dense, rows((0.8, 50)), 20.0)["lexical"] == 0
    assert measure(QUERY, 60, dense, rows(), 20.0)["lexical"] == 0
    assert measure(QUERY, 60, dense) == pytest.approx(alone)


def test_the_score_is_a_logistic_regression_and_never_overflows() -> None:
    assert answerable(JUDGE, {"cosine": 0.75}) == pytest.approx(1 / (1 + math.exp(-1)))
    steep = JUDGE.model_copy(update={"weights": {"cosine": 1e6}})
    assert 0 < answerable(steep, {"cosine": -1.0}) < 1e-9
    assert 1 - 1e-9 < answerable(steep, {"cosine": 1.0}) <= 1
    assert is_unanswered({"dense": JUDGE}, "dense", 0.49)
    assert not is_unanswered({"dense": JUDGE}, "dense", 0.5)
    assert not is_unanswered({"dense": JUDGE}, "dense", None)


def test_the_dense_score_is_that_of_the_nearest_document(client: TestClient) -> None:
    answer = search(client)
    best = answer["hits"][0]["score"]
    assert answer["answerable"] == pytest.approx(1 / (1 + math.exp(2 - 4 * best)))


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
def test_the_score_depends_on_neither_top_k_nor_min_score(client: TestClient, mode: str) -> None:
    score = search(client, mode=mode)["answerable"]
    assert 0 < score < 1
    limit = {"limit_per": {"field": "department", "hits": 1}}
    for changes in ({"top_k": 1}, {"top_k": 60}, {"min_score": 1.9}, {"explain": True}, limit):
        assert search(client, mode=mode, **changes)["answerable"] == pytest.approx(score, abs=1e-6)


def test_a_hybrid_search_judges_by_full_text_as_well(client: TestClient) -> None:
    answers = {query: search(client, mode="hybrid", query=query) for query in (QUERY, OTHER)}
    thresholds = client.get("/index").json()["answerable_thresholds"]
    assert thresholds == {"dense": 0.5, "hybrid": 0.5}
    assert answers[OTHER]["answerable"] < 0.5 < answers[QUERY]["answerable"]
    best = answers[OTHER]["hits"][0]["score"]  # the query shares no term with a document
    assert answers[OTHER]["answerable"] == pytest.approx(1 / (1 + math.exp(2 - 2 * best)))


def test_cached_answers_have_the_score_and_are_counted(client: TestClient) -> None:
    first = search(client, query=OTHER, mode="hybrid")
    second = search(client, query=OTHER, mode="hybrid")  # from the JSON of the memory cache
    third = search(client, query=OTHER, mode="hybrid", include=[])  # from its rows
    assert [answer["cached"] for answer in (first, second, third)] == [False, True, True]
    assert first["answerable"] == second["answerable"] == third["answerable"]
    assert sample(client, COUNTER) == 3
    search(client, mode="hybrid")
    assert sample(client, COUNTER) == 3


def test_a_batch_has_a_score_for_each_query(client: TestClient) -> None:
    queries = [{"query": QUERY, "mode": mode} for mode in ("dense", "hybrid", "lexical")]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    alone = [search(client, mode=mode)["answerable"] for mode in ("dense", "hybrid", "lexical")]
    assert [result["answerable"] for result in results] == pytest.approx(alone, abs=1e-6)


def test_there_is_no_score_where_it_cannot_be_computed(client: TestClient) -> None:
    assert search(client, mode="lexical")["answerable"] is None
    nothing = search(client, filter={"department": "儿科", "rare": ["x"]})
    assert (nothing["hits"], nothing["answerable"]) == ([], None)


def test_a_pair_without_calibration_gives_no_score(serve: Serve, pair_file: Path) -> None:
    client = serve(pair=str(pair_file))
    assert search(client)["answerable"] is None
    assert client.get("/index").json()["answerable_thresholds"] == {}


def test_a_judge_of_an_index_of_another_size_is_not_used(serve: Serve, judged: Path) -> None:
    pair = load_pair(str(judged))
    assert pair.answerable == {"dense": JUDGE, "hybrid": BOTH}
    judges = {
        "dense": JUDGE.model_copy(update={"vectors": (61, 6010)}),
        "hybrid": BOTH.model_copy(update={"vectors": (60, 6000)}),
    }
    write_pair(pair.model_copy(update={"answerable": judges}), judged)
    client = serve(pair=str(judged))
    assert client.get("/index").json()["answerable_thresholds"] == {"hybrid": 0.5}
    assert search(client)["answerable"] is None
    assert search(client, mode="hybrid")["answerable"] is not None


def test_vectors_of_the_overflow_pair_are_not_judged(serve: Serve, judged: Path) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, BigramEncoder(), pair=str(judged), queue_tokens=8)
    with blocked(client, encoder):
        busy = search(client)
        assert (busy["overflow"], busy["answerable"]) == (True, None)
    assert search(client)["answerable"] is not None


def test_python_and_the_command_return_the_score_of_the_service(
    client: TestClient,
    settings: Settings,
    judged: Path,
    test_encoders: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with care.open_index("test", pair=str(judged), indexes=settings.indexes) as index:
        for query in (QUERY, OTHER):
            hits = index.search(query, mode="hybrid")
            expected = search(client, query=query, mode="hybrid")
            assert (hits.mode, hits.threshold) == ("hybrid", 0.5)
            assert hits.answerable == pytest.approx(expected["answerable"], abs=1e-6)
            assert hits.unanswered == (query == OTHER)
        assert not index.search(OTHER, mode="lexical").unanswered
    where = ["--index", "test", "--pair", str(judged), "--indexes", str(settings.indexes)]
    lengths = {}
    for query in (QUERY, OTHER):
        assert main(["search", query, "--mode", "hybrid", "--top-k", "1", *where]) == 0
        lengths[query] = len(capsys.readouterr().out.splitlines())
    assert lengths[OTHER] == lengths[QUERY] + 1
    assert main(["search", OTHER, "--mode", "hybrid", "--json", *where]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answerable"] == pytest.approx(expected["answerable"], abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "threshold", "feature"),
    [
        ("dense", 0.5, "idf"),
        ("lexical", 0.5, "cosine"),
        ("dense", 0.5, "lexical"),
        ("dense", 1.5, "cosine"),
        ("dense", 0.5, "top"),
    ],
)
def test_a_calibration_that_no_search_can_use_is_an_error(
    pair_file: Path, mode: str, threshold: float, feature: str
) -> None:
    table = f"[answerable.{mode}]\nvectors = 9\nthreshold = {threshold}\nintercept = 0\n"
    weights = f"[answerable.{mode}.weights]\n{feature} = 1\n"
    pair_file.write_text(f"{pair_file.read_text()}\n{table}{weights}")
    with raises(PairError, "bad_field"):
        load_pair(str(pair_file))


def test_one_number_of_an_older_release_means_a_tenth_to_ten_times_as_many() -> None:
    assert (JUDGE.vectors, Answerability.model_validate(JUDGE.model_dump())) == ((6, 600), JUDGE)
    larger = Answerability.model_validate(JUDGE.model_dump() | {"vectors": 14_955})
    assert larger.vectors == (1496, 149_550)
