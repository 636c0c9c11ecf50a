"""Fixtures of the training tests; those that need torch import it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.encoders import Pair
from evaluation.beir import write_split
from models.pairs import load_pair
from tests.conftest import write_jsonl
from training.recipe import load_recipe

RunRecipe = Callable[..., Path]
# Questions and judgements of `two_sources`.
OF_TWO_SOURCES = (
    {"a": "高血压吃什么？", "b": "这种病怎么治？"},
    {"a": {"t1": 1}, "b": {"h1": 1}},
)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_bert

    return write_bert(tmp_path_factory.mktemp("start") / "bert")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_qwen3

    return write_qwen3(tmp_path_factory.mktemp("start") / "qwen3", ends_texts=False)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of initial checkpoints that contains the embedded encoder."""
    from training.init import prepare
    from training.schema import EncoderInit

    out = tmp_path_factory.mktemp("embedded")
    prepare(EncoderInit(start="embedded", pooling="mean"), "query", out)
    return out


@pytest.fixture
def two_sources(tmp_path: Path) -> Path:
    """Passages of patients, which may train a model, and of a knowledge base, which may not."""
    documents = [
        ("t1", "清淡饮食，按时服用降压药。", "patient-qa"),
        ("t2", "绝对不会出现的句子。", "patient-qa"),
        ("h1", "建议手术治疗，并使用抗生素控制感染。", "knowledge-qa"),
    ]
    corpus = [{"_id": i, "text": t, "metadata": {"source": s}} for i, t, s in documents]
    write_jsonl(tmp_path / "corpus.jsonl", corpus)
    write_split(tmp_path, "train", *OF_TWO_SOURCES)
    return tmp_path


@pytest.fixture(scope="session")
def triples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triples: the positive of each text is the next text, its hard negative the one after."""
    from tests.checkpoints import TEXTS

    count = len(TEXTS)
    records = [
        {
            "query": text,
            "positives": [TEXTS[(i + 1) % count]],
            "negatives": [TEXTS[(i + 2) % count], TEXTS[(i + 3) % count]],
        }
        for i, text in enumerate(TEXTS)
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "triples.jsonl", records)


@pytest.fixture
def base(bert: Path, qwen3: Path, triples: Path) -> dict[str, Any]:
    """A recipe without stages."""
    from tests.checkpoints import MAX_LENGTH

    return {
        "name": "tiny",
        "query": {"start": str(bert), "pooling": "cls", "max_length": MAX_LENGTH},
        "document": {
            "start": str(qwen3),
            "pooling": "last_token",
            "max_length": MAX_LENGTH,
            "prompts": {"query": "头痛", "document": "骨折"},
        },
        "variables": {"triples": str(triples)},
        "stages": [],
    }


@pytest.fixture
def run_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecipe:
    """Writes a recipe, runs it in `out` and returns the run's folder."""
    from training.run import run

    def start(
        recipe: dict[str, Any], *changes: str, out: str = "out", curves: bool = False
    ) -> Path:
        path = write_recipe(tmp_path / "recipe.yaml", recipe)
        loaded = load_recipe(path, changes)
        with monkeypatch.context() as patch:
            if not curves:  # which take longer than a few steps of tiny models
                patch.setattr("training.results.draw", lambda *_: None)
            return run(loaded, tmp_path / out, loaded.seeds[0], lambda _: None)

    return start


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


def pair_of(run_folder: Path) -> Pair:
    return load_pair(str(run_folder / "pair.toml"))


def only(folder: Path, pattern: str) -> Path:
    """Returns the only file or folder that matches."""
    (found,) = folder.glob(pattern)
    return found


DATA = [{"triples": "${triples}"}]


def teacher(**changes: Any) -> dict[str, Any]:
    return {"kind": "teacher", "data": DATA, "shard": 4} | changes


def align(**changes: Any) -> dict[str, Any]:
    return {"kind": "align", "batch": 4, "epochs": 2, "learning_rate": 1e-3} | changes


def joint(**changes: Any) -> dict[str, Any]:
    return {"kind": "joint", "data": DATA, "batch": 3, "learning_rate": 1e-3} | changes
