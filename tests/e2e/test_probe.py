"""The event loop that measures its callbacks."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.probe import ProbedLoop, ProbeLog, Summary

WORK_MS = 30.0


def work() -> None:
    """Takes `WORK_MS` of this thread's processor time."""
    end = time.thread_time() + WORK_MS / 1000
    while time.thread_time() < end:
        pass


class Worker(asyncio.Protocol):
    """Works when it receives data."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        work()
        self._transport.write(data)


Run = Callable[[Callable[[], Awaitable[None]]], Summary]


@pytest.fixture
def probed(tmp_path: Path) -> Iterator[Run]:
    """Runs a coroutine in a probed loop and returns what the loop wrote."""
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(main: Callable[[], Awaitable[None]]) -> Summary:
        log = ProbeLog(path)
        loop = ProbedLoop(descriptor)
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()
        return log.summary()

    yield run
    os.close(descriptor)


def test_a_step_of_a_task_is_measured_by_its_processor_time(probed: Run) -> None:
    async def wait_and_work() -> None:
        time.sleep(0.1)  # noqa: ASYNC251 (takes no processor time)
        work()

    found = probed(wait_and_work)
    assert WORK_MS <= found.callback_ms < 3 * WORK_MS
    assert found.callback.endswith("wait_and_work")
    assert found.lag_ms >= 100


def test_callbacks_of_timers_threads_and_protocols_are_measured(probed: Run) -> None:
    async def timer() -> None:
        asyncio.get_running_loop().call_later(0.01, work)
        await asyncio.sleep(0.1)

    async def thread() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.to_thread(loop.call_soon_threadsafe, work)
        loop.call_soon(done.set)
        await done.wait()

    async def protocol() -> None:
        server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"a")
        assert await reader.read(1) == b"a"
        writer.close()
        server.close()

    for main in (timer, thread, protocol):
        assert WORK_MS <= probed(main).callback_ms < 3 * WORK_MS


def test_a_loop_that_only_waits_has_no_long_callback(probed: Run) -> None:
    found = probed(lambda: asyncio.sleep(0.1))
    assert (found.callback_ms, found.callback) == (0, "")


def test_nearly_all_processor_time_of_the_loop_is_measured(probed: Run) -> None:
    async def work_often() -> None:
        for _ in range(40):
            work()
            await asyncio.sleep(0.001)

    assert 0.9 < probed(work_often).measured <= 1.1
