import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.shards import ShardedVectors, write_shard
from core.types import FloatArray
from tests.errors import raises
from tests.training.conftest import DATA, RunRecipe, joint, only
from training import vectors as vectors_module
from training.errors import TrainingError
from training.recipe import load_recipe
from training.schema import DataEntry
from training.stages.mine import Mine, mine

pytestmark = pytest.mark.train


def unit_rows(*angles: float) -> Any:
    radians = np.deg2rad(angles)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


@pytest.fixture
def mined(tmp_path: Path) -> Callable[[FloatArray, FloatArray, Mine], list[int]]:
    """Mines negatives of one query, whose positive is document 0."""

    def negatives(queries: FloatArray, documents: FloatArray, stage: Mine) -> list[int]:
        ids = [str(row) for row in range(len(documents))]
        write_shard(tmp_path, 0, documents, ids, tokens=0, truncated=0)
        vectors = ShardedVectors(tmp_path, len(documents), np.arange(len(documents)))
        (found,) = mine(queries, vectors, [np.array([0])], stage, torch.device("cpu"))
        assert len(found) == stage.negatives
        return [row for row in found.tolist() if row >= 0]

    return negatives


def test_mined_negatives_respect_ranks_and_margin(mined: Any) -> None:
    queries, documents = unit_rows(0), unit_rows(40, 10, 20, 30, 50, 60)
    # Ranks without the positive (document 0, at 40 degrees): 10, 20, 30, 50, 60.
    stage = Mine(kind="mine", data=[DataEntry(texts="x")], first=2, last=4, negatives=9, margin=9)
    assert mined(queries, documents, stage) == [2, 3, 4]
    assert mined(queries, documents, stage.model_copy(update={"negatives": 1})) == [2]
    # The documents at 50 and 60 degrees are below 95 % of the positive's cosine.
    strict = stage.model_copy(update={"margin": 0.95, "first": 1, "last": 10})
    assert mined(queries, documents, strict) == [4, 5]


def test_the_margin_lowers_negative_scores_too(mined: Any) -> None:
    queries, documents = unit_rows(0), unit_rows(120, 121, 150)
    stage = Mine(kind="mine", data=[DataEntry(texts="x")], first=1, last=9, margin=0.8)
    assert mined(queries, documents, stage) == [2]


def test_a_search_on_a_gpu_finds_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on the processor take the place of a GPU's; chunks are smaller than the depth."""
    generator = np.random.default_rng(0)
    vectors, queries = generator.standard_normal((50, 8)), generator.standard_normal((7, 8))
    write_shard(tmp_path, 0, vectors.astype(np.float32), ["x"] * 50, tokens=0, truncated=0)
    documents = ShardedVectors(tmp_path, 50, np.arange(50))
    queries = queries.astype(np.float32)
    expected = vectors_module.search(queries, documents, 20, torch.device("cpu"))
    monkeypatch.setattr(vectors_module, "_DOCUMENTS", 12)
    monkeypatch.setattr(vectors_module, "_QUERIES", 3)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
    monkeypatch.setattr(torch, "full", partial(full, torch.full))
    scores, rows = vectors_module.search(queries, documents, 20, torch.device("cuda"))
    np.testing.assert_allclose(scores, expected[0], atol=1e-5)
    assert rows.tolist() == expected[1].tolist()


def full(make: Any, shape: Any, value: float, *, device: object) -> torch.Tensor:
    return make(shape, value)


def test_the_next_stage_reads_mined_negatives(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    from tests.checkpoints import TEXTS

    stage = {"kind": "mine", "data": DATA, "first": 2, "last": 4, "negatives": 2, "margin": 1000.0}
    base["stages"] = [stage, joint(data=[{"mined": "mine"}])]
    run_recipe(base)
    path = only(tmp_path / "out" / "stages", "mine-*") / "triples.jsonl"
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [record["query"] for record in records] == list(TEXTS)
    for record in records:
        assert len(record["negatives"]) == 2
        assert not set(record["negatives"]) & set(record["positives"])


def test_last_rank_below_first_rank_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nstages: [{kind: mine, data: [{beir: x}], first: 9, last: 8}]")
    with raises(TrainingError, "invalid_value", key="stages.mine"):
        load_recipe(path)
