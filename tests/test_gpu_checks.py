"""The checks of `make test-gpu`, simulated so that they follow the code, and the tree they need."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_the_tree_without_the_weights_of_care_mini_is_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = [path.stat().st_size for path in paths if path.suffix != ".onnx" and path.is_file()]
    assert 1_000_000 < sum(sizes) < _MOST_BYTES
