"""The recipes of the ablations, and runs of some of them with tiny encoders."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH
from tests.conftest import write_jsonl
from tests.errors import raises
from tests.training.conftest import write_split
from training.errors import TrainingError
from training.experiments.ablation_report import ABLATIONS, CARE, NDCG, ORDER
from training.experiments.ablations import RECIPES, read_scores, read_test, run_ablations
from training.recipe import Recipe, load_recipe
from training.stages.base import TrainingStage

pytestmark = pytest.mark.train

# Keys that may differ in a stage that a recipe shares with the base: losses and data.
LEARNED = {"contrastive", "mse", "kl", "temperature", "data", "prompts"}


def recipe(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{'base' if name == CARE else name}.yaml")


def stages(name: str) -> dict[str, dict[str, Any]]:
    return {stage.label: stage.model_dump() for stage in recipe(name).stages}


def changed(name: str) -> dict[str, set[str]]:
    """Returns the keys that differ from the base in common stages."""
    base = stages(CARE)
    return {
        label: {key for key, value in stage.items() if value != base[label][key]}
        for label, stage in stages(name).items()
        if label in base and stage != base[label]
    }


def test_each_row_of_the_table_has_a_recipe() -> None:
    found = {load_recipe(path).name for path in RECIPES.glob("*.yaml")}
    assert found == set(ORDER) and len(ORDER) == 17
    assert len({recipe(name).description for name in ORDER}) == 17


def test_no_two_recipes_are_the_same() -> None:
    said = {str((r.query, r.document, r.stages)) for r in map(recipe, ORDER)}
    assert len(said) == len(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_recipe_differs_from_the_base_in_allowed_keys_only(name: str) -> None:
    """Encoders, training effort and order of stages are those of the base; there is no dev set."""
    base, other = recipe(CARE), recipe(name)
    assert other.query in (base.query, None) and other.document in (base.document, None)
    assert other.dev is None
    shared = [stage.label for stage in other.stages if stage.label in stages(CARE)]
    assert shared == [label for label in stages(CARE) if label in shared]
    assert all(keys <= LEARNED for keys in changed(name).values())


@pytest.mark.parametrize("name", ORDER)
def test_a_new_stage_trains_no_longer_than_the_stage_it_replaces(name: str) -> None:
    fine_tuning = stages(CARE)["query-fine-tuning"]
    for stage in recipe(name).stages:
        if stage.label not in stages(CARE) and isinstance(stage, TrainingStage):
            effort = {key: getattr(stage, key) for key in ("batch", "learning_rate", "negatives")}
            assert effort == {key: fine_tuning[key] for key in effort}
            assert stage.epochs == fine_tuning["epochs"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_removes_stages_or_changes_one_stage(name: str) -> None:
    left_out = stages(CARE).keys() - stages(name).keys()
    assert stages(name).keys() <= stages(CARE).keys()
    differences = [*changed(name).values()]
    assert bool(left_out) != bool(differences)
    assert [len(keys) for keys in differences] in ([], [1])


def test_alignment_baselines_use_their_own_losses() -> None:
    names = ("kale", "wang-lyu", "scalingnote")
    weights = {
        name: tuple(stages(name)["alignment"][loss] for loss in ("contrastive", "mse", "kl"))
        for name in names
    }
    assert weights == {"kale": (0, 0, 1), "wang-lyu": (0, 1, 0), "scalingnote": (0, 1, 0)}
    for name in names:
        assert "joint" not in stages(name) and "document-fine-tuning" in stages(name)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The answer to each text is the next one; the splits have different wordings of questions."""
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(folder / "corpus.jsonl", corpus)
    judged = [(f"q{i}", f"d{(i + 1) % len(TEXTS)}", 1) for i in range(len(TEXTS))]
    for split, mark in (("train", "？"), ("dev", "吗？")):
        queries = {f"q{i}": f"{text}{mark}" for i, text in enumerate(TEXTS)}
        write_split(folder, split, queries, judged)
    pairs = [{"text1": text, "text2": f"{text}呢"} for text in TEXTS]
    write_jsonl(folder / "train.paraphrases.jsonl", pairs)
    return folder


@pytest.fixture
def recipes(tmp_path: Path, bert: Path) -> Path:
    """The real recipes with tiny encoders, which read all data."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for path in RECIPES.glob("*.yaml"):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        _shrink(recipe, str(bert))
        (folder / path.name).write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def _shrink(value: Any, start: str) -> None:
    """Removes restrictions of data, and reduces batches, layers and widths for a tiny encoder."""
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            _shrink(entry, start)
    if isinstance(value, dict):
        value.pop("part", None)
        small = {"start": start, "layers": [0], "batch": 4, "max_length": MAX_LENGTH}
        small["frozen_layers"] = 1
        value |= {key: small[key] for key in small.keys() & value.keys()}
        if isinstance(value.get("projection"), int):
            value["projection"] = WIDTH


def test_tiny_ablations_from_data_to_table(data: Path, recipes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = ["care", "kale"]
    lines: list[str] = []
    table = run_ablations(data, out, 2, only, lines.append, recipes)
    (of_data,) = (out / "scores").iterdir()
    scores = read_scores(of_data)
    assert set(scores) == set(only)
    assert all(set(seeds) == {0, 1} for seeds in scores.values())
    assert all(len(found[NDCG]) == len(TEXTS) for s in scores.values() for found in s.values())
    text = table.read_text(encoding="utf-8")
    # Two rows of two seeds, and one ordering.
    assert (text.count("| 2 |"), text.count("\n- ")) == (2, 1)
    # Shared stages run once: that of the large encoder for all seeds.
    assert len(list((out / "stages").glob("document-fine-tuning-*"))) == 1
    assert len(list((out / "stages").glob("query-fine-tuning-*"))) == 2
    # A second call reuses all stages and writes the same table.
    lines.clear()
    assert run_ablations(data, out, 2, only, lines.append, recipes).read_text("utf-8") == text
    assert sum(": reused " in line for line in lines) == 2 * (7 + 4)
    # The table excludes scores of other data; every file of the folder is part of the data's key.
    (data / "notes.txt").write_text("more")
    table = run_ablations(data, out, 1, only[:1], lines.append, recipes)
    assert "\n- " not in table.read_text(encoding="utf-8")


def test_unknown_recipe(data: Path, tmp_path: Path) -> None:
    with raises(TrainingError, "unknown_recipe", name="kalle"):
        run_ablations(data, tmp_path, 1, ["kalle"], print)


def test_candidates_are_distinct_and_include_the_positives(data: Path) -> None:
    test = read_test(data)
    for query, ids in test.candidates.items():
        assert set(test.dev.qrels[query]) <= set(ids) <= set(test.dev.documents)
        assert len(ids) == len(set(ids))
    assert read_test(data).candidates == test.candidates
