"""The writer process: it is started when it is wanted, and ends with its service."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from care import writer
from core.errors import CorpusError, EmbeddingServerError
from core.writes import Write, Written, frame, read_frame
from service import writer_process
from service.writer_process import WriterProcess


async def ask(path: str, message: Any) -> Any:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(message if isinstance(message, bytes) else frame(message))
    writer.write_eof()
    try:
        return (await read_frame(reader))[0]
    finally:
        writer.close()


def children() -> list[int]:
    """The writer processes that this one has started."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    ids = [int(id_) for each in found for id_ in each.read_text().split()]
    return [i for i in ids if b"care.writer" in Path(f"/proc/{i}/cmdline").read_bytes()]


STATE = {"state": "none", "index": "test"}


def test_a_request_starts_the_process_and_starts_it_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_process, "_PAUSE", 0.0)

    async def use(process: WriterProcess) -> None:
        running = asyncio.get_running_loop().create_task(process.run())
        await asyncio.sleep(0.1)
        assert children() == []
        assert (await ask(process.path, STATE))["error"]["code"] == "unknown_write"
        (first,) = children()
        assert os.getpriority(os.PRIO_PROCESS, first) == os.getpriority(os.PRIO_PROCESS, 0) + 5
        for number in (signal.SIGINT, signal.SIGTERM):  # the service gets them too, and ends it
            os.kill(first, number)
        too_long = await ask(process.path, b"\xff\xff\xff\xff")
        assert too_long["error"]["code"] == "frame_too_long"
        with pytest.raises(asyncio.IncompleteReadError):
            await ask(process.path, frame(STATE)[:-1])
        assert children() == [first]
        os.kill(first, signal.SIGKILL)
        assert (await ask(process.path, STATE))["error"]["code"] == "unknown_write"
        assert first not in children()
        running.cancel()

    with WriterProcess() as process:
        asyncio.run(use(process))
    assert children() == []
    assert not Path(process.path).parent.exists()
    (line,) = [each.fields for each in caplog.records if hasattr(each, "fields")]  # type: ignore[attr-defined]
    assert line == {"code": "writer_ended", "reason": "it ended by signal 9"}


class LargeIndex:
    """An index whose base should be built anew after each commit."""

    is_large = True

    def commit(self, writes: Sequence[Write]) -> list[Written]:
        return [Written("v", 1) for _ in writes]

    def merge(self) -> bool:
        return False


class Indexes:
    def __init__(self, live: type[LargeIndex] = LargeIndex) -> None:
        self._live = live

    def open(self, name: str) -> LargeIndex:
        return self._live()

    def create(self, name: str, like: str, fields: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def delete(self, name: str) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize(("status", "times"), [(0, 2), (1, 1)])
def test_a_base_is_built_anew_once_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, times: int
) -> None:
    told = tmp_path / "told"
    script = f"import sys; open({str(told)!r}, 'a').write(sys.argv[1]); sys.exit({status})"
    monkeypatch.setattr(writer, "_REBUILD", (sys.executable, "-c", script))

    async def use() -> None:
        own = writer.Writer(Indexes(), 1 << 20)
        for _ in range(2):
            await own._queue("test").add(Write("test"), 1)
            await asyncio.gather(*(q.committing for q in own._queues.values() if q.committing))
            assert own._rebuilding
            await own._rebuilding

    asyncio.run(use())
    assert told.read_text() == "test" * times


def test_a_writer_that_ends_waits_for_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time; time.sleep(600)"
    monkeypatch.setattr(writer, "_REBUILD", (sys.executable, "-c", script))

    async def use() -> None:
        own = writer.Writer(Indexes(), 1 << 20)
        await own._queue("test").add(Write("test"), 1)
        await asyncio.gather(*(q.committing for q in own._queues.values() if q.committing))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(own.close(), 10)
        assert own._rebuilding and own._rebuilding.cancelled()

    asyncio.run(use())


def test_the_indexes_that_were_written_last_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MOST_OPEN", 4)
    opened: list[str] = []

    class Small(LargeIndex):
        is_large = False

    class Noting(Indexes):
        def open(self, name: str) -> LargeIndex:
            opened.append(name)
            return Small()

    async def use() -> None:
        own = writer.Writer(Noting(), 1 << 20)
        for name in "abcdabcdeea":
            await own._queue(name).add(Write(name), 1)
            await asyncio.gather(*(q.committing for q in own._queues.values() if q.committing))

    asyncio.run(use())
    assert "".join(opened) == "abcdea"


def test_why_an_encoder_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(LargeIndex):
        is_large = False

        def commit(self, writes: Sequence[Write]) -> list[Any]:
            failed = EmbeddingServerError("no server", code="server_unreachable")
            return [failed, CorpusError("no text", code="empty_corpus"), failed][: len(writes)]

    async def use() -> None:
        own = writer.Writer(Indexes(Failing), 1 << 20)
        writes = [own._queue("test").add(Write("test"), 1) for _ in range(3)]
        codes = [
            type(one).__name__ for one in await asyncio.gather(*writes, return_exceptions=True)
        ]
        assert codes == ["EmbeddingServerError", "CorpusError", "EmbeddingServerError"]

    asyncio.run(use())
    (line,) = [each.fields for each in caplog.records if hasattr(each, "fields")]  # type: ignore[attr-defined]
    assert line == {"code": "server_unreachable", "reason": "no server", "index": "test"}
