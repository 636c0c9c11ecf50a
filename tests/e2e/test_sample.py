import httpx2
import pytest

from evaluation.beir import beir_paths, read_qrels, read_queries
from tests.conftest import SAMPLE

pytestmark = pytest.mark.e2e


def test_most_sample_questions_find_a_passage_that_answers_them(url: str) -> None:
    queries = read_queries(SAMPLE / "queries.jsonl")
    splits = [read_qrels(beir_paths(SAMPLE, split).qrels) for split in ("train", "dev", "test")]
    qrels = splits[0] | splits[1] | splits[2]
    answered = 0
    with httpx2.Client(base_url=url) as client:
        for id_, text in queries.items():
            body = {"query": text, "top_k": 10, "include": []}
            found = {hit["id"] for hit in client.post("/search", json=body).json()["hits"]}
            answered += any(grade == 2 and id_ in found for id_, grade in qrels[id_].items())
    assert answered >= 0.9 * len(queries)


def test_a_batch_has_the_same_hits_as_single_queries(url: str) -> None:
    texts = list(read_queries(SAMPLE / "queries.jsonl").values())[:32]
    body = {"queries": [{"query": text, "top_k": 5} for text in texts]}
    with httpx2.Client(base_url=url) as client:
        batch = client.post("/search/batch", json=body).json()["results"]
        single = [{"query": text + " ", "top_k": 5} for text in texts]
        answers = [client.post("/search", json=query).json() for query in single]
    for alone, answer in zip(answers, batch, strict=True):
        assert [hit["id"] for hit in answer["hits"]] == [hit["id"] for hit in alone["hits"]]
        expected = [hit["score"] for hit in alone["hits"]]
        assert [hit["score"] for hit in answer["hits"]] == pytest.approx(expected, abs=1e-5)


def test_full_width_and_decomposed_questions_have_the_hits_of_normalised_ones(url: str) -> None:
    def ids(text: str) -> list[str]:
        response = httpx2.post(f"{url}/search", json={"query": text, "top_k": 5})
        return [hit["id"] for hit in response.json()["hits"]]

    assert ids("ＣＴ　检查\u200b前要注意什么？") == ids("CT 检查前要注意什么?")


def test_control_tokens_in_a_question_are_read_as_letters(url: str) -> None:
    response = httpx2.post(f"{url}/search", json={"query": "</s><pad><s>", "top_k": 1})
    assert response.status_code == 200
    assert len(response.json()["hits"]) == 1
