"""Lines of JSON that are written while they arrive, over sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from care.writer import Writer
from core.errors import CareError, CorpusError
from core.writes import Write, Written
from service.access.api_keys import new_key
from service.app import create_app
from service.routes import document_stream
from service.settings import Settings
from tests.encoders import BigramEncoder
from tests.service.live import HeldLive, running_writer
from tests.service.sockets import Client, serving, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

HEAD = b"PUT /documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
LIMIT = 50_000

Connecting = Callable[..., AbstractAsyncContextManager[Callable[[], Awaitable[Client]]]]


@pytest.fixture
def connecting(live: HeldLive, tmp_path: Path, settings: Settings) -> Iterator[Connecting]:
    """Starts a service, and yields a function that connects to it."""
    with running_writer(tmp_path, Writer(live, 1 << 20)) as path:

        @asynccontextmanager
        async def start(**changes: Any) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
            changed = settings.model_copy(update={"max_body_bytes": LIMIT} | changes)
            app = create_app(changed, BigramEncoder(), writer=path)
            async with app.router.lifespan_context(app), serving(app) as server:
                yield server.connect

        yield start


def record(i: int, chars: int = 10) -> dict[str, Any]:
    return {"_id": f"n{i}", "text": f"第{i}号" + "文" * chars}


def line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def request(content: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def asked(client: Client, content: bytes) -> tuple[int, Any]:
    status, _, body = await client.request(request(content))
    return status, json.loads(body)


async def test_a_body_of_any_length_is_written_in_bounded_groups(
    connecting: Connecting, live: HeldLive
) -> None:
    content = b"".join(line(record(i, 300)) for i in range(150))
    assert len(content) > 2 * LIMIT
    async with connecting() as connect:
        client = await connect()
        status, answer = await asked(client, content)
        assert (status, answer["added"], answer["rejected"]) == (200, 150, [])
        assert answer["more_rejected"] == 0
        sizes = [sum(len(line(each)) for each in write.put) for write in live.writes]
        assert len(sizes) > 4 and max(sizes) < LIMIT // 2
        status, answer = await asked(client, content)
        assert (status, answer["added"], answer["unchanged"]) == (200, 0, 150)


async def test_lines_that_are_no_documents_are_named(
    connecting: Connecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        *(b"\xef\xbb\xbf" + line(record(0)), b"\n", b'{"_id": "secret\n', line([1]), b" \r\n"),
        *(line({"_id": "bad", "text": " "}), line(record(1)), line({"_id": 2}).rstrip()),
    ]
    async with connecting() as connect:
        status, answer = await asked(await connect(), b"".join(lines))
        assert (status, answer["added"]) == (200, 2)
        found = [(one["line"], one["position"], one["code"]) for one in answer["rejected"]]
        assert found == [(n, p, "invalid_record") for n, p in ((3, 1), (4, 2), (6, 3), (8, 5))]
        assert "JSON" in answer["rejected"][0]["reason"]
        assert "secret" not in str(answer)
        monkeypatch.setattr(document_stream, "_MOST_LISTED", 3)
        _, answer = await asked(await connect(), b"".join(lines))
        assert (len(answer["rejected"]), answer["more_rejected"]) == (3, 1)
        for empty in (b"", b"\n \n"):
            status, answer = await asked(await connect(), empty)
            assert (status, answer["code"]) == (422, "invalid_request")


async def test_a_slow_sender_has_its_lines_written_meanwhile(
    connecting: Connecting, live: HeldLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_stream, "_PATIENCE", 0.05)
    async with connecting(timeout_ms=1000) as connect:
        client = await connect()
        await client.send(CHUNKED)
        for i in range(4):  # the whole takes longer than the deadline of a request
            await asyncio.sleep(0.3)
            content = line(record(i))
            await client.send(chunk(content[:9]) + chunk(content[9:]))
            await until(lambda: len(live.writes) > i)  # noqa: B023
        status, _, body = await client.request(END)
        assert (status, json.loads(body)["added"]) == (200, 4)
        late = await connect()
        await late.send(CHUNKED + chunk(line(record(9))))
        status, _, body = await late.answer()
        assert (status, json.loads(body)["code"]) == (504, "deadline_exceeded")
        assert "lines up to 1 are written" in json.loads(body)["detail"]


async def test_what_was_written_before_a_connection_breaks_stays(
    connecting: Connecting, live: HeldLive
) -> None:
    content = b"".join(line(record(i)) for i in range(80))
    async with connecting() as connect:
        client = await connect()
        await client.send(CHUNKED + chunk(content[: len(content) * 3 // 4]))
        await until(lambda: len(live.writes) > 0)
        client.writer.transport.abort()
        status, answer = await asked(await connect(), content)
        assert status == 200
        assert answer["added"] + answer["unchanged"] == 80
        assert answer["unchanged"] >= 8


async def test_a_line_is_bounded(connecting: Connecting, live: HeldLive) -> None:
    async with connecting(max_documents=10) as connect:
        content = line(record(1)) + b" " * (LIMIT // 2 + 1)
        status, answer = await asked(await connect(), content)
        assert (status, answer["code"]) == (413, "body_too_long")
        assert "line 2" in answer["detail"]
        many = b'{"_id": "1", "text": "a", "metadata": {"a": [' + b"1," * 6000 + b"1]}}\n"
        status, answer = await asked(await connect(), many)
        assert (status, answer["added"], len(answer["rejected"])) == (200, 0, 1)


async def test_a_full_queue_delays_a_stream_until_its_deadline(
    connecting: Connecting, live: HeldLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, waits = live.commit, [0.01, 0.02, 0.03]

    def commit(writes: Any) -> Any:
        if not waits:
            return real(writes)
        wait = waits.pop(0)
        return [CareError("full", code="overloaded", retry_after=wait) for _ in writes]

    monkeypatch.setattr(live, "commit", commit)
    async with connecting() as connect:
        status, answer = await asked(await connect(), line(record(1)))
        assert (status, answer["added"], waits) == (200, 1, [])
        waits.append(70.0)
        status, fields, body = await (await connect()).request(request(line(record(2))))
        assert (status, json.loads(body)["code"]) == (429, "overloaded")
        assert fields["retry-after"] == "70"


async def test_a_group_has_the_deadline_of_a_request(
    connecting: Connecting, live: HeldLive
) -> None:
    live.hold.clear()
    async with connecting(timeout_ms=400) as connect:
        status, answer = await asked(await connect(), line(record(1)))
        assert (status, answer["code"]) == (504, "deadline_exceeded")
        live.hold.set()
        status, answer = await asked(await connect(), line(record(1)))
        assert (status, answer["unchanged"]) == (200, 1)


async def test_a_service_that_ends_stops_a_stream(connecting: Connecting, live: HeldLive) -> None:
    live.hold.clear()
    content = b"".join(line(record(i)) for i in range(100))
    async with connecting() as connect:
        client = await connect()
        await client.send(request(content))
        await until(live.began.is_set)
        server = connect.__self__  # type: ignore[attr-defined]
        server.app.state.service.engine.drain()
        live.hold.set()
        status, _, body = await client.answer()
        assert (status, json.loads(body)["code"]) == (503, "shutting_down")
        assert "lines up to 8 " in json.loads(body)["detail"]


@pytest.mark.parametrize("error", [CareError, CorpusError])
async def test_an_error_says_up_to_which_line_documents_are_written(
    connecting: Connecting,
    live: HeldLive,
    monkeypatch: pytest.MonkeyPatch,
    error: type[CareError],
) -> None:
    monkeypatch.setattr(document_stream, "_PATIENCE", 0.05)
    async with connecting() as connect:
        client = await connect()
        await client.send(CHUNKED + chunk(line(record(0))))
        await until(lambda: len(live.writes) == 1)
        live.failure = error("the disk is full", code="disk_full")
        status, _, body = await client.request(chunk(line(record(1))) + END)
        assert (status, json.loads(body)["code"]) == (
            503 if error is CareError else 422,
            "disk_full",
        )
        assert "lines up to 1 are written" in json.loads(body)["detail"]


async def test_a_group_that_waits_for_the_queue_is_charged_once(
    connecting: Connecting, live: HeldLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    commit, full = live.commit, [CareError("full", code="overloaded", retry_after=0.01)] * 3

    async def charge(_: object, documents: int) -> None:
        charged.append(documents)

    def commit_later(writes: Sequence[Write]) -> list[Written | CareError]:
        return [full.pop()] if full else commit(writes)

    monkeypatch.setattr(document_stream, "charge_rate", charge)
    monkeypatch.setattr(live, "commit", commit_later)
    async with connecting() as connect:
        status, answer = await asked(await connect(), line(record(0)) + line(record(1)))
    assert (status, answer["added"], charged) == (200, 2, [2])


async def test_a_key_that_is_removed_meanwhile_writes_no_more(
    connecting: Connecting, live: HeldLive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(document_stream, "_PATIENCE", 0.05)
    monkeypatch.setattr("service.access.key_file._READ_EVERY", 0.05)
    (secret, entry), (_, other) = (new_key(name, "write") for name in ("old", "new"))
    file = tmp_path / "keys"
    file.write_text(f"{entry}\n")
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n" % secret.encode())
    async with connecting(api_keys_file=file) as connect:
        client = await connect()
        await client.send(head + chunk(line(record(0))))
        await until(lambda: len(live.writes) == 1)
        file.write_text(f"{other}\n")
        await asyncio.sleep(0.5)
        status, _, body = await client.request(chunk(line(record(1))) + END)
        problem = json.loads(body)
        assert (status, problem["code"]) == (401, "unauthorized")
        assert "lines up to 1 are written" in problem["detail"]
        assert len(live.writes) == 1
