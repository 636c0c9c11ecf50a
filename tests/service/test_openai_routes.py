import base64
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient
from openai import OpenAI
from pydantic import SecretStr

from core.encoders import Encoding
from core.vectors import truncate_normalize
from tests.conftest import SEARCH_KEY
from tests.encoders import DIMENSION, BigramEncoder
from tests.service.conftest import BLOCKED, BlockingEncoder, Serve, sample

TEXTS = ["高血压", "孩子 发烧"]


def embed(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def openai_client(client: TestClient, key: str = "none") -> OpenAI:
    """OpenAI's own client, connected to the application."""
    return OpenAI(base_url="http://testserver/v1", api_key=key, http_client=client, max_retries=0)


def test_vectors_are_those_of_the_query_encoder(client: TestClient) -> None:
    answer = embed(client, input=TEXTS, model="care-mini", input_type="query")
    assert (answer["object"], answer["model"]) == ("list", "care-mini")
    assert [(d["object"], d["index"]) for d in answer["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    vectors = np.array([d["embedding"] for d in answer["data"]], dtype=np.float32)
    np.testing.assert_allclose(vectors, BigramEncoder().encode(TEXTS).vectors, atol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


def test_a_single_text_may_be_sent_without_a_list_and_texts_are_normalized(
    client: TestClient,
) -> None:
    one, listed, other = (
        embed(client, input=value)["data"] for value in (TEXTS[1], [TEXTS[1]], " 孩子\n发烧\u200b")
    )
    assert one == listed == other


@pytest.mark.parametrize("dimensions", [1, 7, DIMENSION])
def test_vectors_are_truncated_and_then_normalized(client: TestClient, dimensions: int) -> None:
    (data,) = embed(client, input=TEXTS[0], dimensions=dimensions)["data"]
    expected = truncate_normalize(BigramEncoder().encode(TEXTS[:1]).vectors, dimensions)[0]
    np.testing.assert_allclose(data["embedding"], expected, atol=1e-6)
    assert np.linalg.norm(data["embedding"]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("count", [1, 16, 17, 64, 65, 2048])
def test_openais_client_gets_a_vector_for_each_text_in_order(
    client: TestClient, count: int, encoding_format: Any
) -> None:
    """2048 texts are OpenAI's limit."""
    texts = [f"第{i}问" for i in range(count)]
    answer = openai_client(client).embeddings.create(
        model="care-mini", input=texts, encoding_format=encoding_format
    )
    assert [one.index for one in answer.data] == list(range(count))
    vectors = [
        np.frombuffer(base64.b64decode(one.embedding), "<f4")
        if encoding_format == "base64"
        else one.embedding
        for one in answer.data
    ]
    np.testing.assert_allclose(vectors, BigramEncoder().encode(texts).vectors, atol=1e-6)
    assert answer.usage.total_tokens == sum(map(len, texts))


def test_texts_of_the_greatest_length_are_encoded_too(client: TestClient) -> None:
    """1000 is the batch size of LangChain's `OpenAIEmbeddings`."""
    texts = [f"{i}{'长' * 1000}" for i in range(1000)]
    answer = openai_client(client).embeddings.create(model="care-mini", input=texts)
    assert len(answer.data) == 1000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["高血压", " "]}, "input.1"),
        ({"input": "a" * 2001}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": "text-embedding-3"}, "model"),
        ({"input": "a", "dimensions": DIMENSION + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "input_type": "passage"}, "input_type"),
    ],
)
def test_an_invalid_field_is_named(client: TestClient, body: dict[str, Any], field: str) -> None:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [["a"]]])
def test_token_ids_are_refused_with_the_clients_option_to_send_texts(
    client: TestClient, ids: Any
) -> None:
    """LangChain's `OpenAIEmbeddings` sends token ids by default."""
    response = client.post("/v1/embeddings", json={"input": ids, "model": "care-mini"})
    assert response.status_code == 422
    (fault,) = response.json()["errors"]
    assert (fault["field"], fault["code"]) == ("input", "token_ids")
    assert "check_embedding_ctx_length=False" in fault["message"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "a", "model": "text-embedding-3"}, "model", "unknown_model"),
        ({"input": ["a"] * 65, "model": "care-mini"}, "input", "batch_too_large"),
        ({"input": [1, 2], "model": "care-mini"}, "input", "token_ids"),
        (
            {"input": "a", "model": "care-mini", "extra_body": {"input_type": "document"}},
            "input_type",
            "document_encoder_not_loaded",
        ),
    ],
)
def test_openais_client_shows_what_is_wrong(
    serve: Serve, body: dict[str, Any], param: str, code: str
) -> None:
    client = openai_client(serve(max_embeddings=64))
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.embeddings.create(**body)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == INVALID
    problem = caught.value.response.json()
    assert problem["detail"] in str(caught.value)
    assert problem["error"]["message"] == problem["detail"]
    assert (problem["code"] in (code, "invalid_request")) and problem["status"] == 422


def test_openais_client_finds_the_model(client: TestClient) -> None:
    models = openai_client(client).models
    (model,) = models.list().data
    assert (model.id, model.object) == ("care-mini", "model")
    assert models.retrieve(model.id) == model


def create(client: OpenAI) -> object:
    return client.embeddings.create(model="care-mini", input="发热")


def retrieve_unknown(client: OpenAI) -> object:
    return client.models.retrieve("text-embedding-3-small")


def call_unknown_route(client: OpenAI) -> object:
    return client.chat.completions.create(model="care-mini", messages=[])


def send_text(client: OpenAI) -> object:
    options: Any = {"headers": {"Content-Type": "text/plain"}}
    return client.post("/embeddings", cast_to=object, content=b"{}", options=options)


def wait_a_millisecond(client: OpenAI) -> object:
    headers = {"X-Request-Timeout-Ms": "1"}
    return client.embeddings.create(model="care-mini", input=BLOCKED, extra_headers=headers)


INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("call", "changes", "error", "type_", "code"),
    [
        (
            create,
            {"api_keys": SecretStr(SEARCH_KEY)},
            openai.AuthenticationError,
            "authentication_error",
            "unauthorized",
        ),
        (retrieve_unknown, {}, openai.NotFoundError, INVALID, "model_not_found"),
        (call_unknown_route, {}, openai.NotFoundError, INVALID, "not_found"),
        (create, {"max_body_bytes": 9}, openai.APIStatusError, INVALID, "body_too_long"),
        (send_text, {}, openai.APIStatusError, INVALID, "unsupported_media_type"),
        (
            lambda client: [create(client) for _ in range(2)],
            {"rate_limit": 0.1, "rate_burst": 1},
            openai.RateLimitError,
            "rate_limit_error",
            "rate_limited",
        ),
        (wait_a_millisecond, {}, openai.InternalServerError, "server_error", "deadline_exceeded"),
    ],
)
def test_every_error_has_openais_error_object_beside_the_problem(
    serve: Serve,
    call: Callable[[OpenAI], object],
    changes: dict[str, Any],
    error: type[openai.APIStatusError],
    type_: str,
    code: str,
) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, **changes)
    try:
        with pytest.raises(error) as caught:
            call(openai_client(client))
    finally:
        encoder.release.set()
    assert (caught.value.type, caught.value.code) == (type_, code)
    response = caught.value.response
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["status"], problem["code"]) == (response.status_code, code)
    assert problem["error"]["message"] == problem["detail"]
    assert problem["detail"] in str(caught.value)


def test_a_known_key_is_accepted_from_openais_client(serve: Serve) -> None:
    client = serve(api_keys=SecretStr(SEARCH_KEY))
    assert openai_client(client, "asks").models.list().data


def test_other_routes_have_no_error_object_of_openai(client: TestClient) -> None:
    assert "error" not in client.post("/search", json={}).json()


class StepEncoder(BigramEncoder):
    """Holds each batch with a text that begins with `第` until the test releases a step."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.step = threading.Semaphore(0)

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if any(text.startswith("第") for text in tokens):
            self.entered.release()
            assert self.step.acquire(timeout=30)
        return super().encode_tokens(tokens)


def test_a_search_is_served_between_the_parts_of_a_long_list(serve: Serve) -> None:
    encoder = StepEncoder()
    client = serve(encoder, threads=1, max_batch=4, queue_tokens=100, batch_tokens=10_000)
    with ThreadPoolExecutor(2) as pool:
        embeddings = pool.submit(embed, client, input=[f"第{i}问" for i in range(12)])
        assert encoder.entered.acquire(timeout=30)
        assert sample(client, "care_queue_queries") == 4
        search = pool.submit(client.post, "/search", json={"query": "高血压"})
        while sample(client, "care_queue_queries") < 5:
            assert not search.done()
        encoder.step.release(2)
        assert search.result(timeout=30).status_code == 200
        assert not embeddings.done()
        encoder.step.release()
        assert len(embeddings.result(timeout=30)["data"]) == 12


def test_a_long_list_waits_for_room_in_the_queue(serve: Serve) -> None:
    """The second part finds the queue full of searches, and is encoded after them."""
    encoder = StepEncoder()
    client = serve(encoder, threads=1, max_batch=4, queue_tokens=40, batch_tokens=10_000)
    with ThreadPoolExecutor(3) as pool:
        embeddings = pool.submit(embed, client, input=["第一", "第二", "第三"])
        assert encoder.entered.acquire(timeout=30)
        assert sample(client, "care_queue_tokens") == 8
        search = pool.submit(client.post, "/search", json={"query": "第" * 30})
        while sample(client, "care_queue_tokens") < 40:
            assert not search.done()
        encoder.step.release(10)
        assert search.result(timeout=30).status_code == 200
        assert len(embeddings.result(timeout=30)["data"]) == 3


def test_a_long_list_ends_with_its_deadline(serve: Serve) -> None:
    encoder = StepEncoder()
    client = serve(encoder, threads=1, max_batch=1)
    encoder.step.release()
    try:
        response = client.post(
            "/v1/embeddings",
            json={"input": ["第一", "第二"]},
            headers={"X-Request-Timeout-Ms": "300"},
        )
    finally:
        encoder.step.release(10)
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    while sample(client, "care_queue_tokens"):
        pass


def test_a_long_list_has_the_default_deadline_for_each_part(serve: Serve) -> None:
    encoder = StepEncoder()
    client = serve(encoder, threads=1, max_batch=1, timeout_ms=500)
    threading.Timer(1, encoder.step.release, [20]).start()
    assert len(embed(client, input=[f"第{i}问" for i in range(20)])["data"]) == 20


def test_more_long_lists_than_are_encoded_at_once_are_all_encoded(client: TestClient) -> None:
    texts = [f"第{i}问" for i in range(200)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: embed(client, input=texts)["data"], range(6)))
    assert all(answer == answers[0] for answer in answers)
