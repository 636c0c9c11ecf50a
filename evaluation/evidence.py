"""The sentences that answer: how often the right one is chosen, and the weights that choose it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_matrix, hstack, vstack
from scipy.stats import binomtest

from core.analysis import terms
from core.errors import CareError
from core.records import field_error, read_jsonl, string
from core.text import document_text
from evaluation.beir import iterate_documents, read_queries
from evaluation.statistics import CONFIDENCE, Interval
from search.evidence import BUCKETS, Model, Sentences, asked, compared, shipped
from stores.lexical import idf

MIN_MARKS = 100
# Share of the sentences that are certain.
CERTAIN_SHARE = 0.73
# Share of the texts that the model is fitted on and does not know, by its limit.
_UNKNOWN_SHARE = 0.02
# Penalty of the squared weights, least sentences of an n-gram that has a weight, steps of the fit.
_L2, _LEAST, _STEPS = 0.125, 5, 40
_FOLDS, _SEED = 10, 0

Numbers = NDArray[np.float64]


class Mark(NamedTuple):
    """The sentences of a text beside a question, and which of them answer it: bool [s]."""

    sentences: Sentences
    right: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How often the chosen sentence is right, with 95 % intervals (Wilson)."""

    marks: int
    right: Interval  # of all
    shown: Interval  # share of those that are certain
    right_of_shown: Interval | None


def read_marks(corpus: Path, queries: Path, marks: Path) -> tuple[list[Mark], int]:
    """Reads marked sentences; terms are weighed by their idf in the corpus.

    Returns the marks, and how many lines are left out: their passage is of another edition, with
    another length than `characters`, or not in the corpus, or has none of the marked sentences.
    """
    texts, having = {}, Counter[str]()
    for document in iterate_documents(corpus):
        texts[document.id] = document.text
        having.update(set(terms(document_text(document.title, document.text))))
    questions = read_queries(queries)
    found, left_out = [], 0
    for number, line in read_jsonl(marks):
        query = string(marks, number, line, "query-id")
        if query not in questions:
            raise field_error(marks, number, "query-id", f"'{query}' is not in {queries}")
        text = texts.get(string(marks, number, line, "corpus-id"), "")
        question = asked(questions[query], lambda term: idf(len(texts), having[term]))
        mark = compared(question, text)
        try:
            marked = {(start, end) for start, end in line["sentences"]}
        except (KeyError, TypeError, ValueError):
            reason = "is not a list of pairs of offsets"
            raise field_error(marks, number, "sentences", reason) from None
        right = np.array([span in marked for span in mark.spans], bool)
        if line.get("characters", len(text)) == len(text) and right.any():
            found.append(Mark(mark, right))
        else:
            left_out += 1
    return found, left_out


def accuracy(marks: Sequence[Mark], model: Model | None = None) -> Accuracy:
    """Returns how often the sentence that a model chooses is right; None is the release's model."""
    _check_number(marks, 1)
    model = model or shipped()
    return _accuracy(*_chosen(marks, model), model.certain)


def fit(marks: Sequence[Mark]) -> tuple[Model, Accuracy]:
    """Fits a model, and measures it by cross-validation, which also chooses the limit of certainty.

    Equal marks give equal weights. The loss is the negative logarithm of the probability of the
    right sentences, a softmax over those of a text.
    """
    _check_number(marks, MIN_MARKS)
    rows = [_features(mark) for mark in marks]
    fold = np.random.default_rng(_SEED).permutation(len(marks)) % _FOLDS
    right, probability = np.empty(len(marks), bool), np.empty(len(marks))
    for each in range(_FOLDS):
        held_out = fold == each
        model = _fit(list(compress(marks, ~held_out)), list(compress(rows, ~held_out)))
        right[held_out], probability[held_out] = _chosen(compress(marks, held_out), model)
    certain = float(np.quantile(probability, 1 - CERTAIN_SHARE))
    model = _fit(marks, rows)._replace(certain=certain)
    return model, _accuracy(right, probability, certain)


def _check_number(marks: Sequence[Mark], least: int) -> None:
    if len(marks) < least:
        message = f"{len(marks)} marks are too few: give at least {least}, and check left-out lines"
        raise CareError(message, code="too_few_questions", queries=len(marks), limit=least)


def _features(mark: Mark) -> csr_matrix:
    """Returns the features of the sentences: [s, 5 + BUCKETS]."""
    found = mark.sentences
    grams = [found.buckets[start:end].ravel() for start, end in found.spans]
    sizes = [len(each) for each in grams]
    values, ends = np.repeat(found.scale, sizes), np.cumsum([0, *sizes])
    counted = csr_matrix((values, np.concatenate(grams), ends), (len(grams), BUCKETS))
    counted.sum_duplicates()
    return hstack([csr_matrix(found.measures), counted], "csr")


def _fit(marks: Sequence[Mark], features: Sequence[csr_matrix]) -> Model:
    """Fits the weights; the limit of certainty is 0."""
    inputs, right = vstack(features, "csr"), np.concatenate([mark.right for mark in marks])
    plain = inputs.shape[1] - BUCKETS
    frequent = np.bincount(inputs.indices, minlength=inputs.shape[1]) >= _LEAST
    frequent[:plain] = True
    inputs = inputs[:, frequent]
    transposed = inputs.T.tocsr()
    sizes = [len(mark.right) for mark in marks]
    firsts = np.cumsum([0, *sizes[:-1]])

    def loss(weights: Numbers) -> tuple[float, Numbers]:
        scores = inputs @ weights
        scores = np.exp(scores - np.repeat(np.maximum.reduceat(scores, firsts), sizes))
        total = np.add.reduceat(scores, firsts)
        of_right = np.add.reduceat(scores * right, firsts)
        slope = scores / np.repeat(total, sizes) - scores * right / np.repeat(of_right, sizes)
        value = np.log(total / of_right).sum() + _L2 / 2 * weights @ weights
        return value, transposed @ slope + _L2 * weights

    start = np.zeros(inputs.shape[1])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    grams = np.zeros(BUCKETS, np.float32)
    grams[frequent[plain:]] = found[plain:].astype(np.float16)
    known = [np.mean(grams[mark.sentences.buckets[:, 1, 0]] != 0) for mark in marks]
    limit = float(np.quantile(known, _UNKNOWN_SHARE))
    return Model(found[:plain], grams, limit, 0.0)


def _chosen(marks: Iterable[Mark], model: Model) -> tuple[NDArray[np.bool_], Numbers]:
    """Returns whether each chosen sentence is right, and its probability."""
    chosen = [(mark.right, *model.choose(mark.sentences)) for mark in marks]
    right = [each[best] for each, best, _ in chosen]
    return np.array(right, bool), np.array([probability for *_, probability in chosen])


def _accuracy(right: NDArray[np.bool_], probability: Numbers, certain: float) -> Accuracy:
    shown = probability >= certain
    of_shown = _share(right[shown]) if shown.any() else None
    return Accuracy(len(right), _share(right), _share(shown), of_shown)


def _share(true: NDArray[np.bool_]) -> Interval:
    count = int(true.sum())
    low, high = binomtest(count, len(true)).proportion_ci(CONFIDENCE, "wilson")
    return Interval(count / len(true), float(low), float(high))
