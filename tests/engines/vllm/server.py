"""vLLM's OpenAI server in a process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from core.service_process import free_port
from tests.engines.vllm.preloaded import CONTEXT, serve

KEY = "sk-test"
POOLING = ("--runner", "pooling")
_START_SECONDS = 240


@dataclass(frozen=True)
class Server:
    """A server that runs, at `url`."""

    url: str
    process: Any

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(60)
        assert self.process.exitcode is not None


@contextmanager
def vllm_server(
    model: Path, name: str, max_length: int, log: Path, options: Sequence[str] = POOLING
) -> Iterator[Server]:
    """Serves a model, by default a pooling model, under a name, with the API key `KEY`."""
    port = free_port()
    arguments = [
        *("--model", str(model), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(max_length), "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(256 << 20), *options),
    ]
    process = CONTEXT.Process(target=serve, args=(arguments, {"VLLM_API_KEY": KEY}, log))
    process.start()
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_healthy(server, log)
        yield server
    finally:
        server.stop()


def _wait_until_healthy(server: Server, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.process.is_alive():
        try:
            if httpx2.get(f"{server.url}/health", timeout=5, verify=False).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.1)
    pytest.fail(f"vLLM's server did not start:\n{log.read_text(errors='replace')[-4000:]}")
