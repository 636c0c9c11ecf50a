import numpy as np
import pytest

import care
from core.encoders import Encoder
from core.errors import CareError, DataError, PairError
from tests.errors import raises


@pytest.fixture(scope="module")
def pair() -> care.Pair:
    return care.load_pair("care-mini")


def test_questions_are_near_the_documents_that_answer_them(pair: care.Pair) -> None:
    queries = pair.encode_queries(["高血压能喝咖啡吗？", "骨折多久能好"], batch_size=1)
    documents = pair.encode_documents(
        [
            {"_id": "1", "title": "高血压与咖啡", "text": "血压控制平稳的人可以少量喝咖啡。"},
            "骨折愈合一般需要三个月左右。",
        ]
    )
    assert (pair.name, pair.embedding_space) == ("care-mini", "care-mini-2")
    for vectors in (queries, documents):
        assert vectors.shape == (2, pair.dimension)
        assert vectors.dtype == np.float32
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert (queries @ documents.T).argmax(axis=1).tolist() == [0, 1]


def test_documents_are_encoded_as_the_indexer_encodes_them(pair: care.Pair) -> None:
    with_title = pair.encode_documents([{"title": "标题", "text": "  内容 \u200b"}])
    assert (with_title == pair.encode_documents([{"title": "标题 ", "text": "内容"}])).all()
    assert (with_title != pair.encode_documents(["内容"])).any()


def test_nothing_is_no_vector(pair: care.Pair) -> None:
    assert pair.encode_queries([]).shape == (0, pair.dimension)
    assert pair.encode_documents([]).shape == (0, pair.dimension)


def test_texts_without_content_are_refused(pair: care.Pair) -> None:
    with raises(DataError, "empty_text", position=1):
        pair.encode_queries(["有", " \u200b"])
    with raises(DataError, "bad_document", position=0):
        pair.encode_documents([{"_id": "1", "title": "只有标题"}])
    with raises(DataError, "empty_text", position=0):
        pair.encode_documents([""])
    with raises(CareError, "not_a_list", argument="queries"):
        pair.encode_queries("骨折")
    with raises(CareError, "not_a_list", argument="documents"):
        pair.encode_documents({"title": "骨折", "text": "固定"})


def test_an_encoder_is_loaded_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Encoder:
        raise AssertionError("loaded")

    monkeypatch.setattr("care.pairs.document_encoder", fail)
    pair = care.load_pair()
    assert pair.encode_queries(["骨折"]).shape == (1, pair.dimension)
    with pytest.raises(AssertionError, match="loaded"):
        pair.encode_documents(["骨折"])


def test_an_unknown_pair_is_named() -> None:
    with raises(PairError, "unknown_pair", pair="none"):
        care.load_pair("none")
