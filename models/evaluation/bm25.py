from collections.abc import Iterable, Mapping

import bm25s
import jieba

from core.text import document_text, normalize_text
from core.types import Document
from models.evaluation.beir import Run

K1 = 1.5
B = 0.75


def bm25_run(documents: Iterable[Document], queries: Mapping[str, str], top_k: int) -> Run:
    """Ranks documents by BM25 over words that jieba cuts in its search mode.

    Args:
        documents: The corpus.
        queries: Text by query id.
        top_k: Hits for each query; those that share no word with it are left out.

    Returns:
        Scores by document id, by query id.
    """
    jieba.setLogLevel("WARNING")
    ids, words = [], []
    for document in documents:
        ids.append(document.id)
        words.append(_words(document_text(document.title, document.text)))
    index = bm25s.BM25(k1=K1, b=B)
    index.index(words, show_progress=False)
    rows, scores = index.retrieve(
        [_words(normalize_text(text)) for text in queries.values()],
        k=min(top_k, len(ids)),
        show_progress=False,
    )
    return {
        query: {
            ids[row]: float(score) for row, score in zip(found, values, strict=True) if score > 0
        }
        for query, found, values in zip(queries, rows, scores, strict=True)
    }


def _words(text: str) -> list[str]:
    return [word for word in jieba.cut_for_search(text.lower()) if not word.isspace()]
