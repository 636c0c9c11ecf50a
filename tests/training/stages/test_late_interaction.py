from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from core.rows import Rows
from models.late_interaction import max_sim, normalized
from tests.checkpoints import MAX_LENGTH, TEXTS, WIDTH, write_qwen3
from tests.errors import raises
from tests.training.conftest import DATA, RunRecipe, only
from training.encoder import Encoder, tokenize
from training.errors import TrainingError
from training.init import prepare
from training.projections import Candidates, fit_projections, max_sim_scores
from training.schema import EncoderInit, LateInteractionSettings
from training.vectors import token_states

pytestmark = pytest.mark.train


def late_interaction(**changes: Any) -> dict[str, Any]:
    settings = {"dimension": 16, "depth": 6, "candidates": 4, "batch": 3, "log_every": 1}
    return {"kind": "late_interaction", "data": DATA} | settings | changes


def one_encoder(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return base | {"document": base["query"], "stages": [late_interaction(**changes)]}


def test_the_stage_writes_projections_for_the_run(
    base: dict[str, Any], run_recipe: RunRecipe
) -> None:
    folder = run_recipe(one_encoder(base))
    found = load_file(folder / "tokens.safetensors")
    assert {role: x.shape for role, x in found.items()} == {
        "query": (64, 16),
        "document": (64, 16),
    }
    # Training moved both away from their common start.
    assert not np.allclose(found["query"], found["document"], atol=1e-4)
    stages = folder.parents[1] / "stages"
    changed = only(stages, "late_interaction-*").stat().st_mtime_ns
    assert run_recipe(one_encoder(base)) == folder
    assert only(stages, "late_interaction-*").stat().st_mtime_ns == changed


def test_encoders_of_different_widths_are_an_error(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    wide = write_qwen3(tmp_path / "wide", ends_texts=False, hidden_size=2 * WIDTH)
    document = base["document"] | {"start": str(wide)}
    recipe = base | {"document": document, "stages": [late_interaction()]}
    with raises(TrainingError, "dimension_mismatch", key="stages.late_interaction"):
        run_recipe(recipe)
    document = document | {"dimension": WIDTH}
    with raises(TrainingError, "dimension_mismatch", key="stages.late_interaction"):
        run_recipe(recipe | {"document": document})
    with raises(TrainingError, "dimension_too_large", key="stages.late_interaction.dimension"):
        run_recipe(one_encoder(base, dimension=WIDTH + 8))


def test_token_states_are_those_of_each_text_alone(bert: Path, tmp_path: Path) -> None:
    init = EncoderInit(start=str(bert), pooling="cls", max_length=MAX_LENGTH)
    checkpoint = prepare(init, "query", tmp_path)
    states = token_states(
        tmp_path / "vectors", checkpoint, "query", TEXTS, max_length=8, batch=4, precision="fp32"
    )
    encoder = Encoder(checkpoint, trainable=False)
    for row, text in enumerate(TEXTS):
        ids, mask = tokenize(checkpoint, "", [text]).padded([0])
        assert len(states[row]) == min(ids.shape[1], 8)
        if ids.shape[1] <= 8:
            expected = encoder.states(ids, mask)[0].detach().numpy()
            np.testing.assert_allclose(states[row], normalized(expected), atol=2e-3)


def test_scores_with_gradients_are_those_of_max_sim() -> None:
    rng = np.random.default_rng(0)
    lengths = [[2, 5, 3], [4, 1, 5]]
    queries = [normalized(rng.standard_normal((n, 8)).astype(np.float32)) for n in (3, 2)]
    documents = [
        [normalized(rng.standard_normal((n, 8)).astype(np.float32)) for n in row] for row in lengths
    ]
    query, document = torch.zeros(2, 3, 8), torch.zeros(2, 3, 5, 8)
    query_mask, mask = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, 5, dtype=torch.bool)
    for i in range(2):
        query[i, : len(queries[i])] = torch.from_numpy(queries[i])
        query_mask[i, : len(queries[i])] = True
        for j, tokens in enumerate(documents[i]):
            document[i, j, : len(tokens)] = torch.from_numpy(tokens)
            mask[i, j, : len(tokens)] = True
    found = max_sim_scores(query, query_mask, document, mask)
    expected = [max_sim(q, d) for q, d in zip(queries, documents, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_projections_learn_which_tokens_matter() -> None:
    """Relevant documents share a token with the query; noise of more variance hides it."""
    rng = np.random.default_rng(0)
    topics = np.eye(16, dtype=np.float32)[:8]

    def states(topic: int) -> Any:
        noise = np.zeros((3, 16), dtype=np.float32)
        noise[:, 8:] = 3 * rng.standard_normal((3, 8))
        return normalized(topics[topic] + noise).astype(np.float16)

    names = rng.integers(0, 8, 200)
    others = (names[:, None] + np.array([0, *range(1, 8)])) % 8
    queries = Rows(np.concatenate([states(t) for t in names]), np.arange(201) * 3)
    documents = Rows(np.concatenate([states(t) for t in others.ravel()]), np.arange(1601) * 3)
    positive = np.zeros((200, 8), dtype=np.bool_)
    positive[:, 0] = True
    zeros = np.zeros((200, 8), dtype=np.float32)
    candidates = Candidates(
        queries, documents, np.arange(1600).reshape(200, 8), zeros, zeros, positive
    )
    settings = LateInteractionSettings(
        dimension=16,
        depth=8,
        candidates=8,
        labels=1,
        temperature=0.3,
        learning_rate=0.05,
        epochs=10,
        log_every=1,
    )
    torch.manual_seed(0)
    projections, history = fit_projections(settings, candidates)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    # Norms are those of the topics' rows, not of the rows of noise.
    for matrix in projections.values():
        norms = np.linalg.norm(matrix, axis=1)
        assert norms[:8].mean() > 2 * norms[8:].mean()
