from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.errors import raises
from tests.training.conftest import DATA, RunRecipe, align, only, teacher
from training.errors import TrainingError
from training.recipe import load_recipe

pytestmark = pytest.mark.train

LARGE = {"kind": "contrastive", "side": "document", "data": DATA, "batch": 4}


def test_an_encoder_is_pruned_from_the_trained_document_encoder(
    base: dict[str, Any], bert: Path, run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["document"] |= {"start": str(bert), "pooling": "cls"}
    pruned = {"kind": "prune_layers", "layers": [1], "projection": 7}
    base["stages"] = [LARGE | {"learning_rate": 0.01}, pruned]
    run_recipe(base)
    stages = tmp_path / "out" / "stages"
    trained = load_file(only(stages, "contrastive-*/document/model.safetensors"))
    found = load_file(only(stages, "prune_layers-*/query/model.safetensors"))
    words = "embeddings.word_embeddings.weight"
    assert not torch.equal(load_file(bert / "model.safetensors")[words], found[words])
    for name, value in found.items():
        assert torch.equal(value, trained[name.replace("encoder.layer.0.", "encoder.layer.1.")])
    assert only(stages, "prune_layers-*/query/1_Dense/config.json")


def test_an_adapter_is_merged_before_its_encoder_is_pruned(
    base: dict[str, Any], qwen3: Path, run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["document"]["lora"] = {"r": 4}
    base["query"] |= {"start": str(qwen3), "pooling": "last_token"}
    base["stages"] = [
        LARGE | {"learning_rate": 0.1},
        {"kind": "prune_layers", "layers": [0]},
        teacher(),
        align(),
    ]
    run_recipe(base)
    stages = tmp_path / "out" / "stages"
    found = load_file(only(stages, "prune_layers-*/query/model.safetensors"))
    adapter = load_file(only(stages, "contrastive-*/document/adapter_model.safetensors"))
    name = "layers.0.self_attn.q_proj"
    start = load_file(qwen3 / "model.safetensors")[f"model.{name}.weight"]
    up, down = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "BA")
    assert up.abs().max() > 0
    # alpha / r = 64 / 4
    torch.testing.assert_close(found[f"{name}.weight"], start + 16 * up @ down)


def test_pruning_reads_no_data(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    stage = "{kind: prune_layers, layers: [0], data: [{beir: x}]}"
    path.write_text(f"name: x\nstages: [{stage}]")
    with raises(TrainingError, "invalid_value", key="stages.prune_layers.data"):
        load_recipe(path)
