from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.training.conftest import DATA, RunRecipe
from tests.training.runs import history_of
from training.errors import TrainingError

pytestmark = pytest.mark.train

RETROMAE = {"kind": "retromae", "data": DATA, "batch": 3, "epochs": 20, "learning_rate": 3e-3}


def test_retromae_learns_to_reconstruct_texts(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [RETROMAE]
    folder = run_recipe(base)
    # Pretraining of one encoder produces no pair.
    assert not (folder / "pair.toml").exists()
    history = history_of(tmp_path / "out" / "stages", "retromae")
    losses = [entry["decoder"] for entry in history if "decoder" in entry]
    assert losses[-1] < losses[0]


def test_retromae_rejects_an_encoder_with_a_projection(
    base: dict[str, Any], run_recipe: RunRecipe
) -> None:
    base["query"]["projection"] = 8
    base["stages"] = [RETROMAE]
    with raises(TrainingError, "has_projection"):
        run_recipe(base)
