import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import CareError, DataError
from core.records import write_jsonl
from core.shards import complete_shards
from models.encoders.transformers import TransformersEncoder
from tests.checkpoints import TEXTS
from tests.errors import raises
from tests.training.conftest import DATA, RunRecipe, align, only, pair_of, teacher
from tests.training.runs import history_of
from training import vectors
from training.encoder import encode
from training.errors import TrainingError

pytestmark = pytest.mark.train


def test_alignment_learns_and_does_not_change_the_document_encoder(
    base: dict[str, Any], run_recipe: RunRecipe, qwen3: Path, tmp_path: Path
) -> None:
    before = {p.name: p.read_bytes() for p in qwen3.iterdir()}
    base["stages"] = [teacher(), align(epochs=60, learning_rate=3e-3, dropout=0.0)]
    pair = pair_of(run_recipe(base))
    assert {p.name: p.read_bytes() for p in qwen3.iterdir()} == before
    history = history_of(tmp_path / "out" / "stages", "align")
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0] / 3
    # The teacher's vectors equal those computed at serving.
    shards = only(tmp_path / "out" / "stages", "teacher-*")
    stored = np.concatenate([np.load(path) for path in sorted(shards.glob("*.npy"))])
    served = TransformersEncoder(
        pair.document.model_copy(update={"prompt": "头痛"}), pair.folder, device="cpu"
    ).encode(TEXTS)
    found = np.abs(stored[:, None] - served.vectors[None]).max(axis=2).min(axis=0)
    assert found.max() < 2e-6
    assert len(complete_shards(shards)) == 3


def test_rewordings_learn_the_vectors_of_their_originals_and_examples_those_of_documents(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    rewordings = tmp_path / "rewordings.jsonl"
    texts = [f"发烧{text[::-1]}" for text in TEXTS]
    records = [
        {"text": text, "original": original} for text, original in zip(texts, TEXTS, strict=True)
    ]
    write_jsonl(rewordings, records)
    entry = {"pairs": str(rewordings), "fields": ["text", "original"]}
    prompts = {"query": "头痛", "document": "头痛"}
    encoded = teacher(data=[entry | {"roles": ["document"]}], prompts=prompts)
    learned = align(targets="documents", data=[entry], epochs=60, learning_rate=3e-3, dropout=0.0)
    examples = {"data": DATA, "batch": 3, "weight": 0.5}
    base["stages"] = [encoded, learned | {"examples": examples}]
    run = run_recipe(base)
    pair = pair_of(run)
    query = TransformersEncoder(pair.query, pair.folder, device="cpu").encode(texts).vectors
    spec = pair.document.model_copy(update={"prompt": "头痛"})
    originals = TransformersEncoder(spec, pair.folder, device="cpu").encode(TEXTS).vectors
    assert ((query @ originals.T).argmax(axis=1) == np.arange(len(TEXTS))).all()
    stages = tmp_path / "out" / "stages"
    history = [entry for entry in history_of(stages, "align") if "examples" in entry]
    assert history[-1]["examples"] < history[0]["examples"]
    counts = json.loads((only(stages, "align-*") / "result.json").read_text("utf-8"))["counts"]
    assert (counts["texts"], counts["examples"]) == (len(TEXTS), 6)
    # A result without the examples is another one.
    base["stages"] = [encoded, learned]
    run_recipe(base)
    assert len(list(stages.glob("align-*"))) == 2


def test_files_of_examples_are_checked_before_the_first_stage(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    missing = tmp_path / "none.jsonl"
    base["stages"] = [teacher(), align(examples={"data": [{"triples": str(missing)}]})]
    with raises(DataError, "unreadable", path=missing):
        run_recipe(base)
    assert not list((tmp_path / "out" / "stages").glob("teacher-*"))


def test_a_teacher_resumes_after_its_last_complete_shard(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base["stages"] = [teacher()]
    encoded: list[int] = []
    full = True

    def recorded(*arguments: Any, **settings: Any) -> Any:
        if full and len(encoded) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        vectors = encode(*arguments, **settings)
        encoded.append(len(vectors))
        return vectors

    monkeypatch.setattr(vectors, "encode", recorded)
    with raises(CareError, "input_output"):
        run_recipe(base)
    assert list((tmp_path / "out" / "stages").glob("teacher-*")) == []
    full = False
    before = sum(encoded)
    run_recipe(base)
    assert before > 0 and sum(encoded) == 2 * len(TEXTS)
    run_recipe(base, out="unbroken")
    shards = [only(tmp_path / out / "stages", "teacher-*") for out in ("out", "unbroken")]
    assert complete_shards(shards[0]) == complete_shards(shards[1])


def test_vectors_of_another_dimension_or_encoder_are_an_error(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher()]
    run_recipe(base)
    vectors = only(tmp_path / "out" / "stages", "teacher-*")
    stage = align(vectors=str(vectors), data=DATA)
    base["stages"] = [stage]
    base["query"]["dimension"] = 16
    with raises(TrainingError, "dimension_mismatch", path=vectors / "vectors.json"):
        run_recipe(base)
    del base["query"]["dimension"]
    run_recipe(base)
    base["document"]["layers"] = [0]
    with raises(TrainingError, "other_encoder", path=vectors / "vectors.json"):
        run_recipe(base)


def test_texts_without_vectors_and_damaged_shards_are_errors(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    base["stages"] = [teacher(data=[DATA[0] | {"roles": ["query"]}])]
    run_recipe(base)
    vectors = only(tmp_path / "out" / "stages", "teacher-*")
    base["stages"] = [align(vectors=str(vectors), data=DATA)]
    with raises(TrainingError, "missing_vectors", path=vectors, missing=6):
        run_recipe(base)
    shard = vectors / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-4])
    with raises(TrainingError, "damaged_shard", path=vectors, shard=1):
        run_recipe(base)


def test_distillation_learns_a_teachers_scores(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path
) -> None:
    stage = {"kind": "distill", "data": DATA, "batch": 6, "epochs": 20, "learning_rate": 3e-3}
    base["stages"] = [teacher(), stage | {"dropout": 0.0, "contrastive": 0.0}]
    pair = pair_of(run_recipe(base))
    # The student is the encoder of both sides.
    assert pair.query.weights == pair.document.weights
    history = history_of(tmp_path / "out" / "stages", "distill")
    losses = [entry["kl"] for entry in history if "kl" in entry]
    assert losses[-1] < losses[0] / 2
