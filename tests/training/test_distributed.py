import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import TEXTS
from tests.training.conftest import RunRecipe, align, joint, only, teacher, write_recipe
from tests.training.encoding import encode_slowly
from tests.training.gathering import Model, texts, work
from training.files import RECIPE, RESULT
from training.losses import info_nce, l2_normalize

pytestmark = pytest.mark.train


def test_gradients_of_two_processes_equal_those_of_one_process_with_all_texts(
    tmp_path: Path,
) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2, daemon=True)
    model = Model()
    (q0, d0), (q1, d1) = texts(0), texts(1)
    found = l2_normalize(model.linear(torch.cat([d0, d1])))
    queries = l2_normalize(model.linear(torch.cat([q0, q1])))
    info_nce(queries, found, torch.tensor([0, 1, 2, 3]), 0.1).backward()
    for process in range(2):
        gradient = torch.load(tmp_path / f"{process}.pt")
        torch.testing.assert_close(gradient, model.linear.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_recipe_run_by_two_processes_gives_the_same_pair_as_one_process(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """Each batch holds all texts, so that both runs see the same texts in a step."""
    exact = {"epochs": 4, "dropout": 0.0}
    base["stages"] = [
        teacher(),
        align(batch=2 * len(TEXTS), **exact),
        joint(batch=len(TEXTS), negatives=0, mini_batch=2, **exact),
    ]
    recipe = write_recipe(tmp_path / "two.yaml", base)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "care", "train", str(recipe)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run_recipe(base, out="one")
    for name in ("align", "joint"):
        one, two = (next((tmp_path / out / "stages").glob(f"{name}-*")) for out in ("one", "two"))
        (first,), (again,) = (json.loads((f / "metrics.json").read_text()) for f in (one, two))
        assert again == pytest.approx(first, rel=1e-3)
        for path in one.glob("*/model.safetensors"):
            weights = load_file(path)
            other = load_file(two / path.relative_to(one))
            start = load_file(Path(base[path.parent.name]["start"]) / path.name)
            start = {key.removeprefix("model.").removeprefix("bert."): start[key] for key in start}
            moved = [weights[key] - start[key] for key in weights]
            apart = [weights[key] - other[key] for key in weights]
            assert norm(apart) < 0.02 * norm(moved)


def test_processes_wait_for_one_that_encodes_longer_than_the_time_out(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """Each process encodes its own shards; the files equal those of one process."""
    base["stages"] = [teacher()]
    recipe = write_recipe(tmp_path / "two.yaml", base)
    torch.multiprocessing.spawn(encode_slowly, (str(recipe), str(tmp_path / "two")), nprocs=2)
    run_recipe(base, out="one")
    one, two = (only(tmp_path / out / "stages", "teacher-*") for out in ("one", "two"))
    names, again = (
        sorted(path.name for path in folder.iterdir() if path.name not in (RESULT, RECIPE))
        for folder in (one, two)
    )
    assert names == again
    assert sum(name.startswith("shard-") for name in names) == 2 * 3
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    encoded = [int((tmp_path / f"two.{process}").read_text()) for process in range(2)]
    assert min(encoded) > 0 and sum(encoded) == 2 * len(TEXTS)


def norm(values: list[Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in values]).norm())
