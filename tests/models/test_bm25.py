from core.types import Document
from models.evaluation.bm25 import bm25_run

DOCUMENTS = [
    Document("d1", "高血压患者应当低盐饮食。"),
    Document("d2", "儿童发热时应多饮水。"),
    Document("d3", "骨折后要固定患肢。", title="骨折"),
]


def test_documents_that_share_words_with_the_query_are_ranked() -> None:
    run = bm25_run(DOCUMENTS, {"q1": "高血压饮食", "q2": "骨折固定"}, top_k=10)
    assert list(run["q1"]) == ["d1"]
    assert list(run["q2"]) == ["d3"]


def test_a_query_that_shares_no_word_finds_nothing() -> None:
    assert bm25_run(DOCUMENTS, {"q": "zzz"}, top_k=10) == {"q": {}}


def test_titles_are_searched() -> None:
    titled = [Document("a", "要固定患肢。", title="骨折"), Document("b", "要固定患肢。")]
    assert list(bm25_run(titled, {"q": "骨折"}, top_k=10)["q"]) == ["a"]
