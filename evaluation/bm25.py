"""BM25 over words, or over characters and bigrams: the baselines of every evaluation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import bm25s
import jieba
import numpy as np

from core.analysis import terms
from core.errors import CareError
from core.text import document_text, normalize_text
from core.types import Document
from evaluation.beir import Run

K1 = 1.5
B = 0.75

Analyzer = Literal["words", "characters"]
LABELS: dict[Analyzer, str] = {
    "words": "BM25, words",
    "characters": "BM25, characters and bigrams",
}
# The analyzers by the names of systems in benchmarks.
SYSTEMS: dict[str, Analyzer] = {"bm25": "words", "bm25-characters": "characters"}
# What computes the baselines.
ENGINE = f"bm25s, k1 {K1}, b {B}; words of jieba"


class Bm25Index:
    """BM25 over the terms of an analyzer.

    The score of a document that is indexed in chunks is the score of its best chunk.

    Args:
        documents: The documents.
        analyzer: "words" are those of jieba's search mode; "characters" are the characters and
            bigrams of full-text search (`core/analysis.py`).
    """

    def __init__(self, documents: Iterable[Document], analyzer: Analyzer = "words") -> None:
        jieba.setLogLevel("WARNING")
        self._terms = _ANALYZERS[analyzer]
        self._ids: list[str] = []
        self._most_chunks = 1
        words = []
        for document in documents:
            self._ids.append(document.parent or document.id)
            self._most_chunks = max(self._most_chunks, document.chunks)
            words.append(self._terms(document_text(document.title, document.text)))
        if not any(words):
            raise CareError(
                "BM25 needs words, and no document contains one: check the corpus", code="no_words"
            )
        self._rows = {id_: row for row, id_ in enumerate(self._ids)}
        self._index = bm25s.BM25(k1=K1, b=B)
        self._index.index(words, show_progress=False)

    def search(self, queries: Sequence[str], top_k: int) -> list[dict[str, float]]:
        """Returns scores by document id for each query; hits share at least one term with it."""
        found = self._index.retrieve(
            [self._terms(normalize_text(text)) for text in queries],
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
        words = [w for w in self._terms(normalize_text(query)) if w in self._index.vocab_dict]
        scores = self._index.get_scores(words) if words else np.zeros(len(self._ids))
        return {id_: float(scores[self._rows[id_]]) for id_ in candidates}


def bm25_run(
    documents: Iterable[Document],
    queries: Mapping[str, str],
    top_k: int,
    analyzer: Analyzer = "words",
) -> Run:
    """Ranks documents, or the documents of chunks, by `Bm25Index`; queries are texts by id."""
    hits = Bm25Index(documents, analyzer).search(list(queries.values()), top_k)
    return dict(zip(queries, hits, strict=True))


def _words(text: str) -> list[str]:
    return [word for word in jieba.cut_for_search(text.lower()) if not word.isspace()]


_ANALYZERS: dict[Analyzer, Callable[[str], list[str]]] = {"words": _words, "characters": terms}
