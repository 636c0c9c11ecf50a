import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import CareError
from core.files import sha256_file
from core.locks import exclusive
from evaluation.beir import write_split
from models.encoders.transformers import TransformersEncoder
from tests.checkpoints import TEXTS, WIDTH
from tests.conftest import write_jsonl
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
from tests.training.runs import history_of, limit_file_size, same
from training.errors import TrainingError
from training.recipe import load_recipe
from training.run import run

pytestmark = pytest.mark.train


def test_the_complete_method_with_lora_alignment_and_joint_training(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    """LoRA training of the document encoder, alignment and joint training each produce a pair."""
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
    folder = run_recipe(base, curves=True)
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
    triples = base["variables"]["triples"]
    assert result["files"] == {triples: sha256_file(Path(triples))}
    assert set(result["encoders"]) == {"query", "document"}


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
    # Another seed trains again, but reuses the teacher's vectors.
    run_recipe(base | {"seeds": [1], "stages": [teacher(), align()]})
    assert len(list(stages.glob("teacher-*"))) == 1
    assert len(list(stages.glob("align-*"))) == 3


@pytest.mark.parametrize(
    ("precision", "instructions", "warned"),
    [("bf16", [], True), ("bf16", ["avx512_bf16"], False), ("fp32", [], False)],
)
def test_bf16_on_a_processor_without_its_instructions_is_reported(
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    instructions: list[str],
    warned: bool,
) -> None:
    none = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}
    found = none | dict.fromkeys(instructions, True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: found)
    path = write_recipe(tmp_path / "r.yaml", base | {"stages": [teacher(precision=precision)]})
    lines: list[str] = []
    run(load_recipe(path), tmp_path / "out", 0, lines.append)
    expected = ["teacher: this processor has no instructions for bf16"] if warned else []
    assert [line.split(" (")[0] for line in lines if "no instructions" in line] == expected


def test_files_of_the_same_name_have_separate_checksums(
    base: dict[str, Any], run_recipe: RunRecipe, triples: Path, tmp_path: Path
) -> None:
    """A change of a/v1/train.jsonl or b/v1/train.jsonl changes the key of the stage."""
    files = [tmp_path / name / "v1" / "train.jsonl" for name in ("a", "b")]
    for path in files:
        path.parent.mkdir(parents=True)
        shutil.copyfile(triples, path)
    base["stages"] = [teacher(data=[{"triples": str(path)} for path in files])]
    for changed in (None, *files):
        if changed:
            write_jsonl(changed, [{"query": changed.parts[-3], "positives": ["骨折"]}])
        run_recipe(base)
    assert len(list((tmp_path / "out" / "stages").glob("teacher-*"))) == 3


def test_the_path_of_data_does_not_change_the_key(
    base: dict[str, Any], run_recipe: RunRecipe, triples: Path, tmp_path: Path
) -> None:
    base["stages"] = [teacher()]
    run_recipe(base)
    shutil.copyfile(triples, tmp_path / "copy.jsonl")
    run_recipe(base, f"variables.triples={tmp_path / 'copy.jsonl'}")
    only(tmp_path / "out" / "stages", "teacher-*")


def test_the_sample_recipe_runs(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs on data/sample with tiny encoders and few steps."""
    monkeypatch.chdir(Path(__file__).parents[2])
    path = Path("training/recipes/sample.yaml")
    changes = [f"{side}.{key}" for side in ("query", "document") for key in (f"start={bert}",)]
    changes += ["query.layers=[0]", "document.max_length=48", "query.max_length=48"]
    changes += [f"stages.{name}.max_steps=2" for name in ("align", "joint")]
    recipe = load_recipe(path, changes)
    folder = run(recipe, tmp_path / "out", 0, lambda _: None)
    summary = json.loads((folder / "summary.json").read_text())["stages"]
    assert all("dev_nDCG@10" in summary[name]["last"] for name in ("align", "joint"))
    assert pair_of(folder).name == "sample"


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"stages": [align()]}, "missing_stage", {"key": "stages.align.teacher"}),
        ({"stages": [align(data=DATA, teacher="x")]}, "missing_stage", {"stage": "x"}),
        ({"stages": [joint(data=[{"mined": "x"}])]}, "missing_stage", {"stage": "x"}),
        ({"stages": [joint(data=[{"triples": "no.jsonl"}])]}, "unreadable", {"path": "no.jsonl"}),
        (
            {"stages": [joint(trainer={"optimizer": 1})]},
            "unknown_key",
            {"key": "stages.joint.trainer.optimizer"},
        ),
        (
            {"stages": [joint(trainer={"fsdp": True})]},
            "unsupported_sharding",
            {"key": "stages.joint.trainer.fsdp"},
        ),
        ({"document": None, "stages": [joint()]}, "missing_encoder", {"key": "document"}),
    ],
)
def test_missing_inputs_of_a_stage_are_errors_before_training(
    base: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    changes: dict[str, Any],
    code: str,
    fields: dict[str, str],
) -> None:
    first = {"kind": "contrastive", "data": DATA, "batch": 3}
    base |= changes | {"stages": [first, *changes["stages"]]}
    with raises(CareError, code, **fields):
        run_recipe(base)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharding_by_the_launcher_is_an_error(
    base: dict[str, Any], run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "true")
    base["stages"] = [joint()]
    with raises(TrainingError, "unsupported_sharding", key="stages.joint.sharded"):
        run_recipe(base)


def test_encoders_of_different_dimensions_are_an_error(
    base: dict[str, Any], run_recipe: RunRecipe
) -> None:
    base["document"]["dimension"] = 32
    for train in (["query"], ["query", "document"]):
        base["stages"] = [joint(train=train)]
        expected = {"key": "stages.joint", "query": 64, "document": 32}
        with raises(TrainingError, "dimension_mismatch", **expected):
            run_recipe(base)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    base["stages"] = [joint()]
    with raises(CareError, "input_output", path=tmp_path / "file" / "stages"):
        run_recipe(base, out="file")


def test_a_stage_is_locked_while_it_runs(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher()]
    run_recipe(base)
    name = only(tmp_path / "out" / "stages", "teacher-*").name
    partial = tmp_path / "again" / "stages" / f".{name}.partial"
    partial.mkdir(parents=True)
    with exclusive(partial, "train"), raises(CareError, "locked", path=partial):
        run_recipe(base, out="again")


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    documents = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(tmp_path / "corpus.jsonl", documents)
    write_split(tmp_path, "dev", {"q": TEXTS[0]}, {"q": {"d1": 1}})
    return tmp_path


def test_dev_queries_are_measured_and_not_trained_on(
    base: dict[str, Any], run_recipe: RunRecipe, beir: Path, tmp_path: Path
) -> None:
    base["dev"] = {"beir": str(beir), "start": True, "every": 1}
    base["stages"] = [teacher(), align(), joint(epochs=4, max_steps=2)]
    folder = run_recipe(base)
    # Joint training starts with the aligned encoder; documents come from the vector cache.
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


def test_a_full_disk_at_the_result_leaves_no_result(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [joint(trainer={"save_strategy": "no"})]
    with limit_file_size(64_000), raises(CareError, "input_output") as caught:
        run_recipe(base)
    assert ".partial" in caught.value.fields["path"]
    assert list((tmp_path / "out" / "stages").glob("joint-*")) == []
    run_recipe(base)


def test_joint_training_does_not_change_a_frozen_side(
    base: dict[str, Any], run_recipe: RunRecipe, qwen3: Path, bert: Path
) -> None:
    before = (qwen3 / "model.safetensors").read_bytes()
    base["stages"] = [joint(train=["query"])]
    pair = pair_of(run_recipe(base))
    assert pair.folder.joinpath(pair.document.weights).resolve() == qwen3.resolve()
    assert (qwen3 / "model.safetensors").read_bytes() == before
    assert not same(pair.folder / pair.query.weights, bert)
