import json
import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from care.cli.main import main
from core.encoders import Encoder
from core.errors import CareError, EmbeddingServerError, TextRejectedError, VectorError
from core.manifest import Chunking
from core.retries import RetryPolicy
from core.service_process import running_service
from core.types import Document
from indexer.chunking import Chunker
from models.encoders.factory import EncoderOptions, document_encoder
from models.encoders.onnx import OnnxEncoder
from models.encoders.openai import OpenAIEncoder
from models.pairs import REGISTRY, load_pair
from tests.conftest import make_records, write_jsonl
from tests.errors import raises
from tests.indexer.builds import only_folder
from tests.models.encoders.embedding_server import (
    NATIVE,
    SPEC,
    Answer,
    FakeServer,
    Handler,
    expected,
    hang_up,
    item,
    items,
    plain,
    status,
)

pytestmark = pytest.mark.e2e

KEY = "sk-very-secret"
TEXTS = [f"病历{i}" for i in range(10)]


def connect(server: FakeServer, **options: Any) -> OpenAIEncoder:
    return OpenAIEncoder(SPEC, server.url, **({"retries": RetryPolicy(backoff=0.01)} | options))


def whole(error: BaseException) -> str:
    """Returns the full traceback of the error."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("form", ["base64", "float"])
def test_native_vectors_are_truncated_then_normalised(server: FakeServer, form: str) -> None:
    server.answer = lambda handler, body: handler.send_items(items(body, form))
    encoding = connect(server).encode(TEXTS)
    assert encoding.vectors.dtype == np.float32
    assert encoding.vectors.shape == (len(TEXTS), SPEC.dimension)
    np.testing.assert_allclose(encoding.vectors, expected(TEXTS), atol=1e-6)
    assert encoding.truncated.tolist() == [False] * len(TEXTS)


def test_a_request_has_the_model_and_the_texts_with_the_prompt(
    server: FakeServer,
) -> None:
    encoder = connect(server, concurrency=1)
    server.script()
    encoder.encode(TEXTS)
    assert server.requests == [
        {
            "model": SPEC.model,
            "encoding_format": "base64",
            "input": [SPEC.prompt + text for text in TEXTS],
        }
    ]
    encoder = connect(server, concurrency=1, model="served", truncate=True)
    server.script()
    encoder.encode(TEXTS)
    assert server.requests[0]["model"] == "served"
    assert server.requests[0]["truncate_prompt_tokens"] == SPEC.max_length


def test_vectors_in_another_order_are_sorted(server: FakeServer) -> None:
    server.answer = lambda handler, body: handler.send_items(items(body)[::-1])
    vectors = connect(server, concurrency=2).encode(TEXTS).vectors
    np.testing.assert_allclose(vectors, expected(TEXTS), atol=1e-6)


def test_tokens_of_a_request_are_distributed_over_its_texts(server: FakeServer) -> None:
    server.answer = lambda handler, body: handler.send_items(
        items(body), usage={"prompt_tokens": 23, "total_tokens": 23}
    )
    counts = connect(server, concurrency=1).encode(TEXTS).token_counts
    assert counts.dtype == np.int32
    assert counts.tolist() == [3, 3, 3, 2, 2, 2, 2, 2, 2, 2]


def test_tokens_are_0_if_the_server_does_not_report_them(server: FakeServer) -> None:
    assert connect(server).encode(TEXTS).token_counts.tolist() == [0] * len(TEXTS)


def test_many_texts_are_split_into_requests(server: FakeServer) -> None:
    texts = [f"病历{i}" for i in range(1000)]
    encoder = connect(server, concurrency=4, request_texts=32)
    server.script()
    np.testing.assert_allclose(encoder.encode(texts).vectors, expected(texts), atol=1e-6)
    assert [len(body["input"]) for body in server.requests].count(32) == 31
    assert sum(len(body["input"]) for body in server.requests) == 1000


def test_the_number_of_concurrent_requests_is_limited(server: FakeServer) -> None:
    encoder = connect(server, concurrency=3, request_texts=2)
    together = threading.Barrier(3)
    in_work: list[int] = []
    highest = 0

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal highest
        in_work.append(1)
        highest = max(highest, len(in_work))
        # The barrier breaks, and closes the connection, if fewer than three requests arrive.
        together.wait(10)
        # A fourth request would arrive now.
        time.sleep(0.05)
        in_work.pop()
        plain(handler, body)

    server.answer = answer
    texts = TEXTS * 3
    np.testing.assert_allclose(encoder.encode(texts).vectors, expected(texts), atol=1e-6)
    assert highest == 3


def test_few_texts_are_distributed_over_all_connections(server: FakeServer) -> None:
    encoder = connect(server, concurrency=4)
    server.script()
    encoder.encode(TEXTS)
    assert sorted(len(body["input"]) for body in server.requests) == [1, 3, 3, 3]


def test_threads_may_encode_concurrently(server: FakeServer) -> None:
    encoder = connect(server)
    with ThreadPoolExecutor(3) as pool:
        for encoding in pool.map(encoder.encode, [TEXTS] * 6):
            np.testing.assert_allclose(encoding.vectors, expected(TEXTS), atol=1e-6)


@pytest.mark.parametrize(("code", "date"), [(429, False), (503, True)])
def test_a_requested_wait_is_respected(server: FakeServer, code: int, date: bool) -> None:
    encoder = connect(server, concurrency=1)
    # Dates have a resolution of one second: two seconds ahead is more than one second away.
    value = formatdate(time.time() + 2, usegmt=True) if date else "1"
    server.script(status(code, Retry_After=value))
    encoder.encode(TEXTS)
    first, second = server.times
    assert second - first > 0.95


def test_a_requested_wait_of_a_day_is_an_error(server: FakeServer) -> None:
    encoder = connect(server, concurrency=1)
    server.script(status(429, Retry_After="86400"))
    with raises(EmbeddingServerError, "embedding_server_busy", seconds=86400.0):
        encoder.encode(TEXTS)
    assert len(server.requests) == 1


def test_a_server_that_responded_once_is_retried(server: FakeServer) -> None:
    # Like a server that is still loading its model.
    server.script(status(503), hang_up, status(500))
    connect(server)
    assert len(server.requests) == 4


def test_a_server_that_stopped_is_retried(server: FakeServer) -> None:
    encoder = connect(server, retries=RetryPolicy(retries=3, backoff=0.01))
    server.shutdown()
    server.server_close()
    with raises(EmbeddingServerError, "embedding_server_failed", attempts=4):
        encoder.encode(TEXTS)


def test_a_status_of_success_without_vectors_is_an_error(server: FakeServer) -> None:
    server.answer = status(204)
    url = f"{server.url}/v1/embeddings"
    with raises(EmbeddingServerError, "embedding_server_status", url=url, status=204):
        connect(server)
    assert len(server.requests) == 1


def test_the_first_failure_cancels_the_other_requests(server: FakeServer) -> None:
    encoder = connect(server, concurrency=2, request_texts=1)
    server.script()
    server.answer = status(404)
    with raises(EmbeddingServerError, "embedding_server_status", status=404):
        encoder.encode([f"病历{i}" for i in range(100)])
    assert len(server.requests) <= 4


@pytest.mark.parametrize("code", [400, 413, 422])
@pytest.mark.parametrize("position", [0, 137, 299])
def test_the_text_that_a_server_rejects_is_isolated(
    server: FakeServer, code: int, position: int
) -> None:
    texts = [f"病历{i}" for i in range(300)]
    poison = SPEC.prompt + texts[position]

    def answer(handler: Handler, body: dict[str, Any]) -> None:
        (status(code) if poison in body["input"] else plain)(handler, body)

    encoder = connect(server, concurrency=3, request_texts=32)
    server.script()
    server.answer = answer
    with pytest.raises(TextRejectedError) as caught:
        encoder.encode(texts)
    assert caught.value.position == position
    assert texts[position] not in whole(caught.value)
    assert [body["input"] for body in server.requests].count([poison]) == 1


def test_requests_are_split_for_a_server_with_a_lower_limit(server: FakeServer) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        (status(413) if len(body["input"]) > 4 else plain)(handler, body)

    server.answer = answer
    texts = [f"病历{i}" for i in range(100)]
    encoding = connect(server, concurrency=2).encode(texts)
    np.testing.assert_allclose(encoding.vectors, expected(texts), atol=1e-6)


def edited(edit: Callable[[list[dict[str, Any]]], Any], form: str = "base64") -> Answer:
    """Responds with the correct items modified by `edit`."""
    return lambda handler, body: handler.send_items(edit(items(body, form)))


def with_value(value: float, form: str) -> Answer:
    vector = np.full(NATIVE, value, dtype=np.float32)
    return edited(lambda data: [*data[:3], item(3, vector, form), *data[4:]], form)


def raw(content: bytes) -> Answer:
    return lambda handler, body: handler.send(200, content)


BAD = "bad_embedding_answer"
WIDE = np.ones(32, np.float32)


@pytest.mark.parametrize(
    ("answer", "code", "fields"),
    [
        (edited(lambda data: data[:-1]), "bad_vector_count", {"found": 9}),
        (edited(lambda data: [*data, data[0]]), "bad_vector_count", {"found": 11}),
        (edited(lambda data: [data[0], *data[:-1]]), "bad_vector_count", {"indices": 9}),
        (
            edited(lambda data: [*data[1:], data[0] | {"index": 10}]),
            "bad_vector_count",
            {"indices": 10},
        ),
        (edited(lambda data: []), "bad_vector_count", {"found": 0}),
        (
            edited(lambda data: [item(i, WIDE) for i in range(len(data))]),
            "other_dimension",
            {"found": [32], "expected": 64},
        ),
        (
            edited(lambda data: [item(0, WIDE[:3]), *data[1:]]),
            "other_dimension",
            {"found": [3, 64]},
        ),
        *((with_value(value, "base64"), "not_finite", {}) for value in (np.nan, np.inf, 0)),
        (with_value(np.nan, "float"), "not_finite", {}),
        *(
            (edited(lambda data, other=other: [d | {"embedding": other} for d in data]), BAD, {})
            for other in (None, "病历0", {"of": "病历0"}, "AAAAA", "AAA=", [[1.0]])
        ),
        (edited(lambda data: [{"embedding": d["embedding"]} for d in data]), BAD, {}),
        (edited(lambda data: {"0": data[0]}), BAD, {}),
        *(
            (raw(content), BAD, {})
            for content in ("<p>病历0".encode(), b"", b"\xff\xfe", b'["\xe7\x97\x85"]')
        ),
        (
            lambda handler, body: handler.send_items(items(body), usage={"prompt_tokens": -1}),
            BAD,
            {},
        ),
    ],
)
def test_an_invalid_response_is_an_error(
    server: FakeServer, answer: Answer, code: str, fields: dict[str, Any]
) -> None:
    encoder = connect(server, concurrency=1)
    server.script(answer)
    with raises(VectorError, code, **fields) as caught:
        encoder.encode(TEXTS)
    assert "\n" not in str(caught.value)
    assert "病历" not in whole(caught.value)
    assert len(server.requests) == 1


def test_another_model_is_an_error_at_start(server: FakeServer) -> None:
    server.answer = lambda handler, body: handler.send_items([item(0, np.ones(32, np.float32))])
    with raises(VectorError, "other_dimension", found=[32], expected=64):
        connect(server)


def test_the_key_is_sent_but_not_shown(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    encoder = connect(server, api_key=KEY)
    encoder.encode(TEXTS)
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY not in repr(encoder)
    assert KEY not in caplog.text
    assert TEXTS[0] not in caplog.text
    server.keys.clear()
    connect(server)
    assert server.keys == [None]


@pytest.mark.parametrize("key", ["sk-very secret", "sk-very-secret\n", "密-secret"])
def test_an_invalid_key_is_not_shown(server: FakeServer, key: str) -> None:
    with raises(EmbeddingServerError, "bad_api_key") as caught:
        connect(server, api_key=key)
    assert "secret" not in whole(caught.value)
    assert server.requests == []


@pytest.mark.parametrize(
    ("end", "path"),
    [
        ("", "/v1/embeddings"),
        ("/", "/v1/embeddings"),
        ("/v1", "/v1/embeddings"),
        ("/v1/", "/v1/embeddings"),
        ("/api/v4", "/api/v4/embeddings"),
        ("/models/qwen", "/models/qwen/v1/embeddings"),
    ],
)
def test_an_address_may_end_with_the_protocol_version(
    server: FakeServer, end: str, path: str
) -> None:
    OpenAIEncoder(SPEC, server.url + end)
    assert server.paths == [path]


@pytest.mark.parametrize(
    "url",
    ["", "host:8000", "ftp://host", "http://", "http://me:secret@host", "http://host?key=secret"],
)
def test_an_invalid_address_is_not_shown(url: str) -> None:
    with raises(EmbeddingServerError, "bad_base_url") as caught:
        OpenAIEncoder(SPEC, url)
    assert "secret" not in str(caught.value)


def command(folder: Path, *arguments: str) -> list[str]:
    corpus = write_jsonl(folder / "corpus.jsonl", make_records(20))
    places = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    return ["index", str(corpus), *places, *arguments]


def test_an_index_is_built_through_the_projects_own_service(tmp_path: Path) -> None:
    pair = load_pair("care-mini")
    # The service uses the query encoder and its prompt; here both encoders are the same.
    text = (REGISTRY / "care-mini.toml").read_text("utf-8")
    text = text.replace('"../care-mini/', f'"{REGISTRY.parent}/care-mini/')
    mirror = tmp_path / "mirror.toml"
    mirror.write_text(text.replace('"passage: "', '""'), encoding="utf-8")

    assert main(command(tmp_path, "--index", "local")) == 0
    with running_service(tmp_path / "indexes", "local") as service:
        remote = ["--backend", "openai", "--base-url", service.url, "--concurrency", "3"]
        arguments = command(tmp_path, "--index", "remote", "--pair", str(mirror))
        assert main([*arguments, *remote, "--model", "care-mini", "--batch-size", "4"]) == 0

    (version,) = (tmp_path / "indexes" / "remote").glob("2*")
    assert json.loads((version / "manifest.json").read_text("utf-8"))["corpus"]["tokens"] > 20
    vectors = np.load(only_folder(tmp_path / "builds" / "remote") / "shard-00000.npy")
    texts = [f"{record['title']}\n{record['text']}" for record in make_records(20)]
    encoder = OnnxEncoder(pair.query, pair.folder, threads=1)
    np.testing.assert_allclose(vectors, encoder.encode(texts).vectors, atol=1e-5)


def server_encoder(server: FakeServer, **changes: Any) -> Encoder:
    """The document encoder of care-mini in the indexer, with a modified spec."""
    pair = load_pair("care-mini")
    document = pair.document.model_copy(
        update={"dimension": 16, "native_dimension": NATIVE} | changes
    )
    options = EncoderOptions("openai", base_url=server.url)
    return document_encoder(pair.model_copy(update={"document": document}), options)


def test_the_key_is_read_from_the_environment(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server_encoder(server)
    assert server.keys == [f"Bearer {KEY}"]


def test_a_command_fails_before_it_reads_the_corpus(server: FakeServer, tmp_path: Path) -> None:
    server.answer = status(404)
    arguments = command(tmp_path, "--index", "i", "--backend", "openai", "--base-url", server.url)
    assert main(arguments) == 1
    assert not (tmp_path / "builds").exists()


def test_documents_are_split_by_the_tokenizer_of_the_pair(server: FakeServer) -> None:
    pair = load_pair("care-mini")
    local = OnnxEncoder(pair.document, pair.folder, threads=1)
    document = Document("d", "血压升高，建议复查。" * 30, "病历")
    chunks = [
        Chunker(encoder, Chunking(tokens=50)).split(document)
        for encoder in (local, server_encoder(server))
    ]
    assert isinstance(chunks[0], list)
    assert len(chunks[0]) > 3
    assert chunks[1] == chunks[0]


def test_a_tokenizer_is_required_only_for_chunks(server: FakeServer) -> None:
    encoder = server_encoder(server, tokenizer="away.json")
    assert encoder.encode(TEXTS).vectors.shape == (len(TEXTS), 16)
    with pytest.raises(CareError, match=r"away\.json"):
        Chunker(encoder, Chunking(tokens=50))
