import base64
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from openai import AuthenticationError, OpenAI, UnprocessableEntityError
from pydantic import SecretStr

from core.manifest import IndexManifest
from core.vectors import truncate_normalize
from tests.conftest import SEARCH_KEY
from tests.encoders import DIMENSION, BigramEncoder
from tests.service.conftest import Serve

TEXTS = ["高血压", "孩子 发烧"]


def embed(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def test_vectors_are_the_query_encoders(client: TestClient) -> None:
    answer = embed(client, input=TEXTS, model="care-mini")
    assert (answer["object"], answer["model"]) == ("list", "care-mini")
    assert [(d["object"], d["index"]) for d in answer["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    vectors = np.array([d["embedding"] for d in answer["data"]], dtype=np.float32)
    np.testing.assert_allclose(vectors, BigramEncoder().encode(TEXTS).vectors, atol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


def test_one_text_needs_no_list(client: TestClient) -> None:
    one, listed = (embed(client, input=value)["data"] for value in (TEXTS[0], [TEXTS[0]]))
    assert one == listed


def test_texts_are_under_the_text_rules(client: TestClient) -> None:
    one, other = (embed(client, input=text)["data"] for text in ("孩子 发烧", " 孩子\n发烧\u200b"))
    assert one == other


@pytest.mark.parametrize("dimensions", [1, 7, DIMENSION])
def test_dimensions_are_cut_and_then_normalized(client: TestClient, dimensions: int) -> None:
    (data,) = embed(client, input=TEXTS[0], dimensions=dimensions)["data"]
    expected = truncate_normalize(BigramEncoder().encode(TEXTS[:1]).vectors, dimensions)[0]
    np.testing.assert_allclose(data["embedding"], expected, atol=1e-6)
    assert np.linalg.norm(data["embedding"]) == pytest.approx(1, abs=1e-6)


def test_base64_holds_the_same_numbers(client: TestClient) -> None:
    (plain,) = embed(client, input=TEXTS[0])["data"]
    (packed,) = embed(client, input=TEXTS[0], encoding_format="base64")["data"]
    vector = np.frombuffer(base64.b64decode(packed["embedding"]), dtype="<f4")
    np.testing.assert_array_equal(vector, np.array(plain["embedding"], dtype=np.float32))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["高血压", " "]}, "input"),
        ({"input": "a" * 2001}, "input"),
        ({"input": ["a"] * 65}, "input"),
        ({"input": "a", "model": "text-embedding-3"}, "model"),
        ({"input": "a", "dimensions": DIMENSION + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be_encoded_is_named(
    client: TestClient, body: dict[str, Any], field: str
) -> None:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"].split(".")[0] == field


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]], [["a"]]])
def test_token_ids_are_one_error_that_says_what_to_set(client: TestClient, ids: Any) -> None:
    """What LangChain's OpenAIEmbeddings sends unless told otherwise."""
    response = client.post("/v1/embeddings", json={"input": ids, "model": "care-mini"})
    assert response.status_code == 422
    (fault,) = response.json()["errors"]
    assert (fault["field"], fault["code"]) == ("input", "token_ids")
    assert "check_embedding_ctx_length=False" in fault["message"]


@pytest.fixture
def openai(client: TestClient) -> OpenAI:
    return OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0
    )


def test_openais_client_gets_vectors_and_models(openai: OpenAI) -> None:
    (model,) = openai.models.list().data
    assert (model.id, model.object) == ("care-mini", "model")
    answer = openai.embeddings.create(model=model.id, input=["发热"] * 64)
    assert len(answer.data) == 64
    expected = BigramEncoder().encode(["发热"]).vectors[0]
    np.testing.assert_allclose(answer.data[63].embedding, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "a", "model": "text-embedding-3"}, "model", "unknown_model"),
        ({"input": ["a"] * 65, "model": "care-mini"}, "input", "batch_too_large"),
        ({"input": [1, 2], "model": "care-mini"}, "input", "token_ids"),
    ],
)
def test_openais_client_shows_what_is_wrong(
    openai: OpenAI, body: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(UnprocessableEntityError) as caught:
        openai.embeddings.create(**body)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    problem = caught.value.response.json()
    assert problem["detail"] in str(caught.value)
    assert problem["error"]["message"] == problem["detail"]
    assert (problem["code"] in (code, "invalid_request")) and problem["status"] == 422


def test_openais_client_is_told_that_its_key_is_wrong(
    serve: Serve, manifest: IndexManifest
) -> None:
    client = serve(api_keys=SecretStr(SEARCH_KEY))
    openai = OpenAI(base_url="http://testserver/v1", api_key="wrong", http_client=client)
    with pytest.raises(AuthenticationError) as caught:
        openai.models.list()
    assert (caught.value.type, caught.value.code) == ("authentication_error", "unauthorized")
    assert openai.with_options(api_key="asks").models.list().data


def test_other_routes_have_no_error_of_openais(client: TestClient) -> None:
    assert "error" not in client.post("/search", json={}).json()
