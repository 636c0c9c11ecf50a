"""The recipes of the ablations, the table that they end in, and a tiny run of some of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from core.errors import TrainingError
from models.training.ablation_report import (
    ABLATIONS,
    BASELINES,
    CARE,
    MAP,
    NDCG,
    ORDER,
    ORDERINGS,
    compare,
    describe,
    verdict,
    write_report,
)
from models.training.ablations import RECIPES, read_scores, read_test, run_ablations
from models.training.data import in_part, read_texts
from models.training.losses import embedding_divergence, unit
from models.training.recipe import DataEntry, Part, Recipe, load_recipe, stage_name
from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH
from tests.conftest import write_jsonl
from tests.training.conftest import DATA, RunRecipe, align

PRETRAINING = ["retromae", "unsupervised", "query-fine-tuning"]
STAGES = ["document-fine-tuning", *PRETRAINING, "teacher", "alignment", "joint"]
FACTS = {
    "questions": 4,
    "documents": 9,
    "candidates": 3,
    "stages": 5,
    "stage_minutes": 0.1,
    "processor": "a processor",
    "gpu": "",
    "threads": 1,
    "python": "3.11",
    "libraries": {"torch": "2"},
}


def recipe(name: str) -> Recipe:
    file = "base" if name == CARE else name
    return load_recipe(RECIPES / f"{file}.yaml")


def stages(name: str) -> dict[str, dict[str, Any]]:
    return {stage_name(s): s.model_dump() for s in recipe(name).stages}


def test_there_is_one_recipe_for_each_row() -> None:
    found = {load_recipe(path).name for path in RECIPES.glob("*.yaml")}
    assert found == set(ORDER)
    assert len(ORDER) == 1 + len(BASELINES) + len(ABLATIONS) == 17
    titles = [recipe(name).description for name in ORDER]
    assert len(set(titles)) == 17


def test_the_base_is_the_whole_method() -> None:
    assert list(stages(CARE)) == STAGES
    alignment, joint = stages(CARE)["alignment"], stages(CARE)["joint"]
    assert (alignment["contrastive"], alignment["mse"], alignment["kl"]) == (1, 1, 0)
    assert joint["train"] == ["query", "document"]


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("without-query-initialisation", PRETRAINING),
        ("without-document-initialisation", ["document-fine-tuning"]),
        ("without-alignment", ["teacher", "alignment"]),
        ("without-joint-fine-tuning", ["joint"]),
        ("without-retromae", ["retromae"]),
        ("without-unsupervised", ["unsupervised"]),
        ("symmetric-small", ["document-fine-tuning", "teacher", "alignment", "joint"]),
        ("symmetric-large", [*PRETRAINING, "teacher", "alignment", "joint"]),
    ],
)
def test_an_ablation_leaves_its_stages_out_and_changes_nothing_else(
    name: str, left_out: list[str]
) -> None:
    expected = {key: stage for key, stage in stages(CARE).items() if key not in left_out}
    assert stages(name) == expected


@pytest.mark.parametrize(
    ("name", "stage", "changes"),
    [
        ("without-mse", "alignment", {"mse": 0}),
        ("without-contrastive", "alignment", {"contrastive": 0}),
    ],
)
def test_an_ablation_changes_a_loss_alone(name: str, stage: str, changes: dict[str, Any]) -> None:
    expected = stages(CARE)
    expected[stage] |= changes
    assert stages(name) == expected


def test_fine_tuning_data_take_the_place_of_stage_one_texts() -> None:
    changed, base = stages("fine-tuning-data"), stages(CARE)
    sources = [entry["beir"] for entry in changed["teacher"]["data"]]
    assert sources == [entry["beir"] for entry in base["joint"]["data"]]
    assert changed["teacher"]["data"][0]["part"] == base["joint"]["data"][0]["part"]
    assert base["teacher"]["data"] != changed["teacher"]["data"]
    changed["teacher"]["data"] = base["teacher"]["data"]
    assert changed == base


def test_symmetric_recipes_have_one_encoder() -> None:
    assert recipe("symmetric-small").document is None
    assert recipe("symmetric-large").query is None


@pytest.mark.parametrize(
    ("name", "weights"), [("kale", (0, 0, 1)), ("wang-lyu", (0, 1, 0)), ("scalingnote", (0, 1, 0))]
)
def test_baselines_of_post_training_alignment(name: str, weights: tuple[int, int, int]) -> None:
    found = stages(name)
    alignment = found["alignment"]
    assert (alignment["contrastive"], alignment["mse"], alignment["kl"]) == weights
    assert "joint" not in found and "document-fine-tuning" in found
    pruned = name != "scalingnote"
    assert ("pruning" in found) == pruned
    assert all((stage in found) != pruned for stage in PRETRAINING)
    if pruned:
        assert list(found).index("pruning") == list(found).index("teacher") - 1
        assert found["pruning"]["source"] == "document"
        assert found["pruning"]["layers"] == list(recipe(name).query.layers)  # type: ignore[union-attr, arg-type]


def test_distillation_trains_a_symmetric_student() -> None:
    found = stages("distillation")
    assert list(found)[-1] == "distillation"
    assert found["distillation"]["side"] == "query"
    assert found["distillation"]["kl"] == found["distillation"]["contrastive"] == 1
    assert found["teacher"]["prompts"] is None
    assert found["teacher"]["data"] == found["distillation"]["data"]


def test_hotelmatch_puts_a_linear_layer_behind_the_query_encoder() -> None:
    found = stages("hotelmatch")
    assert list(found)[-2:] == ["projection", "joint"] and "alignment" not in found
    assert (found["projection"]["source"], found["projection"]["projection"]) == ("query", 384)


def test_a_new_stage_names_the_one_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    new = "stages: {cut: {kind: derive, layers: [0]%s}}"
    for before, message in (("", "none of that name"), (", before: other", "there is no 'other'")):
        path.write_text(f"extends: {RECIPES / 'base.yaml'}\n{new % before}")
        with pytest.raises(TrainingError, match=message):
            load_recipe(path)
    path.write_text(
        f"extends: {RECIPES / 'base.yaml'}\nstages: {{cut: {{kind: derive, before: joint}}}}"
    )
    with pytest.raises(TrainingError, match=r"stages\.cut.*: .*name layers or projection"):
        load_recipe(path)


def test_divergence_of_embeddings_is_that_of_their_softmax() -> None:
    torch.manual_seed(1)
    student, teacher = (unit(torch.randn(3, 5, dtype=torch.float64)) for _ in range(2))
    p, q = (np.exp(x.numpy() / 0.1) for x in (teacher, student))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    expected = (p * np.log(p / q)).sum(axis=1).mean()
    assert float(embedding_divergence(student, teacher, 0.1)) == pytest.approx(expected)
    assert float(embedding_divergence(teacher, teacher, 0.1)) == pytest.approx(0)


def test_derive_cuts_the_trained_document_encoder(
    base: dict[str, Any], bert: Path, run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["document"] |= {"start": str(bert), "pooling": "cls"}
    base["stages"] = [
        {
            "kind": "contrastive",
            "side": "document",
            "data": DATA,
            "batch": 4,
            "learning_rate": 0.01,
        },
        {"kind": "derive", "layers": [1], "projection": 7},
        align(data=DATA, vectors="none"),
    ]
    with pytest.raises(TrainingError, match=r"none/.*cannot be read"):
        run_recipe(base)
    trained, derived = (
        load_file(next((tmp_path / "out/stages").glob(f"{name}-*/{side}/model.safetensors")))
        for name, side in (("contrastive", "document"), ("derive", "query"))
    )
    started = load_file(bert / "model.safetensors")
    assert not torch.equal(
        started["embeddings.word_embeddings.weight"], derived["embeddings.word_embeddings.weight"]
    )
    for name, value in derived.items():
        assert torch.equal(value, trained[name.replace("encoder.layer.0.", "encoder.layer.1.")])
    assert any((tmp_path / "out/stages").glob("derive-*/query/1_Dense/config.json"))


def test_a_stage_with_its_own_seed_is_shared_by_seeds(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    stage = {"kind": "contrastive", "data": DATA, "batch": 4}
    base["stages"] = [stage | {"name": "shared", "seed": 5}, stage | {"name": "drawn"}]
    for seed in (0, 1):
        run_recipe(base, f"seeds=[{seed}]")
    assert len(list((tmp_path / "out/stages").glob("shared-*"))) == 1
    assert len(list((tmp_path / "out/stages").glob("drawn-*"))) == 2


def test_parts_narrow_texts_down(data: Path) -> None:
    part = Part(folds=3, only=1)
    entry = DataEntry(texts=str(data / "corpus.jsonl"), part=part, role="document")
    texts, _ = read_texts([entry], frozenset(), {})
    assert [t.text for t in texts] == [t for t in dict.fromkeys(TEXTS) if in_part(t, part)]
    # Of a part of the queries the documents are those that answer it.
    entry = DataEntry(beir=str(data), part=part)
    found, _ = read_texts([entry], frozenset(), {})
    rows = [i for i, text in enumerate(TEXTS) if in_part(f"{text}？", part)]
    expected = {TEXTS[(i + 1) % len(TEXTS)] for i in rows}
    assert {t.text for t in found if t.role == "document"} == expected
    assert {t.text for t in found if t.role == "query"} == {f"{TEXTS[i]}？" for i in rows}


def known(**values: list[list[float]]) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Scores by recipe: a list of questions for each seed; MAP@10 is half of nDCG@10."""
    return {
        name.replace("_", "-"): {
            seed: {NDCG: found, MAP: [value / 2 for value in found]}
            for seed, found in enumerate(seeds)
        }
        for name, seeds in values.items()
    }


def test_table_of_known_scores() -> None:
    scores = known(care=[[0.5] * 4, [0.7] * 4], kale=[[0.1] * 4])
    lines = describe(["care", "kale"], {"care": "CARE", "kale": "KALE"}, scores, {}, FACTS)
    rows = lines.splitlines()
    # The deviation of 50 and 70 is 10 · √2.
    assert rows[2] == "| CARE | 2 | 60.0 ± 14.1 | 30.0 ± 7.1 |"
    assert rows[3] == "| KALE | 1 | 10.0 | 5.0 |"
    assert "4 questions, 9 documents to search, 3 to rerank" in lines


def test_orderings_hold_or_do_not() -> None:
    question = np.arange(40) / 100
    scores = known(
        care=[(question + 0.2).tolist(), (question + 0.3).tolist()],
        kale=[(question + 0.1).tolist(), (question + 0.1).tolist()],
        hotelmatch=[(question + 0.5).tolist()],
        without_mse=[(question + 0.2 + 0.1 * (-1) ** np.arange(40)).tolist()],
        symmetric_large=[(question + 0.4).tolist()],
    )
    compared = compare(scores)
    assert set(compared) == {(CARE, "kale"), (CARE, "hotelmatch"), (CARE, "without-mse")}
    assert compared[CARE, "kale"][NDCG].value == pytest.approx(0.15)
    # One seed alone is shared.
    assert compared[CARE, "hotelmatch"][MAP].value == pytest.approx(-0.15)
    said = [verdict(compared[CARE, n][NDCG]) for n in ("kale", "hotelmatch", "without-mse")]
    assert said == ["holds", "does not hold", "is undecided"]
    text = describe(list(scores), {}, scores, compared, FACTS)
    assert "- care above kale: holds in nDCG@10 (+15.0, 95 % interval +15.0 to +15.0)" in text
    assert "- care above hotelmatch: does not hold in nDCG@10 (-30.0" in text
    assert [line[-2] for line in text.splitlines() if "; seeds: " in line] == ["2", "1", "1"]
    # (0.195 + 0.25) over (0.195 + 0.4)
    assert "CARE reaches 75 % of the large encoder on both sides" in text


def test_every_row_is_in_an_ordering() -> None:
    assert {name for pair in ORDERINGS for name in pair} == set(ORDER)


def test_report_is_written(tmp_path: Path) -> None:
    scores = known(care=[[0.5] * 4] * 2, kale=[[0.1] * 4] * 2)
    write_report(tmp_path, {"care": "CARE"}, scores, FACTS)
    summary = json.loads((tmp_path / "scores.json").read_text())
    assert summary["scores"]["kale"][MAP] == {"0": 0.05, "1": 0.05}
    assert summary["orderings"][0]["verdict"] == "holds"
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Each text answers the one before; the same for both splits, questions by other words."""
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(folder / "corpus.jsonl", corpus)
    for split, mark in (("train", "？"), ("dev", "吗？")):
        queries = [{"_id": f"q{i}", "text": f"{text}{mark}"} for i, text in enumerate(TEXTS)]
        write_jsonl(folder / f"{split}.queries.jsonl", queries)
        rows = [f"q{i}\td{(i + 1) % len(TEXTS)}\t1\n" for i in range(len(TEXTS))]
        (folder / f"{split}.qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    pairs = [{"text1": text, "text2": f"{text}呢"} for text in TEXTS]
    write_jsonl(folder / "train.paraphrases.jsonl", pairs)
    return folder


@pytest.fixture
def recipes(tmp_path: Path, bert: Path) -> Path:
    """The real recipes on a base whose encoders are tiny and whose data are all taken."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for path in RECIPES.glob("*.yaml"):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        _shrink(recipe, str(bert))
        (folder / path.name).write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def _shrink(value: Any, start: str) -> None:
    """Takes all data, small batches and a layer or the width of the tiny encoder."""
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
    only = ["care", "kale", "without-joint-fine-tuning"]
    lines: list[str] = []
    table = run_ablations(data, out, 2, only, lines.append, recipes)
    (of_data,) = (out / "scores").iterdir()
    scores = read_scores(of_data)
    assert set(scores) == set(only)
    assert all(set(seeds) == {0, 1} for seeds in scores.values())
    assert all(len(found[NDCG]) == len(TEXTS) for s in scores.values() for found in s.values())
    text = table.read_text(encoding="utf-8")
    assert text.count("| 2 |") == len(only) and "CARE above KALE: " in text
    # What recipes share is made once: the small encoder's own stages for each seed.
    assert len(list((out / "stages").glob("query-fine-tuning-*"))) == 2
    # A second call makes nothing anew and says the same.
    lines.clear()
    assert run_ablations(data, out, 2, only, lines.append, recipes).read_text("utf-8") == text
    assert sum(": reused " in line for line in lines) == 2 * (7 + 4 + 6)
    # Scores of other data stay out of the table.
    with (data / "corpus.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"_id": "new", "text": "新的段落", "metadata": {}}) + "\n")
    table = run_ablations(data, out, 1, only[:1], lines.append, recipes)
    assert "CARE above KALE: " not in table.read_text(encoding="utf-8")


def test_unknown_recipe(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--only: there is no 'kalle': care, "):
        run_ablations(data, tmp_path, 1, ["kalle"], print)
    with pytest.raises(TrainingError, match="--seeds: 0 is less than 1"):
        run_ablations(data, tmp_path, 0, [], print)


def test_candidates_hold_the_positives_and_no_document_twice(data: Path) -> None:
    test = read_test(data)
    for query, ids in test.candidates.items():
        assert set(test.dev.qrels[query]) <= set(ids) <= set(test.dev.documents)
        assert len(ids) == len(set(ids))
    assert read_test(data).candidates == test.candidates
