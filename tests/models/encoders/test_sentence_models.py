"""Models of sentence-transformers as pairs: their vectors are those of the library."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from core.encoders import Pooling as PoolingName
from core.errors import PairError
from models.encoders.factory import load_encoder, sentence_model
from models.encoders.modules import write_modules
from tests.checkpoints import LONG, TEXTS, add_dense, write_bert, write_qwen3
from tests.errors import raises

pytestmark = pytest.mark.train

ALL = [*TEXTS, LONG]


def lowest_cosine(folder: Path) -> float:
    """Returns the lowest cosine to the vectors of the library, of both sides."""
    pair, model = sentence_model(str(folder)), SentenceTransformer(str(folder), device="cpu")
    cosines = []
    for spec, encode in (
        (pair.query, model.encode_query),
        (pair.document, model.encode_document),
    ):
        found = load_encoder(spec, pair.folder, device="cpu").encode(ALL).vectors
        expected = encode(ALL, normalize_embeddings=True)
        assert found.shape == expected.shape
        cosines.append(float((found * expected).sum(axis=1).min()))
    return min(cosines)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pooling_length_and_prompts_are_those_of_the_model(
    tmp_path: Path, pooling: PoolingName
) -> None:
    prompts = {"query": "孩子", "document": ""}
    write_modules(write_bert(tmp_path), pooling, max_length=12, prompts=prompts)
    pair = sentence_model(str(tmp_path))
    assert (pair.query.pooling, pair.query.max_length, pair.query.prompt) == (pooling, 12, "孩子")
    assert pair.document.prompt == ""
    assert lowest_cosine(tmp_path) > 0.9999


def test_a_model_that_the_library_saved_of_a_decoder(tmp_path: Path) -> None:
    transformer = Transformer(str(write_qwen3(tmp_path / "qwen3")))
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    model.save(str(tmp_path / "saved"))
    assert lowest_cosine(tmp_path / "saved") > 0.9999


def test_dense_modules_give_the_dimension(tmp_path: Path) -> None:
    add_dense(write_bert(tmp_path), 96)
    assert sentence_model(str(tmp_path)).document.dimension == 96
    assert lowest_cosine(tmp_path) > 0.9999


def test_a_checkpoint_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    write_bert(tmp_path)
    pair = sentence_model(str(tmp_path))
    # The positions that the model has.
    assert (pair.query.pooling, pair.query.max_length) == ("mean", 64)
    assert lowest_cosine(tmp_path) > 0.9999


def test_other_weights_are_another_revision(tmp_path: Path) -> None:
    write_bert(tmp_path)
    before = sentence_model(str(tmp_path)).query.revision
    assert sentence_model(str(tmp_path)).query.revision == before
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert sentence_model(str(tmp_path)).query.revision != before


def test_a_model_of_the_hub_has_the_revision_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    write_bert(snapshot)
    delivered: list[Any] = []

    def download(model: str, *, revision: str | None, allow_patterns: Any, **_: Any) -> str:
        delivered.append((model, revision, bool(allow_patterns)))
        return str(snapshot)

    monkeypatch.setattr("models.encoders.checkpoints.snapshot_download", download)
    pair = sentence_model("tiny/bert")
    assert (pair.name, pair.query.weights, pair.query.revision) == ("tiny/bert", "", "1" * 40)
    load_encoder(pair.document, pair.folder, device="cpu")
    # First the configuration, then the weights of the same revision.
    assert delivered == [("tiny/bert", None, True), ("tiny/bert", "1" * 40, False)]


def test_a_model_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with raises(PairError, "download_failed", model="tiny/away"):
        sentence_model("tiny/away")


def test_a_pooling_that_is_not_supported(tmp_path: Path) -> None:
    write_modules(write_bert(tmp_path), "mean", max_length=12, prompts={})
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}), "utf-8")
    with raises(PairError, "unsupported_module", module="pooling_mode_max_tokens"):
        sentence_model(str(tmp_path))
