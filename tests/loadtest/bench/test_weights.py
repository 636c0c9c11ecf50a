"""Weights for the compared systems."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from core.encoders import Pair
from loadtest.bench.comparison import ONNX_FP32, ONNX_INT8, TORCH
from loadtest.bench.weights import HIDDEN_STATES, without_pooling, write_weights
from loadtest.traffic import SAMPLE, read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

pytestmark = pytest.mark.train

TEXTS = read_texts(SAMPLE)[:12]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("care-mini")


def test_a_graph_without_pooling_computes_the_same_vectors(pair: Pair) -> None:
    encoder = OnnxEncoder(pair.query, pair.folder, 1)
    graph = onnx.load(pair.folder / pair.query.weights)
    cut = without_pooling(graph, pair.query.native_dimension)
    session = ort.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])
    tokens = encoder.tokenize(TEXTS)
    longest = max(len(t) for t in tokens)
    ids, mask = np.zeros((2, len(tokens), longest), dtype=np.int64)
    for row, token in enumerate(tokens):
        ids[row, : len(token)], mask[row, : len(token)] = token.ids, 1
    (states,) = session.run([HIDDEN_STATES], {"input_ids": ids, "attention_mask": mask})
    pooled = (states * mask[..., None]).sum(axis=1)
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, encoder.encode_tokens(tokens).vectors, atol=1e-5)


def test_weights_for_other_systems_give_the_vectors_of_the_service(
    tmp_path: Path, pair: Pair
) -> None:
    out = tmp_path / "weights"
    write_weights(out)
    expected = OnnxEncoder(pair.query, pair.folder, threads=1).encode(TEXTS).vectors
    found = {TORCH: SentenceTransformer(str(out / TORCH), device="cpu").encode(TEXTS)}
    for name in (ONNX_FP32, ONNX_INT8):
        tokens = AutoTokenizer.from_pretrained(out / name)(TEXTS, padding=True, return_tensors="np")
        session = ort.InferenceSession(
            str(out / name / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}
        (states,) = session.run([HIDDEN_STATES], inputs)
        pooled = (states * tokens["attention_mask"][..., None]).sum(axis=1)
        found[name] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    # The benchmark requires 0.99.
    for name, vectors in found.items():
        cosine = (vectors * expected).sum(axis=1).min()
        assert cosine >= (0.99999 if name == ONNX_INT8 else 0.997), name
    assert (out / "complete").is_file()
    write_weights(out)


def test_a_graph_with_other_outputs_is_an_error(pair: Pair) -> None:
    graph = onnx.load(pair.folder / pair.query.weights)
    cut = without_pooling(graph, pair.query.native_dimension)
    with pytest.raises(ValueError):
        without_pooling(cut, pair.query.native_dimension)
