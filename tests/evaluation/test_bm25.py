import pytest

from core.errors import CareError
from core.types import Document
from evaluation.bm25 import Bm25Index, bm25_run
from tests.errors import raises

DOCUMENTS = [
    Document("d1", "高血压患者应当低盐饮食。"),
    Document("d2", "儿童发热时应多饮水。"),
    Document("d3", "骨折后要固定患肢。", title="骨折"),
]
CHUNKS = [
    *(Document(f"a#{i}", f"高血压{'饮食' * i}", parent="a", chunk=i, chunks=3) for i in range(3)),
    Document("b", "高血压患者", parent="b"),
    Document("c", "饮食"),
    *(Document(f"x{i}", "其他的文字") for i in range(9)),
]


def test_documents_that_share_words_with_the_query_are_ranked() -> None:
    run = bm25_run(DOCUMENTS, {"q1": "高血压饮食", "q2": "骨折固定"}, top_k=10)
    assert list(run["q1"]) == ["d1"]
    assert list(run["q2"]) == ["d3"]


def test_a_query_that_shares_no_word_has_no_hits() -> None:
    assert bm25_run(DOCUMENTS, {"q": "zzz"}, top_k=10) == {"q": {}}


def test_characters_and_bigrams_find_what_words_do_not() -> None:
    # jieba takes 高血压 for one word, and 血压 is another.
    assert bm25_run(DOCUMENTS[1:], {"q": "血压儿"}, top_k=10) == {"q": {}}
    assert list(bm25_run(DOCUMENTS[1:], {"q": "血压儿"}, 10, "characters")["q"]) == ["d2"]
    index = Bm25Index(DOCUMENTS, "characters")
    (found,) = index.search(["血压"], 10)
    assert index.score("血压", list(found)) == found


def test_titles_are_searched() -> None:
    titled = [Document("a", "要固定患肢。", title="骨折"), Document("b", "要固定患肢。")]
    assert list(bm25_run(titled, {"q": "骨折"}, top_k=10)["q"]) == ["a"]


def test_a_document_is_found_by_its_best_chunk() -> None:
    parts = [Document(chunk.id, chunk.text) for chunk in CHUNKS]
    by_chunk = bm25_run(parts, {"q": "高血压饮食"}, top_k=99)["q"]
    found = bm25_run(CHUNKS, {"q": "高血压饮食"}, top_k=99)["q"]
    assert found == {
        "a": max(by_chunk[f"a#{i}"] for i in range(3)),
        "b": by_chunk["b"],
        "c": by_chunk["c"],
    }


@pytest.mark.parametrize("top_k", [1, 2])
def test_chunks_of_one_document_do_not_displace_other_documents(top_k: int) -> None:
    every = bm25_run(CHUNKS, {"q": "高血压饮食"}, top_k=99)["q"]
    found = bm25_run(CHUNKS, {"q": "高血压饮食"}, top_k=top_k)["q"]
    assert list(found.items()) == list(every.items())[:top_k]


def test_a_corpus_without_words_is_an_error() -> None:
    with raises(CareError, code="no_words"):
        Bm25Index([Document("a", " "), Document("b", "")])
