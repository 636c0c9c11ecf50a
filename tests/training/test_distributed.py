import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import training
from evaluation.beir import write_split
from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH, write_gte_mlm
from tests.conftest import write_jsonl
from tests.training.conftest import (
    RunRecipe,
    only,
    teacher,
    write_recipe,
)
from tests.training.gathering import Model, texts
from tests.training.processes import run_in_two_processes
from tests.training.ranks import encode_slowly, train
from tests.training.runs import history_of
from training.distributed import TIMEOUT
from training.files import RECIPE, RESULT
from training.losses import info_nce, l2_normalize
from training.recipe import load_recipe
from training.run import run

pytestmark = pytest.mark.train


CARE_8B = Path(training.__file__).parent / "recipes" / "care-0.3b-8b.yaml"
SHARDED = ("contrastive-large", "joint")
STAGES = ("unsupervised", "contrastive-large", "align", "joint")


@pytest.fixture(scope="module")
def gte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gte_mlm(tmp_path_factory.mktemp("start") / "gte")


def paper_recipe(
    gte: Path,
    qwen3: Path,
    triples: Path,
    dev: Path,
    precision: str,
    dtype: str,
    without: Sequence[str],
) -> dict[str, Any]:
    """Returns the recipe of the paper's 8B pair with tiny models and few steps.

    In each batch are all texts, and there are no sampled negatives, so that the steps are the
    same with any number of processes.
    """
    settings = {
        "data": [{"triples": str(triples)}],
        "epochs": 3,
        "batch": len(TEXTS),
        "mini_batch": 2,
        "learning_rate": 1e-3,
        "warmup": 0,
        "dropout": 0,
        "log_every": 1,
        "checkpoint_every": 2,
    }
    stages = {name: dict(settings) for name in STAGES}
    stages["contrastive-large"] |= {"dimensions": [WIDTH // 2, WIDTH], "negatives": 0}
    stages["joint"] |= {"learning_rate": {"query": 1e-3, "document": 5e-4}, "negatives": 0}
    stages["align"]["batch"] = 2 * len(TEXTS)
    del settings["mini_batch"]
    stages |= {"retromae": settings, "teacher": {"data": settings["data"]}}
    for stage in stages.values():
        stage |= {"precision": precision}
    if precision == "bf16":
        # The processes' batches then have different numbers of documents and of mini-batches.
        stages["contrastive-large"] |= {"mini_batch": 1, "negatives": 2}
    return {
        "extends": str(CARE_8B),
        "query": {"start": str(gte), "max_length": MAX_LENGTH},
        "document": {
            "start": str(qwen3),
            "max_length": MAX_LENGTH,
            "dimension": WIDTH,
            "lora": {"r": 4, "alpha": 8},
            "dtype": dtype,
        },
        "dev": {"beir": str(dev), "every": 2, "batch": 2},
        "stages": stages | dict.fromkeys(without),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, gte: Path, qwen3: Path, triples: Path) -> Path:
    """A folder with runs of two processes; stages with sharded weights are interrupted once.

    `exact` is computed in float32. `shipped` has the recipe's precision, and RetroMAE, whose masks
    depend on the number of processes.
    """
    folder = tmp_path_factory.mktemp("ranks")
    write_jsonl(folder / "corpus.jsonl", [{"_id": text, "text": text} for text in TEXTS])
    write_split(folder, "dev", {"q": "发烧"}, {"q": {TEXTS[3]: 1}})
    others = ["contrastive", "teacher", "align", "joint", "unsupervised"]
    jobs = {
        "exact": ("fp32", "float32", ["contrastive", "retromae"]),
        "shipped": ("bf16", "bfloat16", others),
    }
    for name, job in jobs.items():
        write_recipe(folder / f"{name}.yaml", paper_recipe(gte, qwen3, triples, folder, *job))
    run_in_two_processes(train, folder, [*jobs])
    return folder


def test_gradients_of_two_processes_equal_those_of_one_process_with_all_texts(ranks: Path) -> None:
    model = Model()
    (q0, d0), (q1, d1) = texts(0), texts(1)
    found = l2_normalize(model.linear(torch.cat([d0, d1])))
    queries = l2_normalize(model.linear(torch.cat([q0, q1])))
    info_nce(queries, found, torch.tensor([0, 1, 2, 3]), 0.1).backward()
    for process in range(2):
        gradient = torch.load(ranks / f"gradients{process}.pt")
        torch.testing.assert_close(gradient, model.linear.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["exact", "shipped"])
def test_all_processes_hold_the_same_weights_and_the_loss_falls(ranks: Path, name: str) -> None:
    first, second = (
        json.loads((ranks / f"rank{rank}.json").read_text())[name] for rank in range(2)
    )
    assert first == second
    assert first.pop("timeout") == TIMEOUT.total_seconds()
    for stage, facts in first.items():
        assert facts["dtypes"] == ["torch.float32"]
        assert facts["sharded"] == (stage in SHARDED)
        assert facts["attempts"] == (2 if stage in SHARDED else 1)
        history = history_of(ranks / name / "stages", stage)
        losses = [entry["loss"] for entry in history if "loss" in entry]
        assert losses[-1] < losses[0]


def test_two_processes_train_the_same_pair_as_one(ranks: Path, gte: Path) -> None:
    """Also in the stages whose weights are sharded, and after an interruption."""
    run(load_recipe(ranks / "exact.yaml"), ranks / "one", 0, lambda _: None)
    start = load_file(gte / "model.safetensors")
    for stage in STAGES:
        one, two = (only(ranks / out / "stages", f"{stage}-*") for out in ("one", "exact"))
        for first, again in zip(*(history_of(f.parent, stage) for f in (one, two)), strict=True):
            assert again == pytest.approx(first, rel=0.01)
        for path in one.glob("*/*model.safetensors"):
            weights, other = load_file(path), load_file(two / path.relative_to(one))
            assert weights.keys() == other.keys()
            # The output matrices of an adapter start as 0; its input matrices hardly move.
            keys = [key for key in weights if "lora_A" not in key]
            moved = [weights[key] - start.get(key, 0) for key in keys]
            apart = [weights[key] - other[key] for key in keys]
            assert norm(apart) < 0.02 * norm(moved)


def test_processes_wait_for_one_that_encodes_longer_than_the_time_out(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """Each process encodes its own shards; the files equal those of one process."""
    base["stages"] = [teacher()]
    recipe = write_recipe(tmp_path / "two.yaml", base)
    run_in_two_processes(encode_slowly, recipe, tmp_path / "two")
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
