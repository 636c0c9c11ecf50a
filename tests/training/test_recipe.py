from pathlib import Path
from typing import Any

import pytest

from core.errors import TrainingError
from models.training import recipe
from models.training.recipe import Align, Fit, load_recipe, stage_name

RECIPES = Path(recipe.__file__).parent / "recipes"
BASE = """
name: base
variables: {data: folder}
query: {start: small, pooling: cls}
document: {start: large, pooling: last_token, lora: {r: 8}}
stages:
- {kind: teacher, data: [{texts: "${data}/texts.jsonl"}]}
- {kind: align, epochs: 3}
- {kind: joint, data: [{triples: "${data}/triples.jsonl"}]}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def extended(base: Path, text: str) -> Path:
    path = base.with_name("other.yaml")
    path.write_text(f"extends: base.yaml\n{text}")
    return path


def test_defaults_are_those_of_the_paper(base: Path) -> None:
    align = load_recipe(base).stages[1]
    assert isinstance(align, Align)
    assert (align.contrastive, align.mse) == (1, 1)
    assert (align.learning_rate, align.warmup, align.batch) == (1e-4, 0.05, 2560)


def test_a_recipe_changes_what_it_extends(base: Path) -> None:
    text = """
name: other
query: {dimension: 32}
stages:
  align: {mse: 0}
  joint: null
"""
    changed = load_recipe(extended(base, text))
    assert changed.name == "other"
    assert changed.query is not None
    assert (changed.query.start, changed.query.dimension) == ("small", 32)
    assert [stage.kind for stage in changed.stages] == ["teacher", "align"]
    align: Any = changed.stages[1]
    assert (align.mse, align.epochs) == (0, 3)


def test_the_command_line_changes_keys(base: Path) -> None:
    changes = ["stages.align.epochs=2", "seeds=[1, 2]", "variables.data=elsewhere"]
    changed = load_recipe(base, changes)
    teacher, align, joint = changed.stages
    assert (getattr(align, "epochs", 0), changed.seeds) == (2, [1, 2])
    assert teacher.data[0].texts == "elsewhere/texts.jsonl"
    assert joint.data[0].triples == "elsewhere/triples.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: red", "other.yaml: colour: unknown key"),
        ("stages: {align: {lambda: 1}}", "other.yaml: stages.align.lambda: unknown key"),
        ("query: {pool: cls}", "other.yaml: query.pool: unknown key"),
        ("document: {lora: {rank: 1}}", "other.yaml: document.lora.rank: unknown key"),
        ("stages: {align: {epochs: 0}}", "other.yaml: stages.align.epochs: "),
        ("stages: {aline: {epochs: 2}}", "other.yaml: stages.aline: there is none of that name"),
        ("stages: {align: {mse: 0, contrastive: 0}}", "stages.align: .*all 0"),
        ("stages: [{kind: juggle}]", "other.yaml: stages.juggle: .*'joint'"),
        ("stages: [{kind: joint}, {kind: joint}]", "other.yaml: stages.joint.data: "),
        ("query: {pair: care-mini}", "other.yaml: query: .*either start or pair"),
        ("name: ${data}/x", "other.yaml: name: "),
        ("name: ${nothing}", r"other.yaml: '\$\{nothing\}' names an unknown variable"),
        ("[1, 2", "other.yaml is not valid YAML"),
        ("stages: null\ncolour: red", "other.yaml: colour: unknown key"),
        ("variables: [a]", r"other.yaml: '\$\{data\}/texts.jsonl' names an unknown variable"),
        ("variables: {data: 5}", r"other.yaml: variables.data: .*valid string"),
        ("seeds: [-1]", "other.yaml: seeds.0: "),
        ("stages: {align: {seed: -1}}", "other.yaml: stages.align.seed: "),
        ("stages: {align: {name: a/../b}}", r"other.yaml: stages.a/../b.name: "),
        ("stages: {align: {vectors: folder}}", "stages.align: .*vectors: name their texts"),
        (
            "stages: {x: {kind: distill, kl: 0, contrastive: 0, data: [{beir: x}], before: joint}}",
            "stages.x: .*both 0",
        ),
        ("stages: {x: {kind: derive, before: [joint]}}", r"stages.x.before: there is no '\["),
        (
            "stages: {joint: {data: [{triples: x, where: {source: a}}]}}",
            "stages.joint.data.0: .*where: triples has none, only beir",
        ),
        ("stages: {joint: {data: [{beir: x, role: document}]}}", "role: beir has none, only texts"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(base: Path, text: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        load_recipe(extended(base, text))


def test_an_unknown_key_is_named_before_one_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nstagse: []\n")
    with pytest.raises(TrainingError, match=r"x\.yaml: stagse: unknown key"):
        load_recipe(path)


def test_two_stages_of_one_name_are_refused(base: Path) -> None:
    text = "stages: [{kind: mine, data: [{texts: x}]}, {kind: mine, data: [{texts: x}]}]"
    with pytest.raises(TrainingError, match="two stages are named 'mine'"):
        load_recipe(extended(base, text))


def test_a_recipe_that_extends_itself_is_refused(base: Path) -> None:
    base.write_text("extends: other.yaml")
    with pytest.raises(TrainingError, match="the recipe extends itself"):
        load_recipe(extended(base, ""))


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"none\.yaml cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("change", ["epochs", "=2", "stages.align.epochs=[", "stages.x.epochs=2"])
def test_a_wrong_change_is_named(base: Path, change: str) -> None:
    with pytest.raises(TrainingError, match="--set"):
        load_recipe(base, [change])


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_recipes_load(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [("care-0.3b-4b", "fp16", "float16"), ("care-0.3b-8b", "bf16", "bfloat16")],
)
def test_recipes_of_the_paper_have_its_settings(name: str, precision: str, dtype: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.query and recipe.document and recipe.document.lora
    assert (recipe.query.pooling, recipe.document.pooling) == ("cls", "last_token")
    assert recipe.query.max_length == recipe.document.max_length == 512
    assert (recipe.document.lora.r, recipe.document.lora.alpha) == (32, 64)
    assert (recipe.document.dimension, recipe.document.dtype) == (768, dtype)
    trained = {stage_name(stage): stage for stage in recipe.stages if isinstance(stage, Fit)}
    found = {n: (s.learning_rate, s.warmup, s.batch, s.epochs) for n, s in trained.items()}
    assert found == {
        "retromae": (2e-4, 0, 384, 3),
        "unsupervised": (1e-4, 0.05, 19_200, 3),
        "contrastive": (1e-4, 0.05, 640, 2),
        "contrastive-large": (1e-4, 0.05, 640, 2),
        "align": (1e-4, 0.05, 2_560, 1),
        "joint": (1e-4, 0.05, 640, 1),
    }
    assert all(stage.gradient_checkpointing for stage in trained.values())
    large = {"contrastive-large", "teacher", "joint"}
    for stage in recipe.stages:
        expected = precision if stage_name(stage) in large else "fp16"
        assert getattr(stage, "precision", "") == expected
    align: Any = trained["align"]
    assert (align.contrastive, align.mse) == (1, 1)
    joint: Any = trained["joint"]
    assert joint.train == ["query", "document"] and joint.negatives
