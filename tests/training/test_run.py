import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import CareError, TrainingError
from core.files import sha256_file
from core.shards import whole_shards
from models.encoders.transformers import TransformersEncoder
from models.training import vectors
from models.training.encoder import Encoder, encode
from models.training.trainer import StageTrainer, last_checkpoint
from tests.checkpoints import TEXTS, WIDTH
from tests.conftest import write_jsonl
from tests.training.conftest import (
    DATA,
    RunRecipe,
    align,
    joint,
    pair_of,
    teacher,
    write_recipe,
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    name = "model.safetensors"
    path = folder / name
    return load_file(path if path.is_file() else folder / "adapter_model.safetensors")


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def history_of(stages: Path, name: str) -> list[dict[str, float]]:
    history: list[dict[str, float]]
    history = json.loads(only(stages, f"{name}-*/metrics.json").read_text())
    return history


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_the_whole_method(base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path) -> None:
    """Document encoder with LoRA, alignment, joint fine-tuning: each result is a pair."""
    base["document"] |= {"lora": {"r": 4, "alpha": 8}}
    base["query"] |= {"dimension": WIDTH // 2}
    base["document"] |= {"dimension": WIDTH // 2}
    large = {
        "kind": "contrastive",
        "name": "large",
        "side": "document",
        "data": DATA,
        "batch": 3,
        "dimensions": [16, WIDTH // 2, WIDTH],
    }
    base["stages"] = [large, teacher(), align(), joint(mini_batch=2)]
    folder = run_recipe(base)
    pair = pair_of(folder)
    assert pair.name == "tiny"
    assert pair.embedding_space.startswith("space-")
    assert (pair.query.dimension, pair.document.dimension) == (WIDTH // 2, WIDTH // 2)
    for spec in (pair.query, pair.document):
        vectors = TransformersEncoder(spec, pair.folder, device="cpu").encode(TEXTS).vectors
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    stages = tmp_path / "out" / "stages"
    spaces = {
        pair_of(only(stages, f"{name}-*")).embedding_space for name in ("large", "align", "joint")
    }
    assert len(spaces) == 3
    for name in ("large", "align", "joint"):
        stage = only(stages, f"{name}-*")
        assert (stage / "curves.png").stat().st_size > 1000
        assert list((stage / "tensorboard").iterdir())
        assert not (stage / "checkpoints").exists()
        history = history_of(stages, name)
        assert all(np.isfinite(entry["loss"]) for entry in history if "loss" in entry)
    result = json.loads((only(stages, "joint-*") / "result.json").read_text())
    assert result["seed"] == 0
    checksums = {Path(name).name: value for name, value in result["inputs"]["data"].items()}
    assert checksums == {"triples.jsonl": sha256_file(Path(base["variables"]["triples"]))}
    assert set(result["sides"]) == {"query", "document"}


def test_alignment_learns_and_leaves_the_document_encoder_as_it_was(
    base: dict[str, Any], run_recipe: RunRecipe, qwen3: Path, tmp_path: Path
) -> None:
    before = {p.name: p.read_bytes() for p in qwen3.iterdir()}
    base["stages"] = [teacher(), align(epochs=60, learning_rate=3e-3, dropout=0.0)]
    pair = pair_of(run_recipe(base))
    assert {p.name: p.read_bytes() for p in qwen3.iterdir()} == before
    history = history_of(tmp_path / "out" / "stages", "align")
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0] / 3
    # The teacher's vectors are those that serving computes.
    shards = only(tmp_path / "out" / "stages", "teacher-*")
    stored = np.concatenate([np.load(path) for path in sorted(shards.glob("*.npy"))])
    served = TransformersEncoder(
        pair.document.model_copy(update={"prompt": "头痛"}), pair.folder, device="cpu"
    ).encode(TEXTS)
    found = np.abs(stored[:, None] - served.vectors[None]).max(axis=2).min(axis=0)
    assert found.max() < 2e-6
    assert len(whole_shards(shards)) == 3


def test_a_frozen_side_of_joint_training_is_bit_equal(
    base: dict[str, Any], run_recipe: RunRecipe, qwen3: Path, bert: Path
) -> None:
    before = (qwen3 / "model.safetensors").read_bytes()
    base["stages"] = [joint(train=["query"])]
    pair = pair_of(run_recipe(base))
    assert pair.folder.joinpath(pair.document.weights).resolve() == qwen3.resolve()
    assert (qwen3 / "model.safetensors").read_bytes() == before
    assert not same(pair.folder / pair.query.weights, bert)


def test_a_killed_run_goes_on_to_the_same_weights(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """Dropout, negatives that are drawn, and a learned temperature: all must be as unbroken."""
    stage = {
        "kind": "contrastive",
        "data": DATA,
        "batch": 2,
        "epochs": 40,
        "dropout": 0.2,
        "checkpoint_every": 7,
        "learning_rate": 1e-3,
    }
    base["stages"] = [stage]
    path = write_recipe(tmp_path / "killed.yaml", base)
    command = [sys.executable, "-m", "models.training", "run", str(path)]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], stderr=stderr)
    stages = tmp_path / "killed" / "stages"
    wait_for(lambda: any(stages.glob(".*/checkpoints/checkpoint-1[4-9]/complete")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "/120 [" in (tmp_path / "stderr").read_text("utf-8"), "there is no progress bar"
    assert list(stages.glob("contrastive-*")) == []
    kept = last_checkpoint(only(stages, ".*/checkpoints"))
    assert kept is not None
    # What the kill may have cut off.
    (kept.with_name("checkpoint-9999")).mkdir()
    pair = pair_of(run_recipe(base, out="killed"))
    history = history_of(stages, "contrastive")
    assert [e["step"] for e in history] == [1, *range(10, 121, 10)]
    unbroken = pair_of(run_recipe(base, out="unbroken"))
    assert same(pair.folder / pair.query.weights, unbroken.folder / unbroken.query.weights)


def test_a_run_that_was_cut_off_behind_its_last_step_trains_no_further(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    base["stages"] = [joint(train=["query"], epochs=4, max_steps=3, log_every=1)]
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "save", full)
        with pytest.raises(CareError, match="No space left on device"):
            run_recipe(base, out="broken")
    pairs = [pair_of(run_recipe(base, out=out)) for out in ("broken", "unbroken")]
    logs = [history_of(tmp_path / out / "stages", "joint") for out in ("broken", "unbroken")]
    assert [[entry["step"] for entry in log] for log in logs] == [[1, 2, 3], [1, 2, 3]]
    first, second = pairs
    assert same(first.folder / first.query.weights, second.folder / second.query.weights)


def test_a_teacher_goes_on_behind_its_last_whole_shard(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base["stages"] = [teacher()]
    full = "vectors, shard 1"
    labels: list[str] = []

    def recorded(*arguments: Any, label: str, **settings: Any) -> Any:
        labels.append(label)
        if label == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(*arguments, label=label, **settings)

    monkeypatch.setattr(vectors, "encode", recorded)
    with pytest.raises(CareError, match="No space left on device"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("teacher-*")) == []
    full = ""
    labels.clear()
    run_recipe(base)
    assert set(labels) == {"vectors, shard 1", "vectors, shard 2"}
    run_recipe(base, out="unbroken")
    shards = [only(tmp_path / out / "stages", "teacher-*") for out in ("out", "unbroken")]
    assert whole_shards(shards[0]) == whole_shards(shards[1])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_learned_temperature_survives_a_break(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    stage = {
        "kind": "unsupervised",
        "data": DATA,
        "batch": 3,
        "epochs": 4,
        "checkpoint_every": 2,
        "learning_rate": 1e-2,
    }
    base["stages"] = [stage]
    broken_off(base, run_recipe, out="broken")
    results = [run_recipe(base, out=out) for out in ("broken", "unbroken")]
    logs = [history_of(tmp_path / out / "stages", "unsupervised") for out in ("broken", "unbroken")]
    assert logs[0][-1]["temperature"] == logs[1][-1]["temperature"]
    first, second = (pair_of(result) for result in results)
    assert same(first.folder / first.query.weights, second.folder / second.query.weights)


def broken_off(base: dict[str, Any], run_recipe: RunRecipe, out: str) -> None:
    """Runs until the disk holds no more than a checkpoint: files may not grow beyond a limit."""
    limit = 64_000
    with files_of_at_most(limit), pytest.raises(CareError):
        run_recipe(base, out=out)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_no_room_for_a_checkpoint_is_said_and_leaves_nothing(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(), align(checkpoint_every=1)]
    run_recipe(base | {"stages": [teacher()]})
    with files_of_at_most(64_000), pytest.raises(CareError, match=r"checkpoint-1\b"):
        run_recipe(base)
    stages = tmp_path / "out" / "stages"
    assert list(stages.glob("align-*")) == []
    assert last_checkpoint(only(stages, ".align-*/checkpoints")) is None
    run_recipe(base)


def test_finished_stages_are_shared_by_recipes(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    stages = tmp_path / "out" / "stages"
    run_recipe(base | {"stages": [teacher(), align()]})
    first = {path.name for path in stages.iterdir()}
    changed = base | {"name": "other", "stages": [teacher(name="vectors"), align(mse=0.0), joint()]}
    changed["stages"][0]["name"] = ""
    run_recipe(changed)
    names = {path.name for path in stages.iterdir()} - first
    assert sorted(name.split("-")[0] for name in names) == ["align", "joint"]
    # Another seed draws anew, but the teacher is the same.
    run_recipe(base | {"seeds": [1], "stages": [teacher(), align()]})
    assert len(list(stages.glob("teacher-*"))) == 1
    assert len(list(stages.glob("align-*"))) == 3


def test_changed_data_is_not_taken_for_the_same(
    base: dict[str, Any], run_recipe: RunRecipe, triples: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "triples.jsonl"
    copy.write_bytes(triples.read_bytes())
    base["variables"]["triples"] = str(copy)
    base["stages"] = [teacher()]
    run_recipe(base)
    write_jsonl(copy, [{"query": "头痛", "positives": ["骨折"], "negatives": []}])
    run_recipe(base)
    assert len(list((tmp_path / "out" / "stages").glob("teacher-*"))) == 2


def test_vectors_of_another_dimension_or_space_are_refused(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher()]
    run_recipe(base)
    vectors = only(tmp_path / "out" / "stages", "teacher-*")
    stage = align(vectors=str(vectors), data=DATA)
    base["stages"] = [stage]
    base["query"]["dimension"] = 16
    with pytest.raises(TrainingError, match=r"vectors\.json: the vectors have 64 dimensions"):
        run_recipe(base)
    del base["query"]["dimension"]
    run_recipe(base)
    base["document"]["layers"] = [0]
    with pytest.raises(TrainingError, match=r"vectors\.json: .* in the space of encoder"):
        run_recipe(base)


def test_texts_without_vectors_and_damaged_shards_are_refused(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(data=[DATA[0] | {"roles": ["query"]}])]
    run_recipe(base)
    vectors = only(tmp_path / "out" / "stages", "teacher-*")
    base["stages"] = [align(vectors=str(vectors), data=DATA)]
    with pytest.raises(TrainingError, match="6 of 6 texts as document have no vector"):
        run_recipe(base)
    shard = vectors / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(TrainingError, match="shard 1 is missing or damaged"):
        run_recipe(base)


def test_a_loss_that_is_not_finite_stops_the_run(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(), align(name="first", epochs=20, learning_rate=1e30, warmup=0.0)]
    with pytest.raises(TrainingError, match=r"stage 'first', step \d+: the loss is (nan|inf)"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("first-*")) == []


def test_weights_that_are_not_finite_are_no_result(
    base: dict[str, Any], run_recipe: RunRecipe, bert: Path, tmp_path: Path
) -> None:
    """The last position, which no text reaches, is not a number: all losses are finite."""
    folder = shutil.copytree(bert, tmp_path / "bert")
    state = weights(folder)
    state["embeddings.position_embeddings.weight"][-1] = torch.nan
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    base["query"]["start"] = str(folder)
    base["stages"] = [joint(train=["query"], max_steps=1)]
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"stage 'joint', step 1: weights are not finite"):
            run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("joint-*")) == []


def test_no_room_for_the_result_is_said_and_leaves_nothing(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [joint(trainer={"save_strategy": "no"})]
    with files_of_at_most(64_000), pytest.raises(CareError, match=r"\.joint-\w+\.partial"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("joint-*")) == []
    run_recipe(base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [align()]}, "stages.align.teacher: no stage of kind teacher"),
        ({"stages": [align(data=DATA, teacher="x")]}, "stages.align.teacher: no stage 'x'"),
        ({"stages": [joint(data=[{"mined": "x"}])]}, "no stage 'x' mined before this one"),
        ({"stages": [joint(data=[{"triples": "no.jsonl"}])]}, "no.jsonl cannot be read: No such"),
        ({"stages": [joint(trainer={"optimizer": 1})]}, "joint.trainer.optimizer: unknown key"),
        ({"document": None, "stages": [joint()]}, "document: stage 'joint' needs this encoder"),
    ],
)
def test_what_a_stage_lacks_is_said_before_any_is_trained(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    first = {"kind": "contrastive", "data": DATA, "batch": 3}
    base |= changes | {"stages": [first, *changes["stages"]]}
    with pytest.raises(TrainingError, match=message):
        run_recipe(base)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"document": {"dimension": 32}}, "stages.joint: query has 64 dimensions, document 32"),
        ({"query": {"max_length": 65}}, "reads 64 tokens, not max_length 65"),
    ],
)
def test_encoders_that_do_not_fit_are_refused(
    base: dict[str, Any], run_recipe: RunRecipe, changes: dict[str, Any], message: str
) -> None:
    for side, facts in changes.items():
        base[side] |= facts
    for train in (["query"], ["query", "document"]):
        base["stages"] = [joint(train=train)]
        with pytest.raises(TrainingError, match=message):
            run_recipe(base)


def test_a_place_that_cannot_be_written_is_named(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    base["stages"] = [joint()]
    with pytest.raises(CareError, match=r"file/stages: Not a directory"):
        run_recipe(base, out="file")


def test_nothing_is_measured_while_weights_are_sharded(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    beir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StageTrainer, "sharded", True)
    base["dev"] = {"beir": str(beir), "start": True, "every": 1}
    base["stages"] = [joint()]
    run_recipe(base)
    history = history_of(tmp_path / "out" / "stages", "joint")
    assert not [name for entry in history for name in entry if name.startswith("dev_")]


def test_a_checkpoint_of_another_model_is_refused(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [joint(train=["query"], checkpoint_every=1, epochs=3)]
    with files_of_at_most(200_000), pytest.raises(CareError):
        run_recipe(base)
    folder = only(tmp_path / "out" / "stages", ".joint-*") / "checkpoints" / "checkpoint-1"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"other": torch.zeros(1)}, folder / "trained.safetensors")
    (folder / "complete").touch()
    with pytest.raises(TrainingError, match="checkpoint-1 is of another model"):
        run_recipe(base)
    (folder / "trained.safetensors").write_bytes(b"cut off")
    with pytest.raises(TrainingError, match="checkpoint-1 is damaged"):
        run_recipe(base)


def test_nothing_else_may_work_in_a_stage(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    from core.files import exclusive

    base["stages"] = [teacher()]
    run_recipe(base)
    name = only(tmp_path / "out" / "stages", "teacher-*").name
    partial = tmp_path / "again" / "stages" / f".{name}.partial"
    partial.mkdir(parents=True)
    with exclusive(partial), pytest.raises(CareError, match="another command is at work"):
        run_recipe(base, out="again")


def test_mined_negatives_are_what_the_next_stage_reads(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    mine = {"kind": "mine", "data": DATA, "first": 2, "last": 4, "negatives": 2, "margin": 1000.0}
    base["stages"] = [mine, joint(data=[{"mined": "mine"}])]
    run_recipe(base)
    path = only(tmp_path / "out" / "stages", "mine-*") / "triples.jsonl"
    mined = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [record["query"] for record in mined] == list(TEXTS)
    for record in mined:
        assert len(record["negatives"]) == 2
        assert not set(record["negatives"]) & set(record["positives"])


def test_retromae_and_distillation_run(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    retromae = {"kind": "retromae", "data": DATA, "batch": 3, "epochs": 20, "learning_rate": 3e-3}
    distill = {"kind": "distill", "data": DATA, "batch": 3, "learning_rate": 1e-3}
    base["stages"] = [retromae, teacher(), distill]
    pair = pair_of(run_recipe(base))
    assert pair.query.weights == pair.document.weights
    history = history_of(tmp_path / "out" / "stages", "retromae")
    losses = [entry["decoder"] for entry in history if "decoder" in entry]
    assert losses[-1] < losses[0]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    folder.mkdir()
    documents = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(folder / "corpus.jsonl", documents)
    write_jsonl(folder / "dev.queries.jsonl", [{"_id": "q", "text": TEXTS[0]}])
    (folder / "dev.qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n")
    return folder


def test_dev_questions_are_measured_and_never_trained_on(
    base: dict[str, Any], run_recipe: RunRecipe, beir: Path, tmp_path: Path
) -> None:
    base["dev"] = {"beir": str(beir), "start": True, "every": 1}
    base["stages"] = [teacher(), align(), joint(epochs=4, max_steps=2)]
    folder = run_recipe(base)
    # What alignment left is where joint training begins; the documents were read, not encoded.
    before = history_of(tmp_path / "out" / "stages", "align")[-1]
    start = history_of(tmp_path / "out" / "stages", "joint")[0]
    assert (before["step"], start["step"]) == (2, 0)
    assert before["dev_nDCG@10"] == start["dev_nDCG@10"]
    assert len(list((tmp_path / "out" / "vectors").iterdir())) == 1
    stage = only(tmp_path / "out" / "stages", "joint-*")
    counts = json.loads((stage / "result.json").read_text())["counts"]
    assert counts == {"examples": 5, "pairs": 5, "held_out": 1, "steps": 2}
    history = history_of(tmp_path / "out" / "stages", "joint")
    measured = [entry for entry in history if "dev_nDCG@10" in entry]
    assert [entry["step"] for entry in measured] == [0, 1, 2]
    pair = pair_of(folder)
    query, document = (
        TransformersEncoder(spec, pair.folder, device="cpu") for spec in (pair.query, pair.document)
    )
    scores = query.encode(TEXTS[:1]).vectors @ document.encode(TEXTS).vectors.T
    rank = int((scores[0] > scores[0, 1]).sum()) + 1
    assert measured[-1]["dev_nDCG@10"] == pytest.approx(1 / np.log2(rank + 1), abs=1e-4)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("name: x\nstages: [{kind: align, lambda: 1}]\n")
    result = subprocess.run(
        [sys.executable, "-m", "models.training", "run", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert result.returncode == 1
    assert result.stderr.strip().endswith(f"error: {path}: stages.align.lambda: unknown key")
