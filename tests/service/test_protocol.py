"""The HTTP protocol without the application of the service."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.service.sockets import Client, Server, serving, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

JSON = '{"query":"咳嗽"}'.encode()
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"
PLAIN = GET + b"\r\n"
GET_LARGE = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
# More than the buffers of two sockets hold.
LARGE = 32 << 20

# What clients send, recorded from curl 7.88.1 --http2, java.net.http of JDK 17.0.15, fetch of Node
# 20.20.2, and httpx2 2.16.2.
CLIENTS = {
    "curl": b"POST /search HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: curl/7.88.1\r\n"
    b"Accept: */*\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nContent-Type: application/json\r\n"
    b"Content-Length: 18\r\n\r\n",
    "java": b"POST /search HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: 18\r\nHost: 127.0.0.1:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\nContent-Type: application/json\r\n\r\n",
    "node": b"POST /search HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nconnection: keep-alive\r\n"
    b"Content-Type: application/json\r\naccept: */*\r\naccept-language: *\r\n"
    b"sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\n"
    b"content-length: 18\r\n\r\n",
    "httpx": b"POST /search HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n"
    b"Accept-Encoding: gzip, deflate, br\r\nConnection: keep-alive\r\n"
    b"User-Agent: python-httpx2/2.16.2\r\nContent-Length: 18\r\n"
    b"Content-Type: application/json\r\n\r\n",
}


class Echo:
    """An application that answers with what it received; `/large` is `LARGE` bytes long.

    Attributes:
        entered: Set when a request has begun.
        ended: What became of each request, in order: answered, departed.
        release: `/slow` answers once it is set.
    """

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.set()
        if scope["path"] == "/large":
            await answer(send, b"x" * LARGE)
        elif scope["path"] == "/early":
            await answer(send, b"")
        elif scope["path"] == "/slow":
            await read(receive)
            done, waiting = asyncio.create_task(self.release.wait()), asyncio.create_task(receive())
            await asyncio.wait((done, waiting), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                self.ended.put_nowait("departed")
                return
            waiting.cancel()
            await answer(send, b"late")
        elif (body := await read(receive)) is None:
            self.ended.put_nowait("departed")
            return
        else:
            request = {"method": scope["method"], "path": scope["path"], "body": body.decode()}
            await answer(send, json.dumps(request).encode())
        self.ended.put_nowait("answered")


async def read(receive: Receive) -> bytes | None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body, more = body + message["body"], message["more_body"]
    return body


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    start: Message = {"type": "http.response.start", "status": 200, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving(Echo()) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> Client:
    return await server.connect()


@pytest.mark.parametrize("name", CLIENTS)
async def test_common_clients_get_answers_to_their_bodies(client: Client, name: str) -> None:
    for _ in range(2):
        await client.send(CLIENTS[name])
        status, fields, content = await client.request(JSON)
        assert (status, json.loads(content)["body"]) == (200, JSON.decode())
        assert "upgrade" not in fields


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n\r\nhello", b""])
@pytest.mark.parametrize("protocol", [b"websocket", b"H2C, other"])
async def test_a_request_to_upgrade_is_answered_in_http_1(
    client: Client, protocol: bytes, framing: bytes
) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    upgrade = POST + b"Connection: keep-alive, upgrade\r\nuPGRADE: " + protocol + b"\r\n"
    _, _, content = await client.request(upgrade + (framing or chunked))
    assert json.loads(content)["body"] == "hello"


async def test_requests_are_answered_in_order_however_they_are_cut_into_packets(
    server: Server,
) -> None:
    requests = [
        PLAIN,
        POST + b"Content-Length: 5\r\n\r\nhello",
        b"\r\n" + POST + b"Content-Length: 0\r\n\r\n",
        GET.replace(b"/", b"/%E7%97%85?a=b", 1) + b"\r\n",
    ]
    expected = [("/", ""), ("/echo", "hello"), ("/echo", ""), ("/病", "")]
    stream = b"".join(requests)
    for size in (len(stream), 1, 7, 64):
        client = await server.connect()
        for start in range(0, len(stream), size):
            await client.send(stream[start : start + size])
            await asyncio.sleep(0)
        for path, body in expected:
            _, _, content = await client.answer()
            found = json.loads(content)
            assert (found["path"], found["body"]) == (path, body)


async def test_a_thousand_requests_at_once_wait_in_little_memory(
    server: Server, client: Client
) -> None:
    sending = asyncio.create_task(client.send(PLAIN * 10_000))
    for _ in range(10_000):
        assert await client.status() == 200
        assert len(server.state.tasks) <= 2
    await sending


async def test_a_second_request_behind_a_chunked_body_is_not_lost_silently(client: Client) -> None:
    chunked = CHUNKED + b"5;a=b\r\nhello\r\n0\r\nAuthorization: x\r\n\r\n"
    status, fields, _ = await client.request(chunked)
    assert (status, fields.get("connection")) == (200, None)
    status, fields, content = await client.request(chunked * 2)
    assert (status, fields["connection"]) == (200, "close")
    assert json.loads(content)["body"] == "hello"
    assert await client.closed()


@pytest.mark.parametrize(
    "data",
    [
        b"no HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET \xff HTTP/1.1\r\nHost: a\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Content-Length: +5\r\n\r\nhello",
        POST + b"Transfer-Encoding: gzip\r\n\r\nhello",
        POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        CHUNKED + b"z\r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"5\r\nhelloworld\r\n0\r\n\r\n",
    ],
)
async def test_invalid_requests_get_a_problem_with_an_id(
    server: Server, client: Client, data: bytes
) -> None:
    status, fields, content = await client.request(data)
    problem = json.loads(content)
    assert (status, problem["code"]) == (400, "invalid_http")
    assert fields["content-type"] == "application/problem+json"
    assert fields["x-request-id"] == problem["request_id"]
    assert fields["connection"] == "close"
    assert await client.closed()
    assert server.metrics.requests.labels("unmatched", "400")._value.get() == 1


@pytest.mark.parametrize(
    ("status", "code", "head"),
    [
        (414, "url_too_long", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n"),
        (414, "url_too_long", b"GET /" + b"a" * 9000),
        (431, "headers_too_long", GET + b"X: " + b"a" * 17_000 + b"\r\n\r\n"),
        (431, "headers_too_long", GET + b"X: " + b"a" * 17_000),
        (431, "headers_too_long", GET + b"X" * 17_000),
        (431, "headers_too_long", GET + b"a:b\r\n" * 128 + b"\r\n"),
        (431, "headers_too_long", CHUNKED + b"5;" + b"a" * 17_000),
        (431, "headers_too_long", CHUNKED + b"0\r\nX: " + b"a" * 17_000),
    ],
)
async def test_long_heads_are_refused(server: Server, status: int, code: str, head: bytes) -> None:
    client = await server.connect()
    found, _, content = await client.request(head)
    assert (found, json.loads(content)["code"]) == (status, code)
    assert await client.closed()
    client = await server.connect()
    assert (await client.request(GET + b"X: " + b"a" * 15_000 + b"\r\n\r\n"))[0] == 200


async def test_a_client_that_goes_on_sending_reads_the_refusal(
    server: Server, client: Client
) -> None:
    await client.send(GET + b"X: " + b"a" * 20_000_000)
    assert await client.status() == 431
    assert await client.reader.read() == b""
    server.after(11)
    with pytest.raises(ConnectionError):
        while True:
            await client.send(b"a" * 65_536)


async def test_a_client_that_sends_its_whole_body_first_reads_an_early_answer(
    client: Client,
) -> None:
    early = POST.replace(b"echo", b"early") + b"Content-Length: %d\r\n\r\n" % LARGE
    assert (await client.request(early + bytes(LARGE)))[0] == 200
    assert (await client.request(PLAIN))[0] == 200


async def test_clients_are_awaited_for_a_limited_time(server: Server) -> None:
    silent, slow, used, unread, late = [await server.connect() for _ in range(5)]
    await slow.send(GET)
    assert (await used.request(PLAIN))[0] == 200
    early = POST.replace(b"echo", b"early") + b"Content-Length: 9\r\n\r\n"
    assert (await unread.request(early + b"a"))[0] == 200
    server.app.entered.clear()
    await late.send(POST + b"Content-Length: 9\r\n\r\n")
    await server.app.entered.wait()
    server.after(9)
    assert len(server.connections) == 5
    server.after(11)
    assert [await client.closed() for client in (silent, slow, unread)] == [True] * 3
    assert (server.ended("idle"), server.ended("receive")) == (1, 2)
    assert (await used.request(PLAIN))[0] == 200
    # The application limits the time of a body.
    assert (await late.request(b"a" * 9))[0] == 200
    server.after(80)
    assert await used.closed()


async def test_a_client_that_reads_nothing_is_cut_off(server: Server, client: Client) -> None:
    await client.send(GET_LARGE)
    await until(lambda: server.connections.unsent.own > 0)
    assert server.connections.unsent.own >= LARGE
    server.after(9)
    assert len(server.connections) == 1
    server.after(11)
    assert server.ended("send") == 1
    assert await server.app.ended.get() == "answered"
    assert server.connections.unsent.own == 0
    assert await client.closed()


async def test_a_slow_client_keeps_its_connection_while_it_reads(
    server: Server, client: Client
) -> None:
    await client.send(GET_LARGE)
    await client.reader.readuntil(b"\r\n\r\n")
    left = LARGE
    while left:
        left -= len(await client.reader.read(1 << 20))
        if server.connections.unsent.own and left > LARGE // 2:
            # Eight more seconds since the client has taken something.
            server.after(8)
    assert await server.app.ended.get() == "answered"
    assert server.connections.unsent.own == 0
    assert (await client.request(PLAIN))[0] == 200


async def test_unsent_bytes_are_limited() -> None:
    """The client that has kept its answer waiting for longest gives way."""
    async with serving(Echo(), unsent_bytes=2 * LARGE + 1000) as server:
        clients = [await server.connect() for _ in range(4)]
        for client in clients:
            server.app.entered.clear()
            await client.send(GET_LARGE)
            await server.app.entered.wait()
        await until(lambda: server.ended("unsent") == 2)
        assert server.connections.unsent.own < 3 * LARGE
        assert [await client.closed() for client in clients[:2]] == [True, True]
        status, _, content = await clients[3].answer()
        assert (status, len(content)) == (200, LARGE)


async def test_a_new_connection_takes_the_place_of_the_one_that_idles_for_longest() -> None:
    async with serving(Echo(), connections=3) as server:
        clients = [await server.connect() for _ in range(3)]
        for client in clients:
            assert (await client.request(PLAIN))[0] == 200
        assert (await clients[0].request(PLAIN))[0] == 200
        await clients[2].send(POST + b"Content-Length: 1\r\n\r\n")
        new = await server.connect()
        assert (await new.request(PLAIN))[0] == 200
        assert await clients[1].closed()
        assert (await clients[0].request(PLAIN))[0] == 200
        assert (await clients[2].request(b"a"))[0] == 200
        assert server.ended("limit") == 1


SLOW = b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("requests", [[SLOW], [SLOW, PLAIN, SLOW]])
async def test_a_client_that_ends_its_side_gets_its_answers(
    server: Server, client: Client, requests: list[bytes]
) -> None:
    await client.send(b"".join(requests))
    client.writer.write_eof()
    await server.app.entered.wait()
    statuses = [await client.status()]
    server.app.release.set()
    statuses += [await client.status() for _ in requests]
    assert statuses == [100, *(200 for _ in requests)]
    assert await client.closed()
    assert [server.app.ended.get_nowait() for _ in requests] == ["answered"] * len(requests)


UPLOAD = POST + b"Content-Length: 9\r\n\r\na"


@pytest.mark.parametrize(
    ("data", "end"),
    [(SLOW, "close"), (SLOW * 2, "close"), (SLOW + UPLOAD, "close"), (UPLOAD, "abort")],
)
async def test_a_client_that_ends_the_connection_departs(
    server: Server, client: Client, data: bytes, end: str
) -> None:
    await client.send(data)
    await server.app.entered.wait()
    getattr(client.writer.transport, end)()
    assert await server.app.ended.get() == "departed"


@pytest.mark.parametrize(
    "data", [b"", b"GET", GET, POST + b"Content-Length: 9\r\n\r\na", CHUNKED + b"5\r\nab"]
)
async def test_half_a_request_before_the_end_of_input_is_none(client: Client, data: bytes) -> None:
    await client.send(data)
    client.writer.write_eof()
    assert await client.closed()


async def test_a_client_that_sends_only_empty_lines_idles(server: Server, client: Client) -> None:
    await client.send(b"\r\n")
    await until(lambda: len(server.connections) > 0)
    started = asyncio.get_running_loop().time()
    for _ in range(20):
        await client.send(b"\r\n\n\r")
        await asyncio.sleep(0.01)
    passed = asyncio.get_running_loop().time() - started
    server.after(10 - passed / 2)
    assert await client.closed()
    assert server.ended("idle") == 1


@pytest.mark.parametrize("size", [18_000, 24_000, 100_000])
@pytest.mark.parametrize("step", [1 << 20, 4000])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"5;a=", b"\r\nhello\r\n0\r\n\r\n"),
        (b"0", b"5\r\nhello\r\n0\r\n\r\n"),
        (b"5\r\nhello\r\n0\r\nA: ", b"\r\n\r\n"),
        (b"5\r\nhello\r\n0;a=", b"\r\n\r\n"),
    ],
)
async def test_framing_of_a_chunked_body_is_limited(
    client: Client, before: bytes, after: bytes, size: int, step: int
) -> None:
    filling = (b"0" if before == b"0" else b"a") * size
    data = CHUNKED + before + filling + after
    for start in range(0, len(data), step):
        await client.send(data[start : start + step])
    status, _, content = await client.answer()
    assert status in (400, 431)
    assert json.loads(content)["code"] in ("headers_too_long", "invalid_http")


async def test_answers_without_content_and_to_old_clients(server: Server) -> None:
    client = await server.connect()
    await client.send(GET.replace(b"GET", b"HEAD") + b"\r\n")
    status, fields, _ = await client.answer(head=True)
    assert (status, int(fields["content-length"]) > 0) == (200, True)
    status, fields, _ = await client.request(b"GET / HTTP/1.0\r\n\r\n")
    assert (status, fields["connection"]) == (200, "close")
    assert await client.closed()
    client = await server.connect()
    status, fields, _ = await client.request(GET + b"Connection: close\r\n\r\n")
    assert (status, fields["connection"]) == (200, "close")
    assert await client.closed()


async def test_a_client_that_asks_is_told_whether_to_send_its_body(client: Client) -> None:
    await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert await client.status() == 100
    status, _, content = await client.request(b"hello")
    assert (status, json.loads(content)["body"]) == (200, "hello")
    # A body that it need not send is not read from its next request.
    early = b"POST /early HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
    status, fields, _ = await client.request(early + b"Content-Length: 60\r\n\r\n")
    assert (status, fields["connection"]) == (200, "close")
    assert await client.closed()


async def test_a_body_of_tiny_chunks_does_not_hold_the_event_loop(client: Client) -> None:
    """In its processor time, which other processes do not change."""
    sending = asyncio.create_task(client.send(CHUNKED + b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n"))
    longest, loop = 0.0, asyncio.get_running_loop()
    while not sending.done():
        turn = loop.create_future()
        started = time.thread_time()
        loop.call_soon(turn.set_result, None)
        await turn
        longest = max(longest, time.thread_time() - started)
    status, _, content = await client.answer()
    assert (status, len(json.loads(content)["body"])) == (200, 200_000)
    assert longest < 0.05
