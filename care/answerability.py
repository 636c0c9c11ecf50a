"""Calibrating and measuring the score that says whether an index answers a query."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from care.options import AnswerabilityOptions, Location
from care.search import load_with_encoder
from core.encoders import Answerability, Encoder, Pair
from core.types import Mode, Query
from evaluation.answerability import Share, auroc, fit
from evaluation.beir import read_qrels, read_queries
from models.pairs import write_pair
from search.answerable import Features, answerable
from search.fusion import RankedList
from search.query import check_text
from search.snapshot import Snapshot
from search.task import SearchTask, encode
from service.settings import Settings

ANSWERED, TAKEN_OUT = "answered", "passages taken out"
_MAX_CHARS: int = Settings.model_fields["max_query_chars"].default
# Candidates of a dense search, of which relevant passages are taken out.
_DEPTH = 100
_BATCH = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """The judges of a pair, and the questions that they refuse.

    Attributes:
        judges: By mode.
        shares: Of each mode and each set of questions.
    """

    judges: Mapping[Mode, Answerability]
    shares: Sequence[Share]


def measure_answerability(
    index: str, pair: Pair, options: AnswerabilityOptions, where: Location
) -> Measured:
    """Measures which questions a pair says that an index does not answer.

    With `options.out` the pair is calibrated first, and written with the result.

    Raises:
        CareError: If the index cannot be opened, a file is wrong, or there are too few questions.
    """
    out = options.out
    snapshot, encoder = load_with_encoder(index, pair, where.indexes, where.milvus_uri)
    asked = read_queries(options.queries)
    relevant = _rows_of_judged(snapshot, read_qrels(options.qrels)) if options.qrels else {}
    judged = [id_ for id_ in asked if relevant.get(id_)]
    others = {path.stem: list(read_queries(path).values()) for path in options.unanswerable}
    judges = {} if out else dict(pair.answerable)
    shares: list[Share] = []
    for mode in snapshot.modes if out else snapshot.answerable_thresholds:
        if mode == "lexical":
            continue
        answered = list(_features(snapshot, encoder, mode, list(asked.values())))
        sets = {name: list(_features(snapshot, encoder, mode, t)) for name, t in others.items()}
        if judged:
            texts, without = [asked[id_] for id_ in judged], [relevant[id_] for id_ in judged]
            sets[TAKEN_OUT] = list(_features(snapshot, encoder, mode, texts, without))
        if out:
            fitted = [each for name in others for each in sets[name][::2]]
            judges[mode] = fit(answered, fitted, snapshot.manifest.count, options.refused)
            sets |= {name: sets[name][1::2] for name in others}
        shares += _shares(mode, judges[mode], answered, sets)
    if out:
        write_pair(pair.model_copy(update={"answerable": judges}), out)
    return Measured(judges, shares)


def _shares(
    mode: Mode,
    judge: Answerability,
    answered: Sequence[Features],
    sets: Mapping[str, Sequence[Features]],
) -> Iterator[Share]:
    first = [answerable(judge, features) for features in answered]
    yield Share(mode, ANSWERED, len(first), _below(first, judge.threshold), None)
    for name, features in sets.items():
        scores = [answerable(judge, each) for each in features]
        below = _below(scores, judge.threshold)
        yield Share(mode, name, len(scores), below, auroc(first, scores))


def _below(scores: ArrayLike, threshold: float) -> float:
    return float(np.mean(np.asarray(scores) < threshold))


def _rows_of_judged(
    snapshot: Snapshot, qrels: Mapping[str, Mapping[str, int]]
) -> dict[str, list[int]]:
    """Returns the rows of each query's relevant documents."""
    rows: dict[str, list[int]] = {}
    for row, document in snapshot.segment.documents.numbered():
        rows.setdefault(document.parent or document.id, []).append(row)
    return {
        query: [row for id_, grade in grades.items() if grade > 0 for row in rows.get(id_, ())]
        for query, grades in qrels.items()
    }


def _features(
    snapshot: Snapshot,
    encoder: Encoder,
    mode: Mode,
    texts: Sequence[str],
    without: Sequence[Sequence[int]] = (),
) -> Iterator[Features]:
    """Yields the features of each query, without the rows that are to be left out."""
    for start in range(0, len(texts), _BATCH):
        batch = [check_text(text, _MAX_CHARS) for text in texts[start : start + _BATCH]]
        tasks = [SearchTask(snapshot=snapshot, query=Query(text, mode=mode)) for text in batch]
        encode(tasks, encoder)
        for at, task in enumerate(tasks, start):
            found = task.find(min(_DEPTH, snapshot.manifest.count))
            if without:
                found = _without(found, without[at])
            yield task.features(found)


def _without(found: RankedList, rows: Sequence[int]) -> RankedList:
    kept = ~np.isin(found.rows, rows)
    channels = {}
    for name, ((scores, of_channel), weight) in found.channels.items():
        others = ~np.isin(of_channel, rows)
        channels[name] = (scores[others], of_channel[others]), weight
    return replace(found, scores=found.scores[kept], rows=found.rows[kept], channels=channels)
