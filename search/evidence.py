"""Evidence: the sentence of a hit that shares most with the query."""

from collections.abc import Mapping

from core.analysis import terms
from core.sentences import sentences
from core.types import Evidence
from stores.lexical import LexicalIndex


def term_weights(query: str, full_text: LexicalIndex | None) -> dict[str, float]:
    """Returns the weights of a query's terms: their idf in the index, or 1 without full text."""
    weight = full_text.weight if full_text else lambda _: 1.0
    return {term: weight(term) for term in dict.fromkeys(terms(query))}


def best_sentence(weights: Mapping[str, float], text: str) -> Evidence | None:
    """Returns the sentence of a hit's text with the largest sum of the weights of the terms it has.

    Returns the first one of equal sentences, and None if the text has no letter or digit.
    """
    best: Evidence | None = None
    highest = -1.0
    for start, end in sentences(text):
        sentence = text[start:end]
        found = set(terms(sentence))
        score = sum(weight for term, weight in weights.items() if term in found)
        if score > highest:
            best, highest = Evidence(start, end, sentence), score
    return best
