"""The recipe of care-mini, and what it alone asks of the framework."""

import json
from pathlib import Path

import pytest
import torch

from core.errors import TrainingError
from models.training.data import read_examples, read_texts
from models.training.encoder import Encoder
from models.training.recipe import DataEntry, load_recipe
from models.training.starts import prepare

RECIPE = Path(__file__).parents[2] / "models" / "training" / "recipes" / "care-mini.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    def write(name: str, records: list[dict[str, object]]) -> None:
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")

    def document(id_: str, text: str, source: str) -> dict[str, object]:
        return {"_id": id_, "title": "", "text": text, "metadata": {"source": source}}

    write(
        "corpus.jsonl",
        [
            document("t1", "清淡饮食，按时服用降压药。", "patient-qa"),
            document("h1", "建议手术治疗，并使用抗生素控制感染。", "knowledge-qa"),
        ],
    )
    write(
        "train.queries.jsonl",
        [{"_id": "a", "text": "高血压吃什么？"}, {"_id": "b", "text": "这种病怎么治？"}],
    )
    (tmp_path / "train.qrels.tsv").write_text(
        "query-id\tcorpus-id\tscore\na\tt1\t1\nb\th1\t1\n", encoding="utf-8"
    )
    write("train.paraphrases.jsonl", [{"text1": "高血压吃什么？", "text2": "血压高，饮食注意什么"}])
    return tmp_path


def test_research_only_texts_train_nothing(data: Path) -> None:
    changes = [f"variables.data={data}"]
    for name, text in (("phrases", "头痛"), ("long_phrases", "咳嗽"), ("more_phrases", "腹泻")):
        path = data / f"{name}.jsonl"
        path.write_text(json.dumps({"text": text}), encoding="utf-8")
        changes.append(f"variables.{name}={path}")
    recipe = load_recipe(RECIPE, changes)
    read: set[str] = set()
    for stage in recipe.stages:
        if stage.kind in ("teacher", "align"):
            read |= {text.text for text in read_texts(stage.data, frozenset(), {})[0]}
        elif stage.data:
            for example in read_examples(stage.data, frozenset(), {})[0]:
                read |= {example.query, *example.positives}
    assert {"高血压吃什么？", "头痛", "咳嗽", "腹泻", "清淡饮食，按时服用降压药。"} <= read
    assert not any("手术" in text or "抗生素" in text or "这种病" in text for text in read)


def test_queries_follow_the_documents_that_are_asked_for(data: Path) -> None:
    entry = DataEntry(beir=str(data), where={"source": "patient-qa"}, roles=["query"])
    texts, _ = read_texts([entry], frozenset(), {})
    assert [text.text for text in texts] == ["高血压吃什么？"]


def test_frozen_layers_get_no_gradient(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE)
    assert recipe.document is not None
    encoder = Encoder(prepare(recipe.document, "document", tmp_path), trainable=True)
    encoder(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)).sum().backward()
    moved = {name for name, value in encoder.model.named_parameters() if value.grad is not None}
    frozen = {name for name, value in encoder.model.named_parameters() if not value.requires_grad}
    assert not moved & frozen
    assert any(name.startswith("embeddings.") for name in frozen)
    assert {name.split(".")[2] for name in moved} == {str(layer) for layer in range(6, 12)}


def test_more_frozen_layers_than_there_are_is_an_error(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, ["document.frozen_layers=13"])
    assert recipe.document is not None
    side = prepare(recipe.document, "document", tmp_path)
    with pytest.raises(TrainingError, match="shows no 13 layers"):
        Encoder(side, trainable=True)
