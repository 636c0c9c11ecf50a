"""Required properties of the committed recipes."""

import json
from pathlib import Path
from typing import Any

import pytest

import training
from core.encoders import Role
from evaluation.beir import beir_paths
from tests.conftest import write_jsonl
from tests.training.conftest import write_split
from training.data import entry_files, read_dev, read_examples, read_texts
from training.recipe import Recipe, load_recipe
from training.stages.base import TrainingStage
from training.stages.contrastive import Contrastive, Joint
from training.stages.pretraining import RetroMae, Unsupervised
from training.stages.teacher import Align, Distill, Teacher

ROOT = Path(__file__).parents[2]
RECIPES = Path(training.__file__).parent / "recipes"
# Keys that recipes of the paper may set: paths of data, memory and precision.
SCALE = {"kind", "name", "side", "data", "prompts", "dimensions", "precision", "batch"} | {
    "mini_batch",
    "gradient_checkpointing",
    "trainer",
}


def recipe(name: str, *changes: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml", changes)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_recipes_load(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_defaults_are_those_of_the_paper() -> None:
    """Learning rate, warm-up, batch and epochs of each kind of stage (arXiv 2604.10937)."""
    kinds = (RetroMae, Unsupervised, Contrastive, Align, Joint, Distill)
    keys = ("learning_rate", "warmup", "batch", "epochs")
    found = {kind: tuple(kind.model_fields[key].default for key in keys) for kind in kinds}
    assert found == {
        RetroMae: (2e-4, 0, 384, 3),
        Unsupervised: (1e-4, 0.05, 19_200, 3),
        Contrastive: (1e-4, 0.05, 640, 2),
        Align: (1e-4, 0.05, 2_560, 1),
        Joint: (1e-4, 0.05, 640, 1),
        Distill: (1e-4, 0.05, 640, 1),
    }
    assert (Align.model_fields["contrastive"].default, Align.model_fields["mse"].default) == (1, 1)


@pytest.mark.parametrize("name", ["care-0.3b-4b", "care-0.3b-8b"])
def test_recipes_of_the_paper_do_not_change_its_settings(name: str) -> None:
    paper = recipe(name)
    assert paper.query and paper.document and paper.document.lora
    assert (paper.query.pooling, paper.document.pooling) == ("cls", "last_token")
    assert paper.document.dimension == 768
    for stage in paper.stages:
        assert stage.model_fields_set <= SCALE, stage.label
        if isinstance(stage, TrainingStage):
            assert stage.batch == type(stage).model_fields["batch"].default
            assert stage.gradient_checkpointing
            # Half precision with weights of the same width.
            assert stage.precision != "fp32"
    kinds = [stage.kind for stage in paper.stages]
    assert kinds.index("retromae") < kinds.index("unsupervised") < kinds.index("contrastive")
    assert kinds[-3:] == ["teacher", "align", "joint"]


def test_the_larger_recipe_of_the_paper_trains_the_same_stages() -> None:
    small, large = recipe("care-0.3b-4b"), recipe("care-0.3b-8b")
    assert [stage.label for stage in large.stages] == [stage.label for stage in small.stages]
    # bf16, because weights in bfloat16 may exceed the range of fp16.
    assert large.document and large.document.dtype == "bfloat16"
    for stage in large.stages:
        sides: list[Role] = list(getattr(stage, "train", [getattr(stage, "side", "query")]))
        assert getattr(stage, "precision", "") == ("bf16" if "document" in sides else "fp16")


@pytest.fixture
def two_sources(tmp_path: Path) -> Path:
    """Passages of patients, which may train a model, and of a knowledge base, which may not."""

    def passage(id_: str, text: str, source: str) -> dict[str, Any]:
        return {"_id": id_, "title": "", "text": text, "metadata": {"source": source}}

    corpus = [
        passage("t1", "清淡饮食，按时服用降压药。", "patient-qa"),
        passage("h1", "建议手术治疗，并使用抗生素控制感染。", "knowledge-qa"),
    ]
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    queries = {"a": "高血压吃什么？", "b": "这种病怎么治？"}
    write_split(tmp_path, "train", queries, [("a", "t1", 1), ("b", "h1", 1)])
    return tmp_path


def test_care_mini_is_not_trained_on_research_only_texts(two_sources: Path) -> None:
    changes = [f"variables.data={two_sources}"]
    for name, text in (("phrases", "头痛"), ("long_phrases", "咳嗽"), ("more_phrases", "腹泻")):
        path = write_jsonl(two_sources / f"{name}.jsonl", [{"text": text}])
        changes.append(f"variables.{name}={path}")
    read: set[str] = set()
    for stage in recipe("care-mini", *changes).stages:
        if isinstance(stage, Teacher | Align):
            read |= {text.text for text in read_texts(stage.data, frozenset(), {})[0]}
        elif stage.data:
            for example in read_examples(stage.data, frozenset(), {})[0]:
                read |= {example.query, *example.positives}
    assert {"高血压吃什么？", "头痛", "咳嗽", "腹泻", "清淡饮食，按时服用降压药。"} <= read
    assert not any("手术" in text or "抗生素" in text or "这种病" in text for text in read)


def test_the_sample_recipe_needs_no_data_besides_the_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    sample = recipe("sample")
    assert {init.start for init in sample.encoders.values()} == {"embedded"}
    files = [path for stage in sample.stages for e in stage.data for path in entry_files(e, {})]
    assert files and all(path.is_file() and path.parts[0] == "data" for path in files)


def test_the_sample_recipe_trains_on_no_question_that_it_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    sample = recipe("sample")
    assert sample.dev and sample.dev.split == "dev"
    dev = read_dev(sample.dev)
    judged = beir_paths(Path("data/sample"), "dev").qrels.read_text("utf-8").splitlines()[1:]
    assert dev.queries.keys() == {line.split("\t")[0] for line in judged}
    # None is dropped as a query of dev: the split train has other queries.
    for stage in sample.stages:
        if isinstance(stage, Joint):
            examples, dropped = read_examples(stage.data, frozenset(dev.queries.values()), {})
            assert (len(examples), dropped) == (40, 0)


def test_the_sample_recipe_measures_all_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sample = recipe("sample")
    assert sample.dev
    corpus = (ROOT / "data/sample/corpus.jsonl").read_text("utf-8").splitlines()
    assert read_dev(sample.dev).documents.keys() == {json.loads(line)["_id"] for line in corpus}
