from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import save_file

import care
from core.errors import PairError, QueryError
from core.manifest import TOKENS
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.conftest import make_records
from tests.errors import raises
from training.export.tokens import add_token_output, export_tokens, read_projections

pytestmark = pytest.mark.train

TEXTS = ["高血压患者能不能吃党参？", "头痛", "孩子发烧三十九度，先物理降温，再看医生。"]


@pytest.fixture(scope="module")
def projections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("projections") / "tokens.safetensors"
    matrices = {r: rng.standard_normal((384, 16)).astype(np.float32) for r in ("query", "document")}
    save_file(matrices, path)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, projections: Path) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exported = export_tokens(load_pair("care-mini"), projections, Path("tokens"), weight=0.5)
    return folder / exported


@pytest.mark.parametrize("role", ["query", "document"])
def test_token_vectors_come_with_the_same_sentence_vectors(exported: Path, role: str) -> None:
    pair, original = load_pair(str(exported)), load_pair("care-mini")
    encoder = OnnxEncoder(getattr(pair, role), pair.folder, 1)
    expected = OnnxEncoder(getattr(original, role), original.folder, 1).encode(TEXTS).vectors
    np.testing.assert_array_equal(encoder.encode(TEXTS).vectors, expected)
    tokens = encoder.tokenize(TEXTS)
    encoding, found = encoder.encode_token_vectors(tokens)
    np.testing.assert_array_equal(encoding.vectors, expected)
    assert encoder.token_dimension == 16
    assert [vectors.shape for vectors in found] == [(len(text), 16) for text in tokens]
    for vectors in found:
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    # Neither the batch nor its padding changes the vectors of a text.
    _, (alone,) = encoder.encode_token_vectors(tokens[1:2])
    np.testing.assert_allclose(alone, found[1], atol=1e-5)
    assert pair.embedding_space == original.embedding_space


def test_the_pair_says_what_its_token_vectors_are(
    exported: Path, projections: Path, tmp_path: Path
) -> None:
    how = load_pair(str(exported)).late_interaction
    assert how
    assert (how.dimension, how.weight, how.pooling, how.codec) == (16, 0.5, 2, "2bit")
    # Other projections compute vectors of another space.
    others = {str(role): -matrix for role, matrix in read_projections(projections).items()}
    save_file(others, tmp_path / "others.safetensors")
    other = export_tokens(load_pair("care-mini"), tmp_path / "others.safetensors", tmp_path / "out")
    found = load_pair(str(other)).late_interaction
    assert found and found.space != how.space


def test_without_projections_states_are_rotated(tmp_path: Path) -> None:
    """Similarities of token vectors are those of the states."""
    graph = onnx.load(load_pair("care-mini").folder / load_pair("care-mini").query.weights)
    plain = tmp_path / "plain.onnx"
    onnx.save(add_token_output(graph, np.eye(384, dtype=np.float32)), plain)
    pair = load_pair(str(export_tokens(load_pair("care-mini"), None, tmp_path / "out")))
    encoder = OnnxEncoder(pair.query, pair.folder, 1)
    tokens = encoder.tokenize(TEXTS[:1])
    _, (found,) = encoder.encode_token_vectors(tokens)
    ids = tokens[0].ids
    session = onnxruntime.InferenceSession(plain)
    inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    (states,) = session.run(["token_embeddings"], inputs)[0]
    np.testing.assert_allclose(found @ found.T, states @ states.T, atol=1e-4)
    assert not np.allclose(found, states, atol=0.1)
    assert pair.late_interaction and pair.late_interaction.dimension == 384


def test_token_vectors_are_projected_states(projections: Path) -> None:
    """The mean of the states, here projected by the identity, is the sentence vector."""
    pair = load_pair("care-mini")
    graph = onnx.load(pair.folder / pair.query.weights)
    states = add_token_output(graph, np.eye(384, dtype=np.float32))
    # Without the normalisation of each token.
    for node in states.graph.node:
        if node.op_type == "LpNormalization":
            node.op_type = "Identity"
            del node.attribute[:]
    session = onnxruntime.InferenceSession(states.SerializeToString())
    ids = np.array([[0, 5, 6, 7, 2], [0, 9, 2, 0, 0]])
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    sentence, tokens = session.run(None, {"input_ids": ids, "attention_mask": mask})
    assert not tokens[1, 3:].any()
    means = tokens.sum(axis=1) / mask.sum(axis=1, keepdims=True)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(means, sentence, atol=1e-5)


def test_a_graph_without_token_vectors_is_an_error() -> None:
    pair = load_pair("care-mini")
    encoder = OnnxEncoder(pair.query, pair.folder, 1)
    assert encoder.token_dimension == 0
    with raises(PairError, "no_token_output", model=pair.query.model):
        encoder.encode_token_vectors(encoder.tokenize(TEXTS))


def test_projections_that_do_not_fit_are_errors(
    tmp_path: Path, projections: Path, exported: Path
) -> None:
    pair, path = load_pair("care-mini"), tmp_path / "tokens.safetensors"
    with raises(PairError, "bad_projections", path=path):
        export_tokens(pair, path, tmp_path / "out")
    narrow = np.zeros((8, 16), dtype=np.float32)
    save_file({"query": narrow}, path)
    with raises(PairError, "bad_projections", path=path):
        export_tokens(pair, path, tmp_path / "out")
    save_file({"query": narrow, "document": narrow[:, :8].copy()}, path)
    with raises(PairError, "bad_projections", path=path):
        export_tokens(pair, path, tmp_path / "out")
    save_file({"query": narrow, "document": narrow}, path)
    with raises(PairError, "unsupported_graph"):
        export_tokens(pair, path, tmp_path / "out")
    with raises(PairError, "unsupported_graph"):
        export_tokens(load_pair(str(exported)), projections, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_index_of_the_pair_reranks(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a user: export, index with token vectors, search, update with the same pair."""
    monkeypatch.chdir(tmp_path)
    records = make_records(8)
    pair = str(exported)
    version = care.build_index("mine", records, pair=pair, token_vectors=True, threads=1)
    assert version.manifest.components[TOKENS].settings["codec"] == "2bit"
    updated = care.update_index("mine", add=[records[0] | {"_id": "new"}], pair=pair, threads=1)
    assert updated.manifest.corpus.reused_texts == len(records)
    with care.open_index("mine", pair=pair) as index:
        plain = index.search("高血压患者的护理", top_k=9)
        hits = index.search("高血压患者的护理", top_k=9, rerank=9, explain=True)
        assert (plain.reranked, hits.reranked) == (False, True)
        found = [(hit.explain or {})["rerank"] for hit in hits]
        assert all(-1 <= part["score"] <= 1 and part["weight"] == 0.5 for part in found)
        # Equal texts have equal token vectors, also those that the update has copied.
        parts = {hit.id: part["score"] for hit, part in zip(hits, found, strict=True)}
        assert parts["new"] == parts["d0000"]
    # Without token vectors of the pair, the same index is searched as before.
    with care.open_index("mine", pair="care-mini") as index:
        assert [hit.id for hit in index.search("高血压患者的护理", top_k=9)] == [
            h.id for h in plain
        ]
        with raises(QueryError, "rerank_not_available"):
            index.search("高血压患者的护理", rerank=True)
