import base64
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from core.vectors import truncate_normalize
from tests.encoders import DIMENSION, BigramEncoder

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
        ({"input": [1, 2]}, "input"),
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
