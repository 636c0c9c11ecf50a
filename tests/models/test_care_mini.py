"""The files of care-mini and care-mini-lookup: checksums, vectors independent of their batch."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from core.files import sha256_file
from models.encoders.onnx import OnnxEncoder
from models.encoders.tokenizer import pad
from models.pairs import Pair, load_pair

PAIR, LOOKUP = load_pair("care-mini"), load_pair("care-mini-lookup")
WEIGHTS, WORDS = ("weights", "weights_sha256"), ("tokenizer", "tokenizer_sha256")
TEXTS = [
    "高血压能喝咖啡吗？",
    "胃疼",
    "HPV16阳性，TCT正常，需要治疗吗",
    "慢性咽炎会引发慢性胃炎吗？" * 6,
    "孩子发烧39.5℃，吃了布洛芬不退烧，怎么办",
    "高血压患者每天食盐摄入量不超过六克，注意不要吃太油腻的食物，并按时服用降压药。",
    "建议做胃镜检查，明确诊断后再用药。" * 20,
    "空腹血糖≥7.0mmol/L，或餐后2小时血糖≥11.1mmol/L，可诊断为糖尿病。",
]


@pytest.fixture(
    scope="module",
    params=[(PAIR, PAIR.query), (PAIR, PAIR.document), (LOOKUP, LOOKUP.query)],
    ids=["query", "document", "lookup"],
)
def encoder(request: pytest.FixtureRequest) -> OnnxEncoder:
    pair, spec = request.param
    return OnnxEncoder(spec, pair.folder, threads=1)


@pytest.mark.parametrize("pair", [PAIR, LOOKUP], ids=["care-mini", "care-mini-lookup"])
def test_the_specification_matches_the_committed_files(pair: Pair) -> None:
    sizes = {}
    for spec in (pair.query, pair.document):
        for file, checksum in (WEIGHTS, WORDS):
            path = (pair.folder / getattr(spec, file)).resolve()
            assert sha256_file(path) == getattr(spec, checksum)
            sizes[path] = path.stat().st_size
    assert sum(sizes.values()) < 60_000_000


def test_both_pairs_share_document_encoder_and_space() -> None:
    assert LOOKUP.embedding_space == PAIR.embedding_space
    assert LOOKUP.document == PAIR.document


@pytest.mark.e2e
def test_a_vector_does_not_depend_on_its_batch(encoder: OnnxEncoder) -> None:
    alone = np.concatenate([encoder.encode([text]).vectors for text in TEXTS])
    together = encoder.encode(TEXTS * 2).vectors
    np.testing.assert_allclose(together, np.concatenate([alone, alone]), atol=1e-6)


def test_padding_does_not_change_vectors(encoder: OnnxEncoder) -> None:
    tokens = encoder.tokenize(TEXTS[:1])
    padded = pad(tokens, (1, len(tokens[0]) + 40))
    np.testing.assert_allclose(encoder.run(*padded), encoder.run(*pad(tokens)), atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 512])
def test_texts_of_one_to_the_maximum_number_of_tokens_are_encoded(
    encoder: OnnxEncoder, length: int
) -> None:
    ids: NDArray[np.int64] = np.full((2, length), 7, dtype=np.int64)
    vectors = encoder.run(ids, np.ones_like(ids))
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def pieces(encoder: OnnxEncoder, text: str) -> Sequence[str]:
    tokenizer = encoder.tokenize.standalone()
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text).tokens


def test_tokens_of_prompts_are_known(encoder: OnnxEncoder) -> None:
    assert pieces(encoder, "query: ") == ["<s>", "▁que", "ry", ":", "▁", "</s>"]
    assert pieces(encoder, "passage: ") == ["<s>", "▁passage", ":", "▁", "</s>"]


def test_special_tokens_in_a_text_are_plain_text(encoder: OnnxEncoder) -> None:
    first, *text, last = pieces(encoder, "血压<s>高</s>吗<pad>")
    assert (first, last) == ("<s>", "</s>")
    assert not {"<s>", "</s>", "<pad>", "<unk>"} & set(text)


def test_the_tokenizer_file_has_no_truncation_and_padding(encoder: OnnxEncoder) -> None:
    whole = encoder.tokenize.standalone()
    assert (whole.truncation, whole.padding) == (None, None)


def test_normalisation_equals_that_of_sentencepiece(encoder: OnnxEncoder) -> None:
    assert pieces(encoder, "ＣＲＰ１２㎎～\u200b\t高") == pieces(encoder, "CRP12mg～ 高")
