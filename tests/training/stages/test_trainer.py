import errno
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from care.cli.main import main
from core.errors import CareError
from tests.errors import raises
from tests.training.conftest import (
    DATA,
    RunRecipe,
    align,
    joint,
    only,
    pair_of,
    teacher,
    write_recipe,
)
from tests.training.processes import forkserver
from tests.training.runs import history_of, limit_file_size, same, weights
from training.encoder import Encoder
from training.errors import TrainingError
from training.stages.trainer import StageTrainer, last_checkpoint

pytestmark = pytest.mark.train

BOTH = ("interrupted", "uninterrupted")


def test_a_killed_run_resumes_to_the_same_weights(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """Dropout and sampled negatives must be the same as without an interruption."""
    changes = {"batch": 2, "epochs": 4, "dropout": 0.2, "checkpoint_every": 3}
    base["stages"] = [joint(kind="contrastive", **changes)]
    path = write_recipe(tmp_path / "killed.yaml", base)
    words = ["train", str(path), "--out", str(tmp_path / "killed")]
    processes = forkserver()
    reached = processes.Event()
    process = processes.Process(target=train_8_steps, args=(words, tmp_path / "stderr", reached))
    process.start()
    assert reached.wait(timeout=120)
    process.kill()
    process.join()
    assert b"\r" not in (tmp_path / "stderr").read_bytes()
    stages = tmp_path / "killed" / "stages"
    assert list(stages.glob("contrastive-*")) == []
    kept = last_checkpoint(only(stages, ".*/checkpoints"))
    assert kept is not None and kept.name == "checkpoint-6"
    # An incomplete checkpoint, which the kill may leave.
    (kept.with_name("checkpoint-9999")).mkdir()
    pair = pair_of(run_recipe(base, out="killed"))
    history = history_of(stages, "contrastive")
    assert [e["step"] for e in history] == [1, 10]
    uninterrupted = pair_of(run_recipe(base, out="uninterrupted"))
    assert same(
        pair.folder / pair.query.weights, uninterrupted.folder / uninterrupted.query.weights
    )


def test_a_run_interrupted_after_its_last_step_does_not_train_further(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    base["stages"] = [joint(train=["query"], epochs=4, max_steps=3, log_every=1)]
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "save", full)
        with raises(CareError, "input_output"):
            run_recipe(base, out="interrupted")
    pairs = [pair_of(run_recipe(base, out=out)) for out in BOTH]
    logs = [history_of(tmp_path / out / "stages", "joint") for out in BOTH]
    assert [[entry["step"] for entry in log] for log in logs] == [[1, 2, 3], [1, 2, 3]]
    first, second = pairs
    assert same(first.folder / first.query.weights, second.folder / second.query.weights)


def train_8_steps(words: list[str], stderr: Path, reached: Event) -> None:
    """Runs a command of `care` in this process until its ninth step, and waits to be killed."""
    sys.stderr = stderr.open("w", buffering=1)
    step, steps = StageTrainer.training_step, count(1)

    def stop(*arguments: Any) -> torch.Tensor:
        if next(steps) == 9:
            reached.set()
            threading.Event().wait()
        return step(*arguments)

    StageTrainer.training_step = stop
    main(words)


@contextmanager
def interrupted_at_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupts a run after it has saved its first checkpoint."""
    save = StageTrainer._save_checkpoint

    def save_and_interrupt(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StageTrainer, "_save_checkpoint", save_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_learned_temperature_is_resumed(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"epochs": 4, "checkpoint_every": 2, "learning_rate": 1e-2}
    base["stages"] = [joint(kind="unsupervised", **changes)]
    with interrupted_at_checkpoint(monkeypatch):
        run_recipe(base, out="interrupted")
    partial = only(tmp_path / "interrupted" / "stages", ".unsupervised-*")
    assert last_checkpoint(partial / "checkpoints") is not None
    first, second = (pair_of(run_recipe(base, out=out)) for out in BOTH)
    logs = [history_of(tmp_path / out / "stages", "unsupervised") for out in BOTH]
    assert logs[0][-1]["temperature"] == logs[1][-1]["temperature"]
    assert same(first.folder / first.query.weights, second.folder / second.query.weights)


def test_each_side_is_trained_at_its_learning_rate_also_after_an_interruption(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its first step AdamW changes each weight by the learning rate."""
    rates = {"query": 1e-3, "document": 1e-4}
    base["stages"] = [joint(learning_rate=rates, warmup=0, max_steps=2, checkpoint_every=1)]
    base["document"]["lora"] = {"r": 4, "alpha": 8}
    with interrupted_at_checkpoint(monkeypatch):
        run_recipe(base, out="interrupted")
    first = load_file(next(tmp_path.glob("interrupted/stages/.joint-*/*/*/trained.safetensors")))
    # The output matrix of a new adapter is 0.
    (output, *_) = [value for name, value in first.items() if "lora_B" in name]
    assert float(output.abs().max()) == pytest.approx(rates["document"], rel=0.01)
    name = "embeddings.LayerNorm.bias"
    moved = first[f"encoders.query.model.{name}"] - weights(Path(base["query"]["start"]))[name]
    assert float(moved.abs().max()) == pytest.approx(rates["query"], rel=0.01)
    for out in BOTH:
        run_recipe(base, out=out)
    for side in ("query/model.safetensors", "document/adapter_model.safetensors"):
        one, two = (load_file(only(tmp_path / out / "stages", f"joint-*/{side}")) for out in BOTH)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_interpolated_weights_lie_between_those_before_and_after_also_after_an_interruption(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = joint(train=["query"], epochs=4, checkpoint_every=2)
    base["stages"] = [stage]
    trained = pair_of(run_recipe(base, out="trained"))
    base["stages"] = [stage | {"interpolation": 0.75}]
    with interrupted_at_checkpoint(monkeypatch):
        run_recipe(base, out="interrupted")
    before = weights(Path(base["query"]["start"]))
    after = weights(trained.folder / trained.query.weights)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    for out in BOTH:
        made = pair_of(run_recipe(base, out=out))
        for name, value in weights(made.folder / made.query.weights).items():
            expected = 0.25 * before[name] + 0.75 * after[name]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("stage", "rates"),
    [
        ({"kind": "joint"}, ["query"]),
        ({"kind": "joint", "train": ["query"]}, ["query", "document"]),
        ({"kind": "align"}, ["query", "document"]),
        ({"kind": "unsupervised"}, ["query"]),
    ],
)
def test_rates_by_side_need_a_stage_that_trains_both_encoders_and_a_rate_for_each(
    base: dict[str, Any], run_recipe: RunRecipe, stage: dict[str, Any], rates: list[str]
) -> None:
    base["stages"] = [stage | {"data": DATA, "learning_rate": dict.fromkeys(rates, 1e-4)}]
    with raises(TrainingError, "invalid_value", key=f"stages.{stage['kind']}"):
        run_recipe(base)


def test_processes_with_different_weights_are_an_error(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other process has the next checksum; its weights are finite too."""
    monkeypatch.setattr("training.stages.trainer.gather", lambda number: [number, number + 1])
    base["stages"] = [joint(train=["query"], max_steps=1)]
    with raises(TrainingError, "weights_differ", key="stages.joint"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("joint-*")) == []


def test_a_full_disk_at_a_checkpoint_leaves_no_incomplete_checkpoint(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(), align(checkpoint_every=1)]
    run_recipe(base | {"stages": [teacher()]})
    with limit_file_size(64_000), raises(CareError, "input_output") as caught:
        run_recipe(base)
    assert Path(caught.value.fields["path"]).name == "checkpoint-1"
    stages = tmp_path / "out" / "stages"
    assert list(stages.glob("align-*")) == []
    assert last_checkpoint(only(stages, ".align-*/checkpoints")) is None
    run_recipe(base)


def test_a_loss_that_is_not_finite_stops_the_run(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(), align(name="first", epochs=20, learning_rate=1e30, warmup=0.0)]
    with raises(TrainingError, "not_finite", key="stages.first"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("first-*")) == []


def test_weights_that_are_not_finite_are_an_error(
    base: dict[str, Any], run_recipe: RunRecipe, bert: Path, tmp_path: Path
) -> None:
    """The embedding of the last position is NaN; no text is that long, so all losses are finite."""
    folder = shutil.copytree(bert, tmp_path / "bert")
    state = weights(folder)
    state["embeddings.position_embeddings.weight"][-1] = torch.nan
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    base["query"]["start"] = str(folder)
    base["stages"] = [joint(train=["query"], max_steps=1)]
    for _ in range(2):
        with raises(TrainingError, "not_finite", key="stages.joint", step=1):
            run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("joint-*")) == []


def test_checkpoints_of_another_model_and_damaged_ones_are_errors(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [joint(train=["query"], checkpoint_every=1, epochs=3)]
    with limit_file_size(200_000), pytest.raises(CareError):
        run_recipe(base)
    folder = only(tmp_path / "out" / "stages", ".joint-*") / "checkpoints" / "checkpoint-1"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"other": torch.zeros(1)}, folder / "trained.safetensors")
    (folder / "complete").touch()
    with raises(TrainingError, "other_model", path=folder):
        run_recipe(base)
    (folder / "trained.safetensors").write_bytes(b"cut off")
    with raises(TrainingError, "bad_checkpoint", path=folder):
        run_recipe(base)
