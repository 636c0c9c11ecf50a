"""Whose connections a client uses, through which proxy, how long, and how much it reads."""

import asyncio
import copy
import multiprocessing
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from care_client import (
    AsyncClient,
    CareClientError,
    Client,
    DeadlineError,
    InvalidResponseError,
)
from care_client import exchange as exchange_module
from care_client.connections import is_loopback
from tests.clients.server import ANSWER, Server, head, serving
from tests.clients.transport import Script
from tests.clients.transport import answer as scripted

KEY = "asks"
both = pytest.mark.parametrize("kind", [Client, AsyncClient])
Kind = type[Client] | type[AsyncClient]


def search(client: Any, **options: Any) -> Any:
    """Searches with a client of either kind; each search of an AsyncClient has an event loop."""
    if isinstance(client, Client):
        return client.search("问题", **options)
    return asyncio.run(client.search("问题", **options))


def close(client: Any) -> None:
    if isinstance(client, Client):
        client.close()
    else:
        asyncio.run(client.aclose())


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second for the service to say that the deadline passed."""
    monkeypatch.setattr(exchange_module, "_GRACE", 0.1)


def drip(
    server: Callable[[], Server], first: bytes, part: bytes
) -> Callable[[socket.socket], None]:
    """Sends a part again and again, each well before a read times out."""

    def respond(connection: socket.socket) -> None:
        connection.sendall(first)
        while not server().ended.wait(0.02):
            connection.sendall(part)

    return respond


@both
@pytest.mark.parametrize(
    ("first", "part"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (head(1_000_000), b" "),
        (head(), b" "),
        (b"HTTP/1.1 503 No\r\n\r\n", b" "),
    ],
    ids=["status", "header", "informational", "length", "unlimited", "error"],
)
def test_a_response_that_drips_ends_with_the_time_out(
    kind: Kind, first: bytes, part: bytes
) -> None:
    started: list[Server] = []
    with serving(drip(lambda: started[0], first, part)) as server:
        started.append(server)
        begin = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            search(kind(server.url, timeout=0.3))
        assert time.monotonic() - begin < 10
        assert caught.value.code == "deadline_exceeded" and caught.value.request_id
        assert len(server.heads) == 1


@both
def test_a_response_without_an_end_is_read_up_to_the_limit(kind: Kind) -> None:
    sent: list[int] = []

    def respond(connection: socket.socket) -> None:
        connection.sendall(head())
        while True:
            sent.append(connection.send(b" " * 65_536))

    with serving(respond) as server, pytest.raises(InvalidResponseError) as caught:
        search(kind(server.url, max_response_bytes=1_000_000))
    assert (caught.value.code, caught.value.status) == ("response_too_long", 200)
    assert 1_000_000 < sum(sent) < 50_000_000  # the rest is in the buffers of the sockets


@both
@pytest.mark.parametrize("more", [0, 1])
def test_the_limit_is_the_most_bytes_of_a_response(kind: Kind, more: int) -> None:
    client = kind(max_response_bytes=len(ANSWER) - more, http=transport(kind, ANSWER))
    if more:
        with pytest.raises(InvalidResponseError):
            search(client)
    else:
        assert search(client).hits


def transport(kind: Kind, content: bytes) -> Any:
    """An HTTP client whose responses have a content."""
    mock = httpx2.MockTransport(Script(httpx2.Response(200, content=content)))
    return httpx2.Client(transport=mock) if kind is Client else httpx2.AsyncClient(transport=mock)


@both
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda client: pickle.loads(pickle.dumps(client))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_has_the_arguments_and_connections_of_its_own(
    kind: Kind, duplicate: Callable[[Any], Any]
) -> None:
    with serving() as server:
        client = kind(server.url + "/", api_key=KEY, timeout=3, retries=0)
        search(client)
        copied = duplicate(client)
        assert type(copied) is kind and copied._connection == client._connection
        close(client)
        assert search(copied).hits
        close(copied)
    assert [len(heads) for heads in server.heads] == [1, 1]
    assert f"authorization: Bearer {KEY}".encode().lower() in server.heads[1][0].lower()


@both
def test_a_client_with_an_http_client_of_the_caller_cannot_be_copied(kind: Kind) -> None:
    client = kind(http=transport(kind, ANSWER))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CareClientError) as caught:
            duplicate(client)
        assert caught.value.code == "http_not_shareable"
    assert search(client).hits


@both
def test_a_closed_client_says_so(kind: Kind) -> None:
    for client in (kind(), kind(http=transport(kind, ANSWER))):
        close(client)
        close(client)
        with pytest.raises(CareClientError) as caught:
            search(client)
        assert caught.value.code == "client_closed"


def searching(client: Any, done: Any) -> None:
    try:
        done.put([search(client).hits[0].id, search(client).hits[0].id])
    except CareClientError as error:
        done.put(error.code)


def in_child(client: Any) -> Any:
    """What two searches in a forked process return."""
    context = multiprocessing.get_context("fork")
    done = context.SimpleQueue()
    process = context.Process(target=searching, args=(client, done))
    process.start()
    result = done.get()
    process.join(60)
    return result


def test_a_forked_process_opens_connections_of_its_own() -> None:
    with serving() as server:
        client = Client(server.url)
        search(client)
        assert in_child(client) == ["1", "1"]
        search(client)
    assert [len(heads) for heads in server.heads] == [2, 2]


def test_a_forked_process_opens_connections_of_its_own_for_coroutines() -> None:
    async def run(client: AsyncClient) -> None:
        await client.search("问题")
        assert await asyncio.to_thread(in_child, client) == ["1", "1"]
        await client.search("问题")

    with serving() as server:
        asyncio.run(run(AsyncClient(server.url)))
    assert [len(heads) for heads in server.heads] == [2, 1, 1]


def test_an_http_client_of_the_caller_is_not_used_in_a_forked_process() -> None:
    client = Client(http=transport(Client, ANSWER))
    search(client)
    assert in_child(client) == "http_not_shareable"


def test_event_loops_may_share_a_client() -> None:
    async def several(client: AsyncClient) -> None:
        await asyncio.gather(*(client.search("问题") for _ in range(3)))

    with serving() as server:
        client = AsyncClient(server.url, retries=0)
        threads = [threading.Thread(target=asyncio.run, args=(several(client),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert search(client).hits and search(client).hits
        close(client)
    assert sum(map(len, server.heads)) == 11


def test_an_http_client_of_the_caller_belongs_to_one_event_loop() -> None:
    script = Script(scripted(), scripted())
    client = script.async_client()
    assert search(client).hits
    with pytest.raises(CareClientError) as caught:
        search(client)
    assert caught.value.code == "http_not_shareable" and len(script.requests) == 1


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets a variable of proxies; none is set before."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    def put(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)

    return put


@both
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "what://host"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_request_to_this_machine_goes_to_a_proxy(
    kind: Kind, name: str, proxy: str, host: str, proxies: Callable[[str, str], None]
) -> None:
    proxies(name, proxy)
    with serving() as server:
        client = kind(f"http://{host}:{server.port}", retries=0)
        assert search(client).hits
        close(client)


@both
def test_other_requests_go_to_the_proxy_of_the_environment(
    kind: Kind, proxies: Callable[[str, str], None]
) -> None:
    with serving() as proxy:
        proxies("HTTP_PROXY", proxy.url)
        client = kind("http://care.invalid", retries=0)
        assert search(client).hits
        close(client)
        assert proxy.heads[0][0].startswith(b"POST http://care.invalid/search ")
        proxies("NO_PROXY", "care.invalid")
        with pytest.raises(CareClientError) as caught:
            search(kind("http://care.invalid", retries=0))
        assert caught.value.code == "connection_failed" and len(proxy.heads) == 1


@both
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "what://user:SECRET@host"])
def test_a_proxy_that_cannot_be_used_is_an_error_of_the_client(
    kind: Kind,
    proxy: str,
    proxies: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    proxies("ALL_PROXY", proxy)
    with pytest.raises(CareClientError) as caught:
        search(kind("http://care.invalid"))
    assert caught.value.code == "invalid_environment"
    assert "SECRET" not in f"{caught.value}{caught.value.__cause__}"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),
        ("localhost.example", False),
        ("128.0.0.1", False),
        ("10.0.0.1", False),
        ("[::2]", False),
    ],
)
def test_what_is_this_machine(host: str, local: bool) -> None:
    assert is_loopback(f"http://{host}:8000/care") is local
