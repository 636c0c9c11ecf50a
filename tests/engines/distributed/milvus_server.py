"""milvus-lite in a separate process, with the protocol of Milvus."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pymilvus import MilvusClient

from core.service_process import free_port
from stores.registry import MilvusAddress, VectorStores


class MilvusAt:
    """A Milvus that runs at an address."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @property
    def stores(self) -> VectorStores:
        """Stores that are connected to the server."""
        return VectorStores(MilvusAddress(self.uri))

    @contextmanager
    def client(self) -> Iterator[MilvusClient]:
        """A separate client for the test."""
        client = MilvusClient(self.uri, timeout=20, dedicated=True)
        try:
            yield client
        finally:
            client.close()

    def clear(self) -> None:
        """Drops all collections."""
        with self.client() as client:
            for collection in client.list_collections():
                # Since 2.5.5 a collection that has an alias is not dropped.
                for alias in client.list_aliases(collection)["aliases"]:
                    client.drop_alias(alias)
                client.drop_collection(collection)


class MilvusServer(MilvusAt):
    """A Milvus on the loopback interface that keeps its port and data over restarts.

    Args:
        folder: Folder of its data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port: int = free_port()
        super().__init__(f"http://127.0.0.1:{self._port}")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it accepts connections."""
        command = [sys.executable, "-m", "milvus_lite", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--data-dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except OSError:
                assert self._process.poll() is None, "milvus-lite did not start"
                assert time.monotonic() < deadline, "milvus-lite does not listen"
                time.sleep(0.05)

    def hang(self) -> None:
        """Suspends the process: connections stay open without responses."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes the process."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process, suspended or not."""
        if self._process:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process, "milvus-lite does not run"
        self._process.send_signal(number)


@contextmanager
def run_milvus(folder: Path) -> Iterator[MilvusServer]:
    """Runs a Milvus for the duration of the block."""
    server = MilvusServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
