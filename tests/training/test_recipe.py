import os
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from tests.errors import raises
from training.errors import TrainingError
from training.recipe import load_recipe

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


def test_a_recipe_merges_into_the_recipe_that_it_extends(base: Path) -> None:
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


def test_a_new_stage_is_inserted_before_a_named_stage(base: Path) -> None:
    text = "stages: {cut: {kind: prune_layers, layers: [0], before: align}}"
    labels = [stage.label for stage in load_recipe(extended(base, text)).stages]
    assert labels == ["teacher", "cut", "align", "joint"]


def test_entries_without_a_name_are_changed_by_position(base: Path) -> None:
    text = "stages: {teacher: {data: {0: {limit: 5}}}}"
    (entry,) = load_recipe(extended(base, text)).stages[0].data
    assert (entry.texts, entry.limit) == ("folder/texts.jsonl", 5)


def test_the_command_line_changes_keys(base: Path) -> None:
    changes = ["stages.align.epochs=2", "seeds=[1, 2]", "variables.data=elsewhere"]
    changed = load_recipe(base, changes)
    teacher, align, joint = changed.stages
    assert (getattr(align, "epochs", 0), changed.seeds) == (2, [1, 2])
    assert teacher.data[0].texts == "elsewhere/texts.jsonl"
    assert joint.data[0].triples == "elsewhere/triples.jsonl"


DISTILL = "kind: distill, data: [{beir: x}], before: joint"


@pytest.mark.parametrize(
    ("text", "code", "key"),
    [
        ("colour: red", "unknown_key", "colour"),
        ("stages: {align: {lambda: 1}}", "unknown_key", "stages.align.lambda"),
        ("query: {pool: cls}", "unknown_key", "query.pool"),
        ("document: {lora: {rank: 1}}", "unknown_key", "document.lora.rank"),
        # A misspelt key also causes the error of a missing key.
        ("stages: null\ncolour: red", "unknown_key", "colour"),
        ("stages: {align: {epochs: 0}}", "invalid_value", "stages.align.epochs"),
        ("stages: {aline: {epochs: 2}}", "unknown_entry", "stages.aline"),
        ("stages: {x: {kind: teacher, before: [joint]}}", "unknown_entry", "stages.x.before"),
        ("stages: {align: {mse: 0, contrastive: 0}}", "invalid_value", "stages.align"),
        ("stages: [{kind: juggle}]", "invalid_value", "stages.juggle"),
        ("stages: [{kind: joint}, {kind: joint}]", "invalid_value", "stages.joint.data"),
        ("query: {pair: care-mini}", "invalid_value", "query"),
        ("name: ${data}/x", "invalid_value", "name"),
        ("variables: {data: 5}", "invalid_value", "variables.data"),
        ("seeds: [-1]", "invalid_value", "seeds.0"),
        ("stages: {align: {seed: -1}}", "invalid_value", "stages.align.seed"),
        ("stages: {align: {name: a/../b}}", "invalid_value", "stages.a/../b.name"),
        ("stages: {align: {vectors: folder}}", "invalid_value", "stages.align"),
        (f"stages: {{x: {{{DISTILL}, kl: 0, contrastive: 0}}}}", "invalid_value", "stages.x"),
        ("stages: {x: {kind: prune_layers, before: joint}}", "invalid_value", "stages.x"),
        (
            "stages: {joint: {data: [{triples: x, where: {source: a}}]}}",
            "invalid_value",
            "stages.joint.data.0",
        ),
        (
            "stages: {joint: {data: [{beir: x, role: document}]}}",
            "invalid_value",
            "stages.joint.data.0",
        ),
        ("extends: [a, b]", "invalid_value", "extends"),
    ],
)
def test_an_invalid_key_is_an_error_with_key_and_file(
    base: Path, text: str, code: str, key: str
) -> None:
    path = extended(base, text)
    if text.startswith("extends"):
        path.write_text(text)
    with raises(TrainingError, code, path=path, key=key):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("name: ${nothing}", "unknown_variable"),
        ("variables: [a]", "unknown_variable"),
        ("[1, 2", "not_yaml"),
        ("[" * 100_000, "not_yaml"),
        ("name: " + "1" * 10_000, "not_yaml"),
        ("name: 2026-99-99", "not_yaml"),
        ("stages: [{kind: mine, data: [{texts: x}]}, {kind: mine, data: [{texts: x}]}]", None),
    ],
)
def test_other_invalid_recipes_are_errors_with_the_file(
    base: Path, text: str, code: str | None
) -> None:
    path = extended(base, text)
    with raises(TrainingError, code or "invalid_value", path=path):
        load_recipe(path)


def test_a_recipe_must_be_a_mapping(base: Path) -> None:
    base.write_text("- a list")
    with raises(TrainingError, "not_a_mapping", path=base):
        load_recipe(base)


def test_a_recipe_that_extends_itself_is_an_error(base: Path) -> None:
    base.write_text("extends: other.yaml")
    path = extended(base, "")
    with raises(TrainingError, "circular_recipe", path=path):
        load_recipe(path)


@pytest.mark.parametrize("extends", [False, True])
def test_a_special_file_is_not_waited_for(base: Path, extends: bool) -> None:
    path = base.with_name("fifo.yaml")
    os.mkfifo(path)
    base.write_text("extends: fifo.yaml")
    with raises(DataError, "unreadable", path=path):
        load_recipe(base if extends else path)


def test_a_missing_recipe_is_an_error_with_its_path(tmp_path: Path) -> None:
    with raises(DataError, "unreadable", path=tmp_path / "none.yaml"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("epochs", "invalid_change"),
        ("=2", "invalid_change"),
        ("stages.align.epochs=[", "invalid_change"),
        ("stages.x.epochs=2", "unknown_entry"),
    ],
)
def test_an_invalid_change_is_an_error(base: Path, change: str, code: str) -> None:
    with raises(TrainingError, code):
        load_recipe(base, [change])
