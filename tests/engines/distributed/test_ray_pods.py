"""The scripts of the pods that encode on Ray, with the head and one worker on this machine."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from core.service_process import free_port
from core.versions import IndexFolder, read_manifest
from tests.conftest import make_records, write_jsonl

ROOT = Path(__file__).parents[3]
COMPONENT = ROOT / "deploy" / "kubernetes" / "components" / "index-on-ray"
PORT = "6379"


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for Ray, whose path is short enough for its sockets; its processes are killed."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/".encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def command(file: str, port: int) -> list[str]:
    """Returns the command of the container that a patch of the component sets."""
    patch = yaml.safe_load((COMPONENT / file).read_text("utf-8"))
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    return [part.replace(PORT, str(port)) for part in container["command"]]


def test_the_pod_of_the_indexer_writes_what_its_workers_encode(
    tmp_path: Path, ray_folder: Path
) -> None:
    port = free_port()
    write_jsonl(tmp_path / "corpus.jsonl", make_records(60))
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": "/proc",  # cannot be written to, as in a pod
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "secret",
        "RAY_TMPDIR": str(ray_folder),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_WORKERS": "1",
        "CARE_INDEXES": str(tmp_path / "indexes"),
        "CARE_BUILDS": str(tmp_path / "builds"),
    }
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            command("worker-pods.yaml", port), env=variables, stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        arguments = ["corpus.jsonl", "--index=ray", "--pair=care-mini", "--threads=1"]
        head = subprocess.run(
            [*command("head.yaml", port), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
        )
        assert head.returncode == 0, head.stdout + head.stderr
        # The head has no processors for Ray, so that the worker encoded.
        index = IndexFolder(tmp_path / "indexes", "ray")
        assert read_manifest(index.version(index.active())).corpus.documents == 60
        assert worker.poll() is None, (tmp_path / "worker.log").read_text()
    finally:
        worker.kill()
        worker.wait(timeout=20)
