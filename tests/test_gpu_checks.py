"""The checks of `make test-gpu`, simulated so that they follow the code, and the tree they need."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu_checks
from tests.gpu.__main__ import NAMES

ROOT = Path(__file__).parents[1]
# Those that start processes of training have tests of their own; vLLM has its own environment.
_PROCESSES = {"lora-8b", "train-8b", "fsdp2", "vllm"}
_MOST_BYTES = 50_000_000


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("gpu")


@pytest.mark.train
@pytest.mark.parametrize("name", sorted({*NAMES} - _PROCESSES))
def test_a_check_runs_without_a_gpu(name: str, scratch: Path) -> None:
    from tests.gpu.checks import CHECKS

    assert [*CHECKS] == [*NAMES]
    # The checks with real shapes share their checkpoints.
    shared = CHECKS[name].__module__ == "tests.gpu.large"
    folder = scratch if shared else scratch / name
    folder.mkdir(exist_ok=True)
    figures = CHECKS[name](folder, gpu=False)
    assert figures and all(figures.values())


@pytest.mark.train
def test_a_plain_image_measures_the_query_encoder_and_says_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu.checks import CHECKS
    from tests.gpu.figures import NotInstalledError

    found = importlib.util.find_spec

    def find(name: str) -> object:
        return None if name in ("onnx", "sentence_transformers") else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    figures = CHECKS["query-0-3b"](tmp_path, gpu=False)
    assert {"one query", "batches of 64"} < figures.keys()
    for name in ("lora-8b", "train-8b", "fsdp2"):
        with pytest.raises(NotInstalledError, match="sentence_transformers"):
            CHECKS[name](tmp_path, gpu=False)


def test_a_check_that_is_ended_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(gpu_checks, "python", lambda *_, **__: str(script))
    row = gpu_checks.run("fsdp2", tmp_path, 1, on_gpu=False)
    assert (row["status"], row["seconds"]) == ("failed", 1)
    started = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    # An ended process is gone, or waits for its parent.
    assert not started.exists() or started.read_text().rpartition(") ")[2][0] == "Z"


def test_checks_that_would_take_longer_than_the_limit_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--limit", "0", "--json", str(tmp_path / "gpu.json")])
    assert gpu_checks.main() == 0
    rows = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["checks"]
    assert [(row["name"], row["status"]) for row in rows] == [(name, "not run") for name in NAMES]


def test_the_tree_without_the_weights_of_care_mini_is_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = [path.stat().st_size for path in paths if path.suffix != ".onnx" and path.is_file()]
    assert 1_000_000 < sum(sizes) < _MOST_BYTES
