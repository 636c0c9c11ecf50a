"""Whatever a caller passes and a server sends, a call returns or raises an error of the client."""

import asyncio
import json
import math
import socket
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from care_client import (
    AsyncClient,
    CareClientError,
    Client,
    InvalidRequestError,
    InvalidResponseError,
)
from tests.clients.server import ANSWER, head, serving
from tests.clients.transport import Script, answer, both, call

# Text with an unpaired surrogate is no Unicode.
LONE = "头\ud800痛"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host", "http://", "http://host:port", "", "http://host\n"),
        *("http://host:99999", "http://host:0", "http://host?a=1", "http://host/#a", "http://[::1"),
        *(f"http://{'a' * 64}.com", "http://..", f"http://{LONE}", None, 5, b"http://host"),
    ],
)
def test_a_malformed_address_is_an_error(kind: type[Client] | type[AsyncClient], url: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kind(url)
    assert caught.value.code == "invalid_address"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("api_key", value) for value in ("a\nb", "a\0b", "钥匙", LONE, b"key", 5, "a\x7f")),
        *(("timeout", value) for value in (0, -1, math.nan, math.inf, 1e9, "5", None)),
        *(("retries", value) for value in (-1, 1.5, "3", None)),
        *(("max_response_bytes", value) for value in (0, -1, 0.5, "1", None)),
    ],
)
def test_a_wrong_argument_is_an_error_when_the_client_is_made(
    kind: type[Client] | type[AsyncClient], field: str, value: Any
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{field: value})
    assert caught.value.code == "invalid_request"
    assert [each.field for each in caught.value.errors] == [field]
    assert field != "api_key" or str(value) not in str(caught.value)


@pytest.mark.parametrize("key", ["asks\n", " asks\r\n", "\tasks"])
def test_the_line_end_of_a_key_is_no_part_of_it(key: str) -> None:
    script = Script(answer())
    script.client(api_key=key).search("问题")
    assert script.requests[0].headers["Authorization"] == "Bearer asks"


@both
@pytest.mark.parametrize(
    ("method", "args", "options", "field"),
    [
        ("search", [LONE], {}, "query"),
        ("search", ["问题"], {"filter": {"a": LONE}}, "filter"),
        ("search", ["问题"], {"novel": [LONE]}, "novel"),
        ("search", ["问题"], {"min_score": math.nan}, "min_score"),
        ("search", ["问题"], {"novel": object()}, "options"),
        ("search", ["问题"], {"novel": b"\xff"}, "options"),
        ("search", [5], {}, "query"),
        ("search", [None], {}, "query"),
        ("search", ["问题"], {"timeout": -1}, "timeout"),
        ("search", ["问题"], {"timeout": "5"}, "timeout"),
        ("search_batch", [[LONE]], {}, "queries"),
        ("search_batch", ["问题"], {}, "queries"),
        ("search_batch", [{"query": "问题"}], {}, "queries"),
        ("search_batch", [None], {}, "queries"),
        ("search_many", [5], {}, "queries"),
        ("search_many", [["问题", 5]], {}, "query"),
        ("search_many", [["问题"]], {"batch": 0}, "batch"),
        ("search_many", [["问题"]], {"batch": "2"}, "batch"),
        ("embeddings", [LONE], {}, "input"),
        ("embeddings", [None], {}, None),
        ("embeddings", [5], {}, None),
        ("document", [5], {}, "id"),
        ("document", [None], {}, "id"),
        ("document", [b"id"], {}, "id"),
        ("document", ["d" * 70_000], {}, None),
        ("model", [5], {}, "name"),
    ],
)
def test_a_wrong_argument_of_a_call_is_an_error_and_nothing_is_sent(
    kind: str, method: str, args: list[Any], options: dict[str, Any], field: str | None
) -> None:
    script = Script()
    with pytest.raises(InvalidRequestError) as caught:
        call(script, kind, method, *args, **options)
    assert caught.value.code == "invalid_request" and not script.requests
    assert not field or [each.field for each in caught.value.errors] == [field]
    assert "痛" not in f"{caught.value}{caught.value.__cause__}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text() | st.integers(), each, max_size=3)
    ),
    max_leaves=8,
)
METHODS = ["search", "search_batch", "search_many", "embeddings", "document", "model"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(METHODS),
    values,
    st.dictionaries(st.sampled_from(["timeout", "top_k", "filter", "batch", "novel"]), values),
)
def test_any_arguments_raise_nothing_foreign(
    method: str, argument: Any, options: dict[str, Any]
) -> None:
    if method in ("document", "model"):
        options = {name: options[name] for name in options if name == "timeout"}
    elif method != "search_many":
        options.pop("batch", None)
    body = {"hits": [], "results": [{"hits": []}] * 500, "data": [], "id": "1"}
    try:
        call(lambda _: httpx2.Response(200, json=body), "sync", method, argument, **options)
    except CareClientError as error:
        assert error.code in ("invalid_request", "invalid_response")


@both
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"1e999",
        b"{}",
        b"\xff",
        b'{"hits": null}',
        b"[" * 100_000,
        b'{"hits": [{}]}',
    ],
)
@pytest.mark.parametrize("status", [200, 204, 302, 404, 429, 500, 599])
def test_a_response_of_another_shape_is_an_error(kind: str, content: bytes, status: int) -> None:
    with pytest.raises(CareClientError) as caught:
        headers = {"Retry-After": "9" * 400}
        response = httpx2.Response(status, content=content, headers=headers)
        call(lambda _: response, kind, "search", "问题")
    assert caught.value.status == status
    assert caught.value.code == ("invalid_response" if status == 200 else f"http_{status}")


@settings(max_examples=200, deadline=None)
@given(values, st.text(), st.sampled_from([200, 404, 422, 503]))
def test_any_json_raises_nothing_foreign(body: Any, retry_after: str, status: int) -> None:
    try:
        content = json.dumps(body, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
    except ValueError:
        content = b"{"
    headers = {"Retry-After": (retry_after.encode() or b"x") if retry_after.isprintable() else b"x"}
    script = Script(*[httpx2.Response(status, content=content, headers=headers)] * 4)
    client = script.client(retries=0)
    try:
        client.search("问题")
    except CareClientError as error:
        assert error.status == status


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "response",
    [
        b"\x00\xff\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nxxxx",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n{}",
        head(len(ANSWER)) + ANSWER[:-1] + b"x",
    ],
)
def test_bytes_that_are_no_response_are_an_error(
    kind: type[Client] | type[AsyncClient], response: bytes
) -> None:
    def respond(connection: socket.socket) -> None:
        connection.sendall(response)
        connection.shutdown(socket.SHUT_RDWR)

    with serving(respond) as server, pytest.raises(CareClientError):
        client = kind(server.url, retries=0)
        if isinstance(client, Client):
            client.search("问题")
        else:
            asyncio.run(client.search("问题"))


def test_metrics_are_text_whatever_their_bytes() -> None:
    headers = {"Content-Type": "text/plain; charset=base64"}
    script = Script(httpx2.Response(200, content=b"a\xff", headers=headers))
    assert script.client().metrics() == "a\ufffd"


def test_a_compressed_response_is_not_unpacked() -> None:
    """What it holds can be a thousand times longer."""

    def respond(connection: socket.socket) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"
        )

    with serving(respond) as server, pytest.raises(InvalidResponseError):
        Client(server.url).search("问题")
    assert b"accept-encoding: identity" in server.heads[0][0].lower()
