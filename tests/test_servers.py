"""What the clients of servers do about one that fails, is late, or responds with nonsense."""

import asyncio
import gzip
import json
import logging
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import parse_headers
from itertools import chain, repeat
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from core.breaker import Breaker, BreakerState, UnavailableError
from core.errors import CareError
from core.retries import RetryPolicy
from core.service_process import free_port
from curation import retrieval
from curation.config import Endpoint
from curation.llm import LanguageModels, Question
from models.encoders.openai import OpenAIEncoder
from service.pipeline.redis_tier import RedisGuard
from service.pipeline.rerank_server import RerankServer
from tests.curation.endpoints import completion
from tests.models.encoders.embedding_server import SPEC, items

pytestmark = pytest.mark.e2e

KEY, TEXT = "sk-very-secret", "病历"
# Time-outs of calls of late and of other servers, and within what an error comes on a loaded
# machine [s].
IMPATIENT, PATIENT, IN_TIME = 1.0, 20.0, 15.0
LIMIT = 2**20


# The server

# Returns what is written in place of a good response; None is a pause.
Response = Callable[[bytes], Iterable[bytes | None]]


class Handler(StreamRequestHandler):
    """Reads requests of HTTP or Redis, up to the first whose response is a given one."""

    server: "Server"

    def handle(self) -> None:
        with suppress(OSError):
            while first := self.rfile.readline():
                with self.server.lock:
                    self.server.requests += 1
                    response = next(self.server.responses, None)
                good = self.server.good(self.read(first))
                if response:
                    return self.write(response(good))
                self.wfile.write(good)

    def read(self, first: bytes) -> Any:
        if first.startswith(b"*"):
            return [self.rfile.readline() for _ in range(2 * int(first[1:]))]
        return json.loads(self.rfile.read(int(parse_headers(self.rfile)["Content-Length"])))

    def write(self, response: Iterable[bytes | None]) -> None:
        for piece in response:
            if piece is not None:
                self.wfile.write(piece)
                self.server.sent += len(piece)
            elif self.server.ended.wait(0.05):
                return


class Server(ThreadingTCPServer):
    """Writes the given responses, then good ones.

    Args:
        good: Returns the response to the body of a request.
    """

    daemon_threads = True

    def __init__(self, good: Callable[[Any], bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.good = good
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.responses: Iterator[Response] = iter(())
        self.requests = self.sent = 0


@contextmanager
def run_server(good: Callable[[Any], bytes]) -> Iterator[Server]:
    with Server(good) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def head(status: int = 200, **fields: Any) -> bytes:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {named[name]}" for name in named)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def whole(body: bytes, status: int = 200, **fields: Any) -> bytes:
    return head(status, Content_Length=len(body), **fields) + body


def sends(*pieces: bytes | None, then: bytes | None = b"") -> Response:
    """Sends pieces and, unless it is empty, the last one without end, with pauses before it."""
    last = () if then == b"" else chain.from_iterable(repeat((None, then)))
    return lambda _: chain(pieces, last)


# What a server does


class Fault(NamedTuple):
    kind: str
    response: Response


def refuses(status: int) -> Response:
    # A server can quote its input.
    echo = json.dumps({"error": {"message": TEXT}}, ensure_ascii=False).encode()
    return sends(whole(echo, status, Location="http://elsewhere.invalid/v1"))


def packed(good: bytes) -> list[bytes]:
    body = good.partition(b"\r\n\r\n")[2]
    return [whole(gzip.compress(body), Content_Encoding="gzip")]


SILENT = sends(then=None)
FAULTS = {
    "slow head": Fault("late", sends(b"HTTP/1.1 200 OK\r\nX-Slow: ", then=b"x")),
    "slow body": Fault("late", sends(head(), then=b" ")),
    "no response": Fault("late", SILENT),
    "closed": Fault("broken", sends()),
    "cut": Fault("broken", sends(head(Content_Length=1000), b'{"data": [')),
    "no HTTP": Fault("broken", sends(b"220 mail.example ESMTP\r\n")),
    "endless": Fault("garbled", lambda _: chain([head()], repeat(b" " * 2**16))),
    "packed": Fault("garbled", packed),
    "no JSON": Fault("garbled", sends(whole(b"<p>" + TEXT.encode()))),
    "other JSON": Fault("garbled", sends(whole(f'["{TEXT}"]'.encode()))),
    "empty": Fault("garbled", sends(whole(b""))),
    **{str(status): Fault("busy", refuses(status)) for status in (408, 429, 500, 503)},
    **{str(status): Fault("denied", refuses(status)) for status in (307, 401, 403, 404)},
    **{str(status): Fault("rejected", refuses(status)) for status in (400, 413, 422)},
}


# The clients


Call = Callable[[], Any]


@dataclass(frozen=True)
class Client:
    """A client, and what it does about each kind of fault.

    Args:
        connect: Returns a call of the server with a time-out, which may also connect.
        good: Returns the body of a good response.
        codes: The codes of errors by kind of fault; without those of "".
        retried: Kinds of faults after which it asks once more.
        quotes: Whether its errors quote the body of an error response.
    """

    connect: Callable[[str, float, Path], Any]
    good: Callable[[Any], Any]
    codes: dict[str, str]
    retried: tuple[str, ...] = ()
    quotes: bool = False

    def code(self, kind: str) -> str:
        return self.codes.get(kind, self.codes[""])


class Nothing(BaseModel):
    """An answer without fields."""


@contextmanager
def embeddings(address: str, timeout: float, _: Path) -> Iterator[Call]:
    retries = RetryPolicy(retries=1, backoff=0.01)
    # It encodes a test text.
    yield lambda: OpenAIEncoder(
        SPEC, f"http://{address}", api_key=KEY, timeout=timeout, retries=retries
    )


@contextmanager
def judge(address: str, timeout: float, folder: Path) -> Iterator[Call]:
    endpoint = Endpoint(
        name="m",
        model="m",
        base_url=f"http://{address}/v1",
        api_key_env="JUDGE_KEY",
        timeout=timeout,
        retries=1,
        backoff=0.01,
    )
    question = Question("1", "", TEXT, "", Nothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", KEY)
        with LanguageModels([endpoint], folder / "calls.sqlite", attempts=1) as models:
            yield lambda: models.ask({"m": [lambda: question]}, "test")


@contextmanager
def ranking(address: str, timeout: float, _: Path) -> Iterator[Call]:
    with asyncio.Runner() as runner:
        server = RerankServer(f"http://{address}", "m", KEY, timeout, Breaker())
        yield lambda: runner.run(server.scores(TEXT, [TEXT]))
        runner.run(server.close())


@contextmanager
def searches(address: str, timeout: float, _: Path) -> Iterator[Call]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "_SECONDS", timeout)
        patch.setattr(retrieval, "_BYTES", LIMIT)
        yield lambda: retrieval.search_run(f"http://{address}", {"q": TEXT}, 1)


RANKS = {"results": [{"index": 0, "relevance_score": 1.0}]}
CLIENTS = {
    "embeddings": Client(
        embeddings,
        lambda body: {"data": items(body)},
        {
            "refused": "embedding_server_unreachable",
            "garbled": "bad_embedding_answer",
            "denied": "embedding_server_status",
            "rejected": "embedding_server_rejects",
            "": "embedding_server_failed",
        },
        retried=("late", "broken", "busy"),
    ),
    "judge": Client(
        judge,
        lambda body: completion(body, "{}"),
        {
            "denied": "request_rejected",
            "rejected": "request_rejected",
            "": "language_model_failed",
        },
        retried=("late", "broken", "garbled", "busy"),
        quotes=True,
    ),
    "ranking": Client(ranking, lambda _: RANKS, {"": "unavailable"}),
    "searches": Client(
        searches,
        lambda _: {"results": [{"hits": []}]},
        {
            **dict.fromkeys(("refused", "late", "broken"), "service_unreachable"),
            "": "search_failed",
        },
        quotes=True,
    ),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return CLIENTS[request.param]


@pytest.fixture
def server(client: Client) -> Iterator[Server]:
    with run_server(lambda body: whole(json.dumps(client.good(body)).encode())) as server:
        yield server


def fails(call: Call, code: str) -> str:
    """Checks the code of the error of a call, and that it comes in time; returns its traceback."""
    started = time.monotonic()
    with pytest.raises(CareError) as caught:
        call()
    assert caught.value.code == code
    assert time.monotonic() - started < IN_TIME
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_in_time_and_without_secrets(
    client: Client, server: Server, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kind, response = FAULTS[name]
    server.responses = repeat(response)
    timeout = IMPATIENT / 2 if kind == "late" else PATIENT
    with client.connect(server.address, timeout, tmp_path) as call:
        shown = fails(call, client.code(kind)) + caplog.text
    assert server.requests <= (2 if kind in client.retried else 1)
    # Each response is read up to its limit; besides, the system buffers some.
    assert server.sent < 80_000_000
    assert KEY not in shown
    assert client.quotes or TEXT not in shown


@pytest.mark.parametrize("name", ["no response", "cut", "endless", "503", "401", "413"])
def test_a_server_that_recovers_is_used_again(
    client: Client, server: Server, name: str, tmp_path: Path
) -> None:
    kind, response = FAULTS[name]
    server.responses = iter([response])
    timeout = 2 * IMPATIENT if kind == "late" else PATIENT
    with client.connect(server.address, timeout, tmp_path) as call:
        if kind not in client.retried:
            fails(call, client.code(kind))
        call()
    assert server.requests == 2


def test_a_server_that_is_down_is_an_error(client: Client, tmp_path: Path) -> None:
    with client.connect(f"127.0.0.1:{free_port()}", PATIENT, tmp_path) as call:
        assert KEY not in fails(call, client.code("refused"))


# Clients with a circuit breaker


@dataclass
class Guarded:
    """A client in the event loop, its breaker and a clock that the test sets."""

    server: Server
    ask: Callable[[], Awaitable[Any]] = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.breaker = Breaker(failures=3, retry_after=5, clock=lambda: self.now)

    async def fails(self, times: int) -> None:
        for _ in range(times):
            with pytest.raises(UnavailableError):
                await self.ask()


@asynccontextmanager
async def guarded_ranking(seconds: float) -> AsyncIterator[Guarded]:
    with run_server(lambda _: whole(json.dumps(RANKS).encode())) as server:
        guarded = Guarded(server)
        client = RerankServer(f"http://{server.address}", "", "", seconds, guarded.breaker)
        guarded.ask = lambda: client.scores(TEXT, [TEXT])
        yield guarded
        await client.close()


@asynccontextmanager
async def guarded_redis(seconds: float) -> AsyncIterator[Guarded]:
    with run_server(lambda _: b"$-1\r\n") as server:
        guarded = Guarded(server)
        url = f"redis://{server.address}/0"
        guard = RedisGuard(url, seconds, guarded.breaker, Breaker(), lambda _: None)
        guarded.ask = lambda: guard.read(lambda redis: redis.get(TEXT))
        yield guarded
        await guard.close()


BROKEN = {
    guarded_ranking: {name: FAULTS[name].response for name in ("no response", "closed", "500")},
    guarded_redis: {
        "no response": SILENT,
        "closed": sends(),
        "no Redis": sends(whole(b"")),
        "loading": sends(b"-LOADING Redis is loading the dataset in memory\r\n"),
    },
}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("connect", "response"),
    [
        pytest.param(connect, response, id=f"{connect.__name__} {name}")
        for connect, faults in BROKEN.items()
        for name, response in faults.items()
    ],
)
async def test_after_three_failures_one_call_tests_the_server(
    connect: Any, response: Response, anyio_backend: str
) -> None:
    late = response is SILENT
    async with connect(IMPATIENT if late else PATIENT) as guarded:
        guarded.server.responses = repeat(response, 4)
        await guarded.fails(10)
        assert guarded.server.requests == 3
        assert guarded.breaker.state is BreakerState.OPEN
        guarded.now += 5
        results = await asyncio.gather(*(guarded.ask() for _ in range(5)), return_exceptions=True)
        assert {type(result) for result in results} == {UnavailableError}
        assert guarded.server.requests == 4
        guarded.now += 4.9
        await guarded.fails(1)
        guarded.now += 0.1
        await guarded.ask()
        await guarded.ask()
        assert guarded.server.requests == 6
        assert guarded.breaker.state is BreakerState.CLOSED


async def cancel(guarded: Guarded) -> None:
    """Cancels a call whose request the server has."""
    before = guarded.server.requests
    call = asyncio.ensure_future(guarded.ask())
    async with asyncio.timeout(IN_TIME):
        while guarded.server.requests == before:
            await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("connect", BROKEN)
async def test_a_cancelled_call_says_nothing_of_the_server(
    connect: Any, anyio_backend: str
) -> None:
    async with connect(PATIENT) as guarded:
        closed = sends()
        guarded.server.responses = iter([closed, closed, *[SILENT] * 4, closed, SILENT])
        await guarded.fails(2)
        for _ in range(4):
            await cancel(guarded)
        assert guarded.breaker.state is BreakerState.CLOSED
        await guarded.fails(1)
        assert guarded.breaker.state is BreakerState.OPEN
        guarded.now += 5
        await cancel(guarded)
        assert guarded.breaker.state is BreakerState.OPEN
        # The next call is the probe.
        await guarded.ask()
        assert guarded.breaker.state is BreakerState.CLOSED
