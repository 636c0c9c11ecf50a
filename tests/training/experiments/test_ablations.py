"""The recipes of the ablations, and runs of some of them with tiny encoders."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from evaluation.beir import write_split
from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH
from tests.conftest import write_jsonl
from tests.errors import raises
from training.data import in_part, read_examples, read_texts
from training.errors import TrainingError
from training.experiments.ablations import HELD_OUT, NDCG, RECIPES, SCORES, read_test, run_ablations
from training.experiments.tables import read_tables
from training.recipe import Recipe, load_recipe
from training.stages.base import TrainingStage
from training.stages.contrastive import RetroMae
from training.stages.teacher import Align, Teacher

pytestmark = pytest.mark.train

CARE = "care"
TABLES = read_tables(RECIPES)
NAMES = sorted({load_recipe(path).name for path in RECIPES.glob("*.yaml")})
# Keys of shared stages and of encoders that recipes may change: what a table compares.
COMPARED = {
    "document-fine-tuning": {"epochs"},
    "query-fine-tuning": {"epochs", "data", "negatives"},
    "teacher": {"data", "prompts"},
    "alignment": {"contrastive", "mse", "kl", "temperature", "data"},
    "joint": {"learning_rate", "train", "epochs"},
}
# Endings of the training questions.
MARKS = "？", "呢？", "呀？"
SIZES = {"layers", "frozen_layers"}


@cache
def recipe(name: str, *changes: str) -> Recipe:
    return load_recipe(RECIPES / f"{'base' if name == CARE else name}.yaml", changes)


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


def table(number: int) -> list[str]:
    """Returns the recipes of a table of the paper."""
    (found,) = (t for t in TABLES.tables if t.title.startswith(f"Table {number}:"))
    return [row.recipe for row in found.rows]


def test_each_row_of_the_tables_has_a_recipe_and_each_recipe_a_row() -> None:
    assert {name.partition("@")[0] for name in TABLES.recipes} == set(NAMES)
    assert {name for pair in TABLES.pairs for name in pair} == set(TABLES.recipes)
    assert len({recipe(name).description for name in NAMES}) == len(NAMES)
    for number in (3, 4, 5, 6, 7, 11, 12):
        assert len(table(number)) >= 3


def test_no_two_recipes_are_the_same() -> None:
    said = {str((r.query, r.document, r.stages)) for r in map(recipe, NAMES)}
    assert len(said) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_differs_from_the_base_in_what_its_table_compares(name: str) -> None:
    base, other = recipe(CARE), recipe(name)
    assert other.dev is None
    for side, init in other.encoders.items():
        same = base.encoders[side].model_dump(exclude=SIZES)
        assert init.model_dump(exclude=SIZES) == same
    shared = [stage.label for stage in other.stages if stage.label in stages(CARE)]
    assert shared == [label for label in stages(CARE) if label in shared]
    assert all(keys <= COMPARED[label] for label, keys in changed(name).items())


@pytest.mark.parametrize("name", NAMES)
def test_a_new_stage_trains_as_long_as_the_stage_it_replaces(name: str) -> None:
    replaced = {"distillation": "query-fine-tuning", "fine-tuning-alignment": "alignment"}
    for stage in recipe(name).stages:
        if stage.label not in stages(CARE) and isinstance(stage, TrainingStage):
            expected = stages(CARE)[replaced[stage.label]]
            for key in ("batch", "learning_rate", "max_steps", "warmup"):
                assert getattr(stage, key) == expected[key], key


def test_a_pair_without_stage_1_can_train_as_long_as_both_stages() -> None:
    longer = [name for name in NAMES if "epochs" in changed(name).get("joint", ())]
    assert longer == ["hotelmatch"]
    base, joint = stages(CARE), stages("hotelmatch")["joint"]
    # 26 steps an epoch: 1,686 questions in batches of 64.
    steps = base["alignment"]["max_steps"] + 26 * base["joint"]["epochs"]
    assert 26 * joint["epochs"] == pytest.approx(steps, rel=0.05)


@pytest.mark.parametrize("name", [name for name in table(5) if name != CARE])
def test_an_ablation_of_table_5_removes_stages_or_changes_one_key(name: str) -> None:
    left_out = stages(CARE).keys() - stages(name).keys()
    assert stages(name).keys() <= stages(CARE).keys()
    differences = [*changed(name).values()]
    assert bool(left_out) != bool(differences)
    assert [len(keys) for keys in differences] in ([], [1])


def test_fine_tuning_data_are_questions_and_documents_not_texts_with_themselves() -> None:
    """Table 6: Stage I trains the query encoder on judged pairs, documents being frozen."""
    for name, second in (("fine-tuning-data", True), ("fine-tuning-data-alone", False)):
        found = stages(name)
        stage = found["fine-tuning-alignment"]
        assert (stage["kind"], stage["train"]) == ("joint", ["query"])
        assert stage["data"] == stages(CARE)["joint"]["data"]
        assert not found.keys() & {"teacher", "alignment"}
        assert ("joint" in found) == second


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The answer to each text is the next one; the splits have different wordings of questions."""
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(folder / "corpus.jsonl", corpus)
    for split, marks in (("train", MARKS), ("dev", ("吗？",))):
        asked = [(i, f"{text}{mark}") for i, text in enumerate(TEXTS) for mark in marks]
        queries = {f"{split}-{number}": text for number, (_, text) in enumerate(asked)}
        answers = (f"d{(i + 1) % len(TEXTS)}" for i, _ in asked)
        qrels = {id_: {answer: 1} for id_, answer in zip(queries, answers, strict=True)}
        write_split(folder, split, queries, qrels)
    # Every question of the split `train` has a paraphrase.
    pairs = [{"text1": f"{t}{mark}", "text2": f"{t}，怎么办"} for t in TEXTS for mark in MARKS]
    write_jsonl(folder / "train.paraphrases.jsonl", pairs)
    return folder


@pytest.fixture
def recipes(tmp_path: Path, bert: Path) -> Path:
    """The real recipes with tiny encoders, which read all data."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for path in RECIPES.glob("*.yaml"):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        _shrink(found, str(bert))
        (folder / path.name).write_text(yaml.safe_dump(found), encoding="utf-8")
    tables = (RECIPES / "tables.toml").read_text("utf-8")
    (folder / "tables.toml").write_text(re.sub(r"care@\d+", f"care@{WIDTH // 2}", tables), "utf-8")
    return folder


def _shrink(value: Any, start: str) -> None:
    """Removes restrictions of data, and reduces batches, layers and widths for a tiny encoder."""
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            _shrink(entry, start)
    if isinstance(value, dict):
        value.pop("part", None)
        small = {"start": start, "batch": 4, "max_length": MAX_LENGTH, "max_steps": 3}
        small |= {"dimensions": [WIDTH // 2, WIDTH], "projection": WIDTH}
        if value.get("layers"):
            small["layers"] = [0]
        if value.get("frozen_layers"):
            small["frozen_layers"] = 1
        kept = {key for key in value if value[key] is None or isinstance(value[key], dict)}
        value |= {key: small[key] for key in small.keys() & value.keys() - kept}


def test_tiny_ablations_from_data_to_table(data: Path, recipes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    only = [CARE, "query-0-layers"]
    lines: list[str] = []
    table = run_ablations(data, out, only, lines.append, recipes=recipes, seeds=2)
    text, summary = table.read_text("utf-8"), json.loads((out / SCORES).read_text())
    found = {name: [*by[NDCG]] for name, by in summary["scores"].items()}
    cut = f"care@{WIDTH // 2}"
    # A recipe has its own seeds.
    assert {name: found[name] for name in (*only, cut)} == {
        CARE: ["0", "1"],
        "query-0-layers": ["0"],
        cut: ["0", "1"],
    }
    assert summary["facts"]["questions"] == len(read_test(data).dev.queries) > len(TEXTS)
    compared = {(d["first"], d["second"], d["seeds"]) for d in summary["differences"]}
    assert {(CARE, "query-0-layers", 1), (CARE, cut, 2)} <= compared
    # Shared stages run once: that of the large encoder for all seeds.
    assert len(list((out / "stages").glob("document-fine-tuning-*"))) == 1
    assert len(list((out / "stages").glob("query-fine-tuning-*"))) == 3
    # A second call reuses all stages and writes the same table.
    lines.clear()
    again = run_ablations(data, out, only, lines.append, recipes=recipes, seeds=2)
    assert again.read_text("utf-8") == text
    assert not [line for line in lines if "stages" in line and ": reused " not in line]
    # The report alone runs nothing, and leaves out the scores of a recipe that has changed.
    name = "query-0-layers"
    changed = recipes / f"{name}.yaml"
    changed.write_text(f"{changed.read_text('utf-8')}\nstages: {{joint: {{epochs: 2}}}}\n")
    lines.clear()
    run_ablations(data, out, [], lines.append, recipes=recipes, train=False)
    assert lines == []
    assert json.loads((out / SCORES).read_text())["scores"].keys() == found.keys() - {name}
    # So it does with scores of other data; every file of the folder is part of the data's key.
    (data / "qrels").mkdir()
    (data / "qrels" / "test.tsv").write_text("more")
    run_ablations(data, out, [], lines.append, recipes=recipes, train=False)
    assert json.loads((out / SCORES).read_text())["scores"] == {}


def test_recipes_of_another_folder(data: Path, recipes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        f"extends: {recipes / 'symmetric-small-fine-tuned.yaml'}\nname: mine\nseeds: [5]\n"
    )
    out = tmp_path / "out"
    run_ablations(data, out, [], lambda _: None, recipes=folder)
    (scores,) = json.loads((out / SCORES).read_text())["scores"].items()
    assert (scores[0], [*scores[1][NDCG]]) == ("mine", ["5"])


def test_unknown_recipe(data: Path, tmp_path: Path) -> None:
    with raises(TrainingError, "unknown_recipe", name="kalle"):
        run_ablations(data, tmp_path, ["kalle"], print)


def test_no_recipe_trains_on_a_question_of_the_test(data: Path) -> None:
    tested = read_test(data).dev.queries
    held_out = {text for id_, text in tested.items() if id_.startswith("train-")}
    assert held_out and all(in_part(text, HELD_OUT) for text in held_out)
    for name in NAMES:
        loaded = recipe(name, f"variables.data={json.dumps(str(data))}")
        # Alignment reads the texts of its teacher; the triples of Table 11 have their own test.
        for stage in (s for s in loaded.stages if s.data and not s.data[0].triples):
            read: set[str] = set()
            try:
                if isinstance(stage, Teacher | Align | RetroMae):
                    read = {text.text for text in read_texts(stage.data, frozenset(), {})[0]}
                else:
                    read = {e.query for e in read_examples(stage.data, frozenset(), {})[0]}
            except TrainingError as error:  # a fold of so few questions may be empty
                assert error.code in ("no_examples", "no_texts")
            assert not read & set(tested.values()), (name, stage.label)


def test_candidates_are_distinct_and_include_the_positives(data: Path) -> None:
    test = read_test(data)
    for query, ids in test.candidates.items():
        assert set(test.dev.qrels[query]) <= set(ids) <= set(test.dev.documents)
        assert len(ids) == len(set(ids))
    assert read_test(data).candidates == test.candidates
