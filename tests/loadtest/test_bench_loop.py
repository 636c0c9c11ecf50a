import faiss
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from loadtest.bench.bare import Loop, Way, batches, ways
from loadtest.bench.weights import HIDDEN_STATES, without_pooling
from loadtest.queries import SAMPLE, read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

TEXTS = read_texts(SAMPLE)[:12]


@pytest.fixture(scope="module")
def pair():
    return load_pair("care-mini")


@pytest.fixture(scope="module")
def encoder(pair):
    return OnnxEncoder(pair.query, pair.folder, 1)


def test_the_bare_loop_does_the_work_of_the_service(pair, encoder):
    index = faiss.IndexFlatIP(pair.query.dimension)
    index.add(encoder.encode(TEXTS).vectors)
    way = Way(batch=4, sessions=1, threads=1, spinning=False)
    loop = Loop(pair.query, pair.folder, index, 1, way)
    np.testing.assert_allclose(loop.encode(TEXTS), encoder.encode(TEXTS).vectors, atol=1e-5)
    assert loop.search(TEXTS[4:8])[:, 0].tolist() == [4, 5, 6, 7]


def test_batches_hold_every_text_once():
    assert [list(batch) for batch in batches(["a", "b", "c"], 2)] == [["a", "b"], ["c"]]


def test_no_way_is_tried_twice():
    assert len(set(ways())) == len(ways())


def test_a_graph_without_pooling_computes_the_same_vectors(pair, encoder):
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


def test_another_output_is_refused(pair):
    graph = onnx.load(pair.folder / pair.query.weights)
    cut = without_pooling(graph, pair.query.native_dimension)
    with pytest.raises(ValueError, match="other outputs"):
        without_pooling(cut, pair.query.native_dimension)
