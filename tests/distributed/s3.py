"""An object store that speaks S3, over a folder."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.tools import find


@dataclass(frozen=True)
class S3:
    """A running store: its folder, one bucket, and what its clients read to find it."""

    folder: Path
    bucket: str
    environment: dict[str, str]


@contextmanager
def serve_s3(folder: Path) -> Iterator[S3]:
    """Serves a folder until the block ends."""
    (folder / "bucket").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    command = [find("rclone"), "serve", "s3", str(folder), "--addr", address]
    command += ["--auth-key", "key,secret", "--config", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        environment = {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{address}",
        }
        yield S3(folder, "bucket", environment)
    finally:
        process.kill()
        process.wait()
