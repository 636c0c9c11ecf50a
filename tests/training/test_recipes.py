"""Required properties of the committed recipes."""

import json
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

import training
from core.encoders import Role
from core.records import Triple
from evaluation.beir import beir_paths, write_split
from tests.conftest import write_jsonl
from tests.training.conftest import OF_TWO_SOURCES
from training.data import entry_files, read_dev, read_examples, read_texts
from training.recipe import Recipe, load_recipe
from training.schema import Prompts
from training.stages.base import Context, TrainingStage
from training.stages.contrastive import Contrastive, Joint, RetroMae, Unsupervised
from training.stages.teacher import Align, Distill, Teacher

ROOT = Path(__file__).parents[2]
RECIPES = Path(training.__file__).parent / "recipes"
WIDTH = 64  # of tiny checkpoints


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


PAPER = yaml.safe_load((Path(__file__).parent / "paper.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", PAPER)
def test_recipes_have_the_settings_of_the_paper(name: str) -> None:
    resolved = recipe(name).model_dump()
    resolved["stages"] = {stage["name"] or stage["kind"]: stage for stage in resolved["stages"]}
    found = {key: reduce(getitem, key.split("."), resolved) for key in PAPER[name]}
    assert found == {key: value for key, (value, source) in PAPER[name].items()}


def test_the_recipes_of_the_paper_have_its_stages_and_its_optimizer() -> None:
    paper = recipe("care-0.3b-4b")
    kinds = ["retromae", "unsupervised", "contrastive", "contrastive", "teacher", "align", "joint"]
    assert [stage.kind for stage in paper.stages] == kinds
    for stage in (*paper.stages, *recipe("care-0.3b-8b").stages):
        # The others are AdamW and linear decay, Tables 19 and 20.
        changed = stage.trainer.keys() if isinstance(stage, TrainingStage) else set()
        assert not changed & {"optim", "lr_scheduler_type", "learning_rate"}
    assert {init.prompts for init in paper.encoders.values()} == {Prompts()}


# Tables 3 to 7 and 12 of the paper.
OF_PAPER = sorted(
    path.relative_to(RECIPES).with_suffix("").as_posix()
    for path in (*RECIPES.glob("care-0.3b-*.yaml"), *RECIPES.glob("paper/*.yaml"))
)


@pytest.mark.train
@pytest.mark.parametrize("name", OF_PAPER)
def test_recipes_of_the_paper_can_start_with_data_of_their_layout(
    name: str, paper_data: Path, gte: Path, qwen3: Path, prepared: Path
) -> None:
    from training.init import prepare

    loaded = recipe(name, *tiny(name, paper_data, gte, qwen3))
    assert loaded.dev and read_dev(loaded.dev).qrels == {"q1": {"d1": 1}}
    assert Path(name).name in (loaded.name, "baseline")
    planned = Context(0, Path())
    for stage in loaded.stages:
        stage.check(planned, loaded.encoders.keys())
        stage.publish(planned, Path())
    made = {side: prepare(init, side, prepared) for side, init in loaded.encoders.items()}
    assert len({checkpoint.dimension for checkpoint in made.values()}) == 1
    last = {side: checkpoint.native_dimension for side, checkpoint in made.items()}
    for stage in loaded.stages:
        if isinstance(stage, Contrastive):
            assert all(dimension <= last[stage.side] for dimension in stage.dimensions)
        entries = stage.data or planned.teachers["teacher"].data
        texts, _ = read_texts(entries, frozenset(), {})
        assert texts


def tiny(name: str, data: Path, gte: Path, qwen3: Path) -> list[str]:
    """Returns changes for the paths and sizes of tiny checkpoints."""
    if name == "paper/baseline":
        changes = {"variables.data": data, "query.pair": "null", "query.start": gte}
        return [f"{key}={value}" for key, value in changes.items()] + ["query.max_length=48"]
    changes = {"variables.data": data, "variables.query": gte, "variables.document": qwen3}
    before = recipe(name)
    for side, init in before.encoders.items():
        changes[f"{side}.max_length"] = 48
        if init.dimension:
            changes[f"{side}.dimension"] = WIDTH
        if init.layers:
            changes[f"{side}.layers"] = [0]
    for stage in before.stages:
        if isinstance(stage, Contrastive) and stage.dimensions:
            changes[f"stages.{stage.label}.dimensions"] = [16, 32, WIDTH]
    return [f"{key}={value}" for key, value in changes.items()]


@pytest.fixture(scope="module")
def gte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_gte_mlm

    return write_gte_mlm(tmp_path_factory.mktemp("gte") / "gte")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of initial checkpoints, which recipes share."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def paper_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the recipes of the paper read."""
    folder = tmp_path_factory.mktemp("care")
    document = {"title": "头痛怎么办", "text": "休息，多喝水。"}
    write_jsonl(folder / "pairs.jsonl", [document])
    write_jsonl(folder / "queries.jsonl", [{"_id": "q1", "text": "头痛吃什么药"}])
    write_jsonl(folder / "corpus.jsonl", [{"_id": "d1", **document}])
    triple = {"query": "头痛", "positives": [document], "negatives": ["骨折以后怎么固定"]}
    write_jsonl(folder / "fine-tuning.jsonl", [triple])
    (folder / "dev").mkdir()
    write_jsonl(folder / "dev" / "corpus.jsonl", [{"_id": "d1", **document}])
    write_split(folder / "dev", "dev", {"q1": "孩子头痛"}, {"q1": {"d1": 1}})
    return folder


def test_the_larger_recipe_of_the_paper_trains_the_same_stages() -> None:
    small, large = recipe("care-0.3b-4b"), recipe("care-0.3b-8b")
    assert [stage.label for stage in large.stages] == [stage.label for stage in small.stages]
    # bf16, because weights in bfloat16 may exceed the range of fp16.
    assert large.document and large.document.dtype == "bfloat16"
    for stage in large.stages:
        sides: list[Role] = list(getattr(stage, "train", [getattr(stage, "side", "query")]))
        assert getattr(stage, "precision", "") == ("bf16" if "document" in sides else "fp16")


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


@pytest.mark.parametrize("name", ["care-mini-query", "care-mini-lookup"])
def test_query_encoders_of_care_mini_are_not_trained_on_research_only_texts(
    two_sources: Path, name: str
) -> None:
    for split in ("train-described", "train-reworded", "train-rewrites", "train-keywords"):
        write_split(two_sources, split, *OF_TWO_SOURCES)
    changes = [f"variables.data={two_sources}"]
    files = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))["variables"]
    for file in files.keys() - {"pair", "data", "precision"}:
        record = {"text": f"{file} 咋办", "original_text": "怎么办"}
        changes.append(f"variables.{file}={write_jsonl(two_sources / f'{file}.jsonl', [record])}")
    *_, teacher, align = recipe(name, *changes).stages
    assert isinstance(teacher, Teacher) and isinstance(align, Align) and align.examples
    taught = {text.text for text in read_texts(teacher.data, frozenset(), {})[0]}
    pairs = read_examples(align.data, frozenset(), {})[0]
    # The teacher encodes the originals only, which are what the rewordings learn.
    assert {text for pair in pairs for text in pair.positives} == taught
    assert ("reworded_questions 咋办", ("怎么办",)) in [(p.query, p.positives) for p in pairs]
    (example,) = read_examples(align.examples.data, frozenset(), {})[0]
    assert example == Triple("高血压吃什么？", ("清淡饮食，按时服用降压药。",))


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The sample recipe, in the folder that its paths are relative to."""
    monkeypatch.chdir(ROOT)
    return recipe("sample")


def test_the_sample_recipe_needs_no_data_besides_the_repository(sample: Recipe) -> None:
    assert {init.start for init in sample.encoders.values()} == {"embedded"}
    files = [path for stage in sample.stages for e in stage.data for path in entry_files(e, {})]
    assert files and all(path.is_file() and path.parts[0] == "data" for path in files)


def test_the_sample_recipe_measures_all_passages_on_questions_that_it_does_not_train_on(
    sample: Recipe,
) -> None:
    assert sample.dev and sample.dev.split == "dev"
    dev = read_dev(sample.dev)
    judged = beir_paths(Path("data/sample"), "dev").qrels.read_text("utf-8").splitlines()[1:]
    assert dev.queries.keys() == {line.split("\t")[0] for line in judged}
    corpus = Path("data/sample/corpus.jsonl").read_text("utf-8").splitlines()
    assert dev.documents.keys() == {json.loads(line)["_id"] for line in corpus}
    # None is dropped as a query of dev: the split train has other queries.
    for stage in sample.stages:
        if isinstance(stage, Joint):
            examples, dropped = read_examples(stage.data, frozenset(dev.queries.values()), {})
            assert (len(examples), dropped) == (40, 0)
