import asyncio
import io
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI

from core.errors import CareError
from service.http.listener import Listener
from service.limits import Limits
from service.observe.metrics import Metrics
from service.server import DrainingServer, make_connections
from service.settings import Settings
from tests.errors import raises


def test_only_one_of_two_processes_listens_on_a_port() -> None:
    """Both can bind the address, load their indexes, and only one can listen."""
    one = Listener("127.0.0.1", 0)
    port = one.socket.getsockname()[1]
    other = Listener("127.0.0.1", port)
    assert one.listen(8) == f"http://127.0.0.1:{port}"
    with raises(CareError, "address_unavailable", host="127.0.0.1", port=port):
        other.listen(8)
    one.socket.close()


def test_an_address_that_another_process_serves_is_not_available() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = other.getsockname()
        with raises(CareError, "address_unavailable", host=host, port=port):
            Listener(host, port)


def test_several_sockets_of_one_service_share_a_port_and_others_cannot() -> None:
    listeners, name = Listener.group("127.0.0.1", 0, 3)
    address = listeners[0].socket.getsockname()
    assert {each.socket.getsockname() for each in listeners} == {address}
    # Before it listens, and after.
    with raises(CareError, "address_unavailable", host="127.0.0.1", port=address[1]):
        Listener.group(*address, 2)
    for each in listeners:
        each.listen(8)
    with raises(CareError, "address_unavailable", host="127.0.0.1", port=address[1]):
        Listener(*address)
    with name:
        for _ in range(8):
            socket.create_connection(address, timeout=5).close()
    for each in listeners:
        each.socket.close()
    again, name = Listener.group(*address, 1)
    again[0].socket.close()
    name.close()


def test_connections_are_refused_before_listen() -> None:
    listener = Listener("127.0.0.1", 0)
    address = listener.socket.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    listener.listen(8)
    socket.create_connection(address, timeout=5).close()
    listener.socket.close()


def test_an_ipv6_address_has_brackets_in_the_url() -> None:
    listener = Listener("::1", 0)
    assert listener.listen(8).startswith("http://[::1]:")
    listener.socket.close()


# A service whose application is replaced; a request occupies a thread of {executor}.
BUSY = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from fastapi import FastAPI
from service import server
from service.limits import Limits, Usages
from service.observe.metrics import Metrics
from service.settings import Settings

app, pool = FastAPI(), ThreadPoolExecutor(1)
idle = lambda: None
limits = Limits.of(Settings())
settings = Settings(port=0)
engine = SimpleNamespace(
    drain=idle, stop=idle, limits=limits, usages=Usages(), metrics=Metrics(), settings=settings
)
catalog = SimpleNamespace(stop=idle, budget=SimpleNamespace(descriptors=1))
app.state.service = SimpleNamespace(engine=engine, catalog=catalog)

def work():
    print("busy", flush=True)
    time.sleep(600)

@app.get("/")
async def busy():
    await asyncio.get_running_loop().run_in_executor({executor}, work)

server.create_app = lambda settings, writer: app
server._END_CONNECTIONS, server._CANCEL_REQUESTS, server._END_PROCESS = 0.1, 1, 2
server.serve(settings, lambda url: print(url, flush=True))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("executor", ["None", "pool"])
def test_a_busy_thread_does_not_keep_the_process_alive(executor: str) -> None:
    """Neither asyncio nor, at its end, the interpreter waits for it."""
    command = [sys.executable, "-c", BUSY.format(executor=executor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        url = urlsplit(process.stdout.readline().decode().split()[-1])
        with socket.create_connection((url.hostname, url.port), timeout=30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert process.stdout.readline() == b"busy\n"
            process.terminate()
            try:
                assert process.wait(30) == 0
            finally:
                process.kill()


class Drained:
    """Counts the calls of `drain`."""

    def __init__(self, drain_seconds: float) -> None:
        self.times = 0
        config = uvicorn.Config(FastAPI(), log_config=None)
        connections = make_connections(
            Settings(), replace(Limits.of(Settings()), connections=8), Metrics()
        )
        ready = lambda: sys.stdout.write("serving\n")  # noqa: E731
        end = ready, threading.Timer(0, lambda: None)
        self.server = DrainingServer(config, connections, self._drain, drain_seconds, *end)

    def _drain(self) -> None:
        self.times += 1

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGINT, None)

    def ends(self) -> bool:
        return asyncio.run(self.server.on_tick(1))


def test_the_first_signal_drains_and_the_second_or_the_time_shuts_down() -> None:
    drained = Drained(60)
    assert not drained.ends()
    drained.signal()
    assert (drained.times, drained.ends()) == (1, False)
    drained.signal()
    assert (drained.times, drained.ends()) == (2, True)
    for seconds in (0, 0.01):
        drained = Drained(seconds)
        drained.signal()
        time.sleep(2 * seconds)
        assert drained.ends()


def test_two_signals_do_not_abort_requests_in_flight() -> None:
    """Nor does the end of `drain_seconds`, which is not a third signal."""
    drained = Drained(0.01)
    drained.signal()
    drained.signal()
    time.sleep(0.05)
    assert drained.ends()
    assert not drained.server.force_exit
    drained.signal()
    assert drained.server.force_exit


def test_a_signal_during_the_announcement_shuts_down_cleanly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that waits for the line may stop the service at once."""
    drained = Drained(0)
    listener = Listener("127.0.0.1", 0)
    listener.listen(8)

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Impatient())
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        drained.server.run(sockets=[listener.socket])
    finally:
        signal.signal(signal.SIGINT, before)
    assert drained.times == 1
    assert not drained.server.force_exit
