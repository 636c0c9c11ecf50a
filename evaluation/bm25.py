"""BM25 over Chinese words: the baseline of every evaluation."""

from collections.abc import Iterable, Mapping, Sequence

import bm25s
import jieba
import numpy as np

from core.errors import CareError
from core.text import document_text, normalize_text
from core.types import Document
from evaluation.beir import Run

K1 = 1.5
B = 0.75


class Bm25Index:
    """BM25 over the words of jieba's search mode.

    The score of a document that is indexed in chunks is the score of its best chunk.

    Raises:
        CareError: If no document contains a word.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        jieba.setLogLevel("WARNING")
        self._ids: list[str] = []
        self._most_chunks = 1
        words = []
        for document in documents:
            self._ids.append(document.parent or document.id)
            self._most_chunks = max(self._most_chunks, document.chunks)
            words.append(_words(document_text(document.title, document.text)))
        if not any(words):
            raise CareError(
                "BM25 needs words, and no document contains one: check the corpus", code="no_words"
            )
        self._rows = {id_: row for row, id_ in enumerate(self._ids)}
        self._index = bm25s.BM25(k1=K1, b=B)
        self._index.index(words, show_progress=False)

    def search(self, queries: Sequence[str], top_k: int) -> list[dict[str, float]]:
        """Returns scores by document id for each query; hits share at least one word with it."""
        found = self._index.retrieve(
            [_words(normalize_text(text)) for text in queries],
            # This many chunks include the best chunk of each of `top_k` documents.
            k=min(top_k * self._most_chunks, len(self._ids)),
            show_progress=False,
        )
        hits = []
        for rows, scores in zip(*found, strict=True):
            best: dict[str, float] = {}
            for row, score in zip(rows, scores, strict=True):  # descending
                if score > 0 and len(best) < top_k:
                    best.setdefault(self._ids[row], float(score))
            hits.append(best)
        return hits

    def score(self, query: str, candidates: Sequence[str]) -> dict[str, float]:
        """Returns the scores of the candidates, given by document id, for one query."""
        words = [w for w in _words(normalize_text(query)) if w in self._index.vocab_dict]
        scores = self._index.get_scores(words) if words else np.zeros(len(self._ids))
        return {id_: float(scores[self._rows[id_]]) for id_ in candidates}


def bm25_run(documents: Iterable[Document], queries: Mapping[str, str], top_k: int) -> Run:
    """Ranks documents, or the documents of chunks, by `Bm25Index`; queries are texts by id."""
    hits = Bm25Index(documents).search(list(queries.values()), top_k)
    return dict(zip(queries, hits, strict=True))


def _words(text: str) -> list[str]:
    return [word for word in jieba.cut_for_search(text.lower()) if not word.isspace()]
