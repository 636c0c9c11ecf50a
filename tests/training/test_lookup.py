"""Lookup encoders: their first vectors, their training, and their pair in export and service."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from care.cli.main import main as care
from core.encoders import Pair
from core.errors import PairError
from core.records import read_jsonl
from evaluation.beir import read_judged_queries
from models.encoders.configuration import read_configuration
from models.encoders.factory import load_encoder
from models.encoders.onnx import OnnxEncoder
from models.encoders.transformers import TransformersEncoder
from models.pairs import load_pair, write_pair
from service.app import create_app, load_query_encoder
from service.settings import Settings
from tests.checkpoints import LONG, MAX_LENGTH, TEXTS, WIDTH
from tests.conftest import SAMPLE, write_jsonl
from tests.errors import raises
from tests.training.conftest import RunRecipe, align, joint, pair_of, teacher
from tests.training.encoders import check_parity, checkpoint_of
from training.encoder import Encoder, encode, tokenize
from training.errors import TrainingError
from training.export.onnx import TOKENIZER, describe, export_encoder, save
from training.init import prepare, token_vectors
from training.schema import EncoderInit

pytestmark = pytest.mark.train

LOOKUP = {"table": "outputs", "prompt": "头痛"}


@pytest.fixture(scope="module")
def graphs(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose sides are one float32 BERT graph, with the prompt "骨折"."""
    folder = tmp_path_factory.mktemp("graphs")
    spec = checkpoint_of(bert, folder, pooling="mean").spec("query", "tiny-graphs")
    model, _, tokenizer = TransformersEncoder(spec, Path(), device="cpu").parts()
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            # The exporter stores equal tensors, such as biases of zeros, once.
            value += 0.01 * torch.randn_like(value)
    tokenizer.save(str(folder / TOKENIZER))
    save(export_encoder(model, "mean"), folder / "encoder.onnx")
    facts = spec.model_dump(exclude={"adapter", "config"})
    query, document = (
        describe(facts | {"role": role, "prompt": "骨折"}, folder / "encoder.onnx")
        for role in ("query", "document")
    )
    pair = Pair(name="graphs", description="d", folder=folder, query=query, document=document)
    write_pair(pair, folder / "pair.toml")
    return load_pair(str(folder / "pair.toml"))


@pytest.fixture
def recipe(graphs: Pair, triples: Path) -> dict[str, Any]:
    pair = str(graphs.folder / "pair.toml")
    aligned = align(epochs=80, batch=6, learning_rate=1e-2, data=[{"triples": str(triples)}])
    prompts = {"query": "骨折", "document": "骨折"}
    return {
        "name": "tiny-lookup",
        "query": {"pair": pair, "lookup": LOOKUP, "prompts": prompts | {"query": ""}},
        "document": {"pair": pair},
        "variables": {"triples": str(triples)},
        "stages": [teacher(prompts=prompts), aligned, joint(train=["query"], negatives=0)],
    }


def test_a_graph_is_dequantised_as_a_checkpoint(graphs: Pair, tmp_path: Path) -> None:
    start = EncoderInit(pair=str(graphs.folder / "pair.toml"))
    checkpoint = prepare(start, "document", tmp_path)
    expected = OnnxEncoder(graphs.document, graphs.folder, threads=1).encode(TEXTS).vectors
    found = encode(
        Encoder(checkpoint, trainable=False), tokenize(checkpoint, "骨折", TEXTS), batch=6
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert checkpoint.graph is not None
    assert checkpoint.graph.embedding_space == "tiny-graphs"
    # With another fact or other weights it is not the pair's encoder any more.
    for changes in ({"max_length": MAX_LENGTH - 1}, {"layers": [1]}):
        assert prepare(start.model_copy(update=changes), "document", tmp_path).graph is None


def test_a_changed_graph_is_an_error(graphs: Pair, tmp_path: Path) -> None:
    document = graphs.document.model_copy(update={"weights_sha256": "0" * 64})
    write_pair(graphs.model_copy(update={"document": document}), tmp_path / "pair.toml")
    with raises(PairError, "checksum_mismatch"):
        prepare(EncoderInit(pair=str(tmp_path / "pair.toml")), "document", tmp_path)


def test_outputs_are_the_vectors_of_single_tokens(bert: Path, tmp_path: Path) -> None:
    encoder = Encoder(checkpoint_of(bert, tmp_path, pooling="mean"), trainable=False)
    vectors = token_vectors(encoder, "头痛")
    # Each character is a token of this tokenizer.
    texts = ["骨", "服", "药"]
    ids = [tokenize(encoder.checkpoint, "", [text]).values[1] for text in texts]
    expected = encode(encoder, tokenize(encoder.checkpoint, "头痛", texts), batch=3)
    np.testing.assert_allclose(vectors[ids], expected, atol=1e-5)
    made = checkpoint_of(bert, tmp_path, pooling="mean", lookup=LOOKUP)
    saved = Encoder(made, trainable=False).model.tokens.weight.numpy()
    np.testing.assert_allclose(saved, vectors, atol=1e-6)


def test_tables_start_from_embeddings_or_at_random(bert: Path, tmp_path: Path) -> None:
    tables = {}
    for table in ("embeddings", "random"):
        made = checkpoint_of(bert, tmp_path, pooling="mean", lookup={"table": table})
        tables[table] = Encoder(made, trainable=False).model.tokens.weight
    source = Encoder(checkpoint_of(bert, tmp_path), trainable=False)
    assert torch.equal(tables["embeddings"], source.model.get_input_embeddings().weight)
    assert tables["random"].shape == tables["embeddings"].shape
    assert float(tables["random"].std()) == pytest.approx(0.02, rel=0.1)
    with raises(TrainingError, "dimension_mismatch", key="lookup.table"):
        checkpoint_of(bert, tmp_path, projection=8, lookup={"table": "embeddings"})


def test_training_serving_and_saving_agree(bert: Path, tmp_path: Path) -> None:
    encoder = Encoder(checkpoint_of(bert, tmp_path, pooling="mean", lookup=LOOKUP), trainable=True)
    with torch.no_grad():
        for value in encoder.parameters():
            value += 0.1 * torch.randn_like(value)
    saved = check_parity(encoder.save(tmp_path / "saved"), (*TEXTS, LONG))
    assert saved.checkpoint.dimension == WIDTH
    # A vector does not depend on its batch.
    tokens = tokenize(saved.checkpoint, "", TEXTS)
    together = encode(saved, tokens, batch=len(TEXTS))
    np.testing.assert_allclose(together, encode(saved, tokens, batch=1), atol=1e-6)


def test_lookup_cannot_be_combined_with_an_adapter() -> None:
    for changes in ({"lora": {}}, {"frozen_layers": 0}):
        with pytest.raises(ValueError, match="cannot be combined"):
            EncoderInit.model_validate({"start": "x", "lookup": {}} | changes)


def exported(trained: Pair, out: Path) -> Pair:
    """Returns a pair as `care export` writes it, with int8 queries."""
    arguments = ["--pair", str(trained.folder / "pair.toml"), "--out", str(out)]
    arguments += ["--precision", "int8", "--corpus", "none", "--threads", "1"]
    assert care(["export", *arguments]) == 0
    return load_pair(str(out / "pair-int8.toml"))


def test_a_trained_lookup_encoder_serves_an_index_of_the_first_pair(
    graphs: Pair,
    recipe: dict[str, Any],
    run_recipe: RunRecipe,
    tmp_path: Path,
    settings: Settings,
) -> None:
    recipe["query"]["lookup"] = LOOKUP
    records = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    arguments = [str(corpus), "--index", "test", "--indexes", str(settings.indexes)]
    arguments += ["--builds", str(tmp_path / "builds")]
    assert care(["index", *arguments, "--pair", str(graphs.folder / "pair.toml")]) == 0

    trained = pair_of(run_recipe(recipe))
    assert trained.embedding_space == graphs.embedding_space
    assert trained.document.weights_sha256 == graphs.document.weights_sha256
    assert (trained.folder / trained.document.weights).samefile(graphs.folder / "encoder.onnx")
    pair = exported(trained, tmp_path / "exported")
    assert pair.name == "tiny-lookup"
    assert {path.stem for path in pair.folder.glob("pair*")} == {"pair", "pair-fp32", "pair-int8"}
    assert pair.query.weights == "query-int8.onnx"
    assert pair.document == trained.document.model_copy(
        update={name: getattr(pair.document, name) for name in ("weights", "tokenizer")}
    )
    checkpoint = load_encoder(trained.query, trained.folder)
    graph = load_encoder(pair.query, pair.folder)
    assert isinstance(graph, OnnxEncoder)
    texts = [*TEXTS, LONG]
    expected, vectors = checkpoint.encode(texts).vectors, graph.encode(texts).vectors
    assert (expected * vectors).sum(axis=1).min() > 0.999
    np.testing.assert_allclose(
        vectors, np.concatenate([graph.encode([text]).vectors for text in texts]), atol=1e-6
    )

    served = settings.model_copy(update={"pair": str(pair.folder / "pair-int8.toml")})
    with TestClient(create_app(served, load_query_encoder(served))) as client:
        for number, text in enumerate(TEXTS):
            response = client.post("/search", json={"query": text, "top_k": 1})
            assert response.json()["hits"][0]["id"] == f"d{number}"


def test_the_lookup_encoder_of_care_mini_serves_its_index(
    tmp_path: Path, settings: Settings
) -> None:
    """A service checks with the index's canaries that the encoder finds the documents."""
    queries, qrels = read_judged_queries(SAMPLE / "queries.jsonl", SAMPLE / "qrels" / "test.tsv")
    judged = {id_ for grades in qrels.values() for id_ in grades}
    records = [record for _, record in read_jsonl(SAMPLE / "corpus.jsonl")]
    records = [record for record in records if record["_id"] in judged]
    arguments = [str(write_jsonl(tmp_path / "corpus.jsonl", records)), "--index", "test"]
    folders = ["--indexes", str(settings.indexes), "--builds", str(tmp_path / "builds")]
    assert care(["index", *arguments, *folders]) == 0
    served = settings.model_copy(update={"pair": "care-mini-lookup"})
    found = 0
    with TestClient(create_app(served, load_query_encoder(served))) as client:
        for id_, text in queries.items():
            hits = client.post("/search", json={"query": text, "top_k": 3}).json()["hits"]
            found += any(qrels[id_].get(hit["id"], 0) > 0 for hit in hits)
    assert found > 0.7 * len(queries)


def test_a_checkpoint_with_tables_of_neighbours_is_refused(bert: Path, tmp_path: Path) -> None:
    """Such could be trained once; without these tables its vectors would be others."""
    made = checkpoint_of(bert, tmp_path, pooling="mean", lookup=LOOKUP)
    read_configuration(made.folder, {"context": 0})
    with raises(PairError, code="unknown_architecture", path=made.folder):
        read_configuration(made.folder, {"context": 8})
