"""vLLM's OpenAI server in a process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

KEY = "sk-test"
START_SECONDS = 240


@dataclass(frozen=True)
class Server:
    """A server that runs, at `url`."""

    url: str
    process: "subprocess.Popen[bytes]"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


@contextmanager
def vllm_server(model: Path, name: str, max_length: int, log: Path) -> Iterator[Server]:
    """Serves a pooling model under a name, with the API key `KEY`."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", name, "--runner", "pooling"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(max_length), "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_API_KEY": KEY},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_healthy(server, log)
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_healthy(server: Server, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if httpx2.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    pytest.fail(f"vLLM's server did not start:\n{log.read_text(errors='replace')[-4000:]}")
