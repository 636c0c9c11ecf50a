"""Pairs as sentence-transformers models, and their scores in mteb."""

import json
from pathlib import Path

import mteb
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from care.cli.main import main
from core.encoders import Pair
from core.types import Document
from evaluation.beir import write_beir
from evaluation.cmedteb.evaluate import PairModel, RankingTask
from evaluation.cmedteb.tasks import RankingData, find_tasks, task
from models.encoders.factory import load_encoder
from models.pairs import load_pair, write_pair
from tests.checkpoints import (
    LONG,
    TEXTS,
    add_dense,
    checkpoint_spec,
    write_adapter,
    write_bert,
    write_qwen3,
)
from tests.conftest import write_jsonl
from tests.errors import error_code

pytestmark = pytest.mark.train

ROLES = ("query", "document")
ALL = [*TEXTS, LONG, "高血压</s>[CLS]<|endoftext|>患者"]


def save(pair: Path | str, out: Path) -> Path:
    texts = write_jsonl(out.parent / "texts.jsonl", [{"text": text} for text in TEXTS])
    arguments = ["--pair", str(pair), "--out", str(out), "--format", "sentence-transformers"]
    assert main(["export", *arguments, "--calibration", str(texts)]) == 0
    return out


def lowest_cosines(pair: Pair, model: SentenceTransformer, texts: list[str]) -> list[float]:
    """Returns the lowest cosine of each side's vectors to those of the pair's encoders."""
    query, document = (load_encoder(side, pair.folder) for side in (pair.query, pair.document))
    found = [model.encode_query(texts), model.encode_document(texts)]
    expected = [query.encode(texts).vectors, document.encode(texts).vectors]
    return [float((a * b).sum(axis=1).min()) for a, b in zip(found, expected, strict=True)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT with a Dense module for queries, and a decoder with LoRA for documents.

    Both truncate vectors and have different prompts and maximum lengths. The decoder's tokenizer
    does not append an end token.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    add_dense(write_bert(folder / "query"), 96, "activation.Tanh")
    base = write_qwen3(folder / "document", ends_texts=False)
    write_adapter(base, folder / "lora", AutoModel, "FEATURE_EXTRACTION")
    query = checkpoint_spec(
        folder / "query",
        "mean",
        role="query",
        prompt="问：",
        weights="query",
        max_length=32,
        native_dimension=96,
        dimension=48,
    )
    document = checkpoint_spec(
        folder / "document", prompt="文：", weights="document", adapter="lora", dimension=48
    )
    pair = Pair(name="tiny", description="d", folder=folder, query=query, document=document)
    write_pair(pair, folder / "pair.toml")
    return folder


@pytest.fixture(scope="module")
def saved(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(checkpoints / "pair.toml", tmp_path_factory.mktemp("saved") / "model")


def test_both_routes_have_the_vectors_of_the_pair(checkpoints: Path, saved: Path) -> None:
    model = SentenceTransformer(str(saved), device="cpu")
    pair = load_pair(str(checkpoints / "pair.toml"))
    assert min(lowest_cosines(pair, model, ALL)) >= 0.9999
    vectors = model.encode_document(ALL)
    assert vectors.shape == (len(ALL), 48)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # Without a task, texts are encoded as queries.
    np.testing.assert_array_equal(model.encode(ALL), model.encode_query(ALL))
    assert model.prompts["document"] == "文："


def test_the_saved_model_is_also_a_pair_of_this_project(checkpoints: Path, saved: Path) -> None:
    pair, again = (load_pair(str(folder / "pair.toml")) for folder in (checkpoints, saved))
    assert again.embedding_space == pair.embedding_space
    for before, after in ((pair.query, again.query), (pair.document, again.document)):
        assert (after.weights, after.adapter) == (after.role, "")
        assert after.dimension == after.native_dimension == before.dimension
        expected = load_encoder(before, pair.folder).encode(ALL)
        found = load_encoder(after, again.folder).encode(ALL)
        assert (found.vectors * expected.vectors).sum(axis=1).min() >= 0.9999
        np.testing.assert_array_equal(found.token_counts, expected.token_counts)
        np.testing.assert_array_equal(found.truncated, expected.truncated)
        # Each side is a complete model.
        alone = SentenceTransformer(str(saved / after.role), device="cpu").encode(ALL)
        assert (alone * expected.vectors).sum(axis=1).min() >= 0.9999


def test_mteb_scores_the_model_as_the_pair(checkpoints: Path, saved: Path, tmp_path: Path) -> None:
    documents = [Document(f"d{i}", a + b) for i, a in enumerate(TEXTS) for b in TEXTS[:2]]
    documents = [Document(f"d{i}", document.text) for i, document in enumerate(documents)]
    qrels = {f"q{i}": {f"d{2 * i}": 1} for i in range(len(TEXTS))}
    queries = {f"q{i}": text for i, text in enumerate(TEXTS)}
    write_beir(tmp_path / "data", "test", documents, queries, qrels)
    scores = []
    model = SentenceTransformer(str(saved), device="cpu")
    pair = load_pair(str(checkpoints / "pair.toml"))
    for system in (model, PairModel(pair, tmp_path / "cache")):
        data = find_tasks(str(tmp_path / "data"), "test")[task("retrieval")]()
        assert isinstance(data, RankingData)
        result = mteb.evaluate(
            system, RankingTask(task("retrieval"), data), cache=None, co2_tracker=False
        )
        scores.append(result.task_results[0].get_score())
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert 0 < scores[0] < 1


def test_the_embedded_pair_is_saved_with_dequantised_weights(tmp_path: Path) -> None:
    """Cosines are below 1 because only the graphs of the pair have 8-bit activations.

    The lowest of 120 questions and passages of the sample are 0.9983 and 0.9998.
    """
    out = save("care-mini", tmp_path / "model")
    model = SentenceTransformer(str(out), device="cpu")
    assert [len(model[0].sub_modules[role][0].model.encoder.layer) for role in ROLES] == [5, 12]
    sample = Path(__file__).parents[3] / "data" / "sample"
    lines = (sample / "queries.jsonl").read_text("utf-8").splitlines()[:8]
    texts = [*(json.loads(line)["text"] for line in lines), ALL[-1]]
    query, document = lowest_cosines(load_pair("care-mini"), model, texts)
    assert query >= 0.997
    assert document >= 0.9995


def test_a_graph_other_than_bert_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qwen3 = write_qwen3(tmp_path / "qwen3")
    specs = [checkpoint_spec(qwen3, weights="qwen3", role=role) for role in ("query", "document")]
    pair = Pair(name="t", description="d", folder=tmp_path, query=specs[0], document=specs[1])
    write_pair(pair, tmp_path / "pair.toml")
    arguments = ["--pair", str(tmp_path / "pair.toml"), "--out", str(tmp_path / "onnx")]
    assert main(["export", *arguments, "--precision", "fp32", "--corpus", "none"]) == 0
    capsys.readouterr()
    out = tmp_path / "model"
    arguments = ["--pair", str(tmp_path / "onnx" / "pair.toml"), "--out", str(out)]
    assert main(["export", *arguments, "--format", "sentence-transformers"]) == 1
    assert error_code(capsys.readouterr().err) == "unsupported_graph"
    assert not out.exists()


def test_an_existing_folder_is_not_changed(
    saved: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--pair", str(checkpoints / "pair.toml"), "--out", str(saved)]
    assert main(["export", *arguments, "--format", "sentence-transformers"]) == 1
    assert error_code(capsys.readouterr().err) == "folder_exists"
    assert (saved / "pair.toml").is_file()
