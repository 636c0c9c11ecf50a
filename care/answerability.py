"""Calibrating and measuring the score that says whether an index answers a query."""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from care.options import AnswerabilityOptions, Location
from care.search import load_with_encoder
from core.encoders import Answerability, Encoder, Pair
from core.errors import CareError
from core.manifest import FULL_TEXT, SEGMENT_FILE
from core.scratch import MemoryFolder
from core.types import FloatArray, Mode, Query, RowArray
from core.versions import Part, segment_manifest
from evaluation.answerability import Case, Share, cross_validated, fit, shares
from evaluation.beir import read_qrels, read_queries
from indexer.live.segment import write_files
from indexer.state import BY_ROW
from models.pairs import write_pair
from search.answerable import answerable
from search.query import check_text
from search.snapshot import Snapshot
from search.task import SearchTask
from service.settings import Settings
from stores.faiss.store import FaissStore
from stores.lexical import LexicalIndex
from stores.lexical import Part as TextPart
from stores.segment import Segments, open_segment

# Questions whose relevant documents are not in a sample; others in it may answer them.
TAKEN_OUT = "passages not in the index"
_MAX_CHARS: int = Settings.model_fields["max_query_chars"].default
# Documents that the features depend on.
_DEPTH = 100
_BATCH = 32
# Documents of a question that a sample has at most. What answers questions is half of a sample.
_RELEVANT = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """The judges of a pair, and the questions that they refuse."""

    judges: Mapping[Mode, Answerability]  # by mode
    shares: Sequence[Share]  # of each mode, each size of index and each set of questions


@dataclass(frozen=True, slots=True)
class _Question:
    name: str  # of its file
    id: str
    text: str
    answered: bool
    relevant: Sequence[int] = ()  # rows


def measure_answerability(
    index: str, pair: Pair, options: AnswerabilityOptions, where: Location
) -> Measured:
    """Measures which questions a pair says that an index, and samples of it, do not answer.

    With `options.out` the pair is calibrated first, and written with the result; each question is
    then measured by what was fitted on the others.
    """
    out = options.out
    snapshot, encoder = load_with_encoder(index, pair, where.indexes, where.milvus_uri)
    cases = _cases(snapshot, encoder, options)
    judges = {} if out else dict(pair.answerable)
    found: list[Share] = []
    for mode, own in cases.items():
        known = pair.answerable.get(mode)
        before = None
        if known:
            scores = np.array([answerable(known, case.features) for case in own])
            thresholds, before = np.full(len(own), known.threshold), scores < known.threshold
        if out:
            sizes = {case.vectors for case in own}
            smallest = min(sizes) if len(sizes) > 1 else -(-min(sizes) // 10)
            judges[mode] = fit(own, (smallest, 10 * max(sizes)), options.refused)
            scores, thresholds = cross_validated(own, options.refused)
        elif not known:
            continue
        found += shares(mode, own, scores, thresholds, before if out else None)
    if out:
        write_pair(pair.model_copy(update={"answerable": judges}), out)
    return Measured(judges, found)


def _cases(
    snapshot: Snapshot, encoder: Encoder, options: AnswerabilityOptions
) -> dict[Mode, list[Case]]:
    """Asks all questions in the index, and each in one sample of each size."""
    types = (part.manifest.factory for part in snapshot.segments.parts)
    if options.sizes and not (options.qrels and all(map(BY_ROW.fullmatch, types))):
        message = "samples need --qrels, and an index of type Flat or HNSW: leave --sizes out"
        raise CareError(message, code="no_samples")
    asked, others = _questions(snapshot, options)
    vectors = _vectors(encoder, [each.text for each in (*asked, *others)])
    modes = [mode for mode in snapshot.modes if mode != "lexical"]
    cases: dict[Mode, list[Case]] = {mode: [] for mode in modes}

    def ask(index: Snapshot, name: str, question: _Question, answered: bool | None) -> None:
        size, text = index.manifest.count, question.text
        for mode in modes:
            task = SearchTask(snapshot=index, query=Query(text, mode=mode), vector=vectors[text])
            features = task.features(task.find(min(_DEPTH, size)))
            cases[mode].append(Case(name, question.id, size, answered, features))

    for question in (*asked, *others):
        ask(snapshot, question.name, question, question.answered)
    for size in options.sizes or ():
        if size >= snapshot.manifest.count:
            continue
        samples = list(_samples(snapshot, asked, size))
        for at, (rows, has) in enumerate(samples):
            sample = _sample(snapshot, rows)
            for question in (*has, *others[at :: len(samples)]):
                ask(sample, question.name, question, question.answered)
            for question in samples[at - 1][1]:
                if not np.isin(question.relevant, rows).any():
                    ask(sample, TAKEN_OUT, question, None)
    return cases


def _questions(
    snapshot: Snapshot, options: AnswerabilityOptions
) -> tuple[list[_Question], list[_Question]]:
    """Reads the questions that the index answers, with their relevant rows, and the others."""
    names = Counter(map(_name, (*options.queries, *options.unanswerable)))
    qrels: dict[str, set[str]] = {}
    for path in options.qrels or ():
        for query, grades in read_qrels(path).items():
            qrels.setdefault(query, set()).update(id_ for id_, grade in grades.items() if grade > 0)
    rows: dict[str, list[int]] = {}
    for row, document in snapshot.segment.documents.numbered():
        rows.setdefault(document.parent or document.id, []).append(row)
    return [
        _Question(
            name,
            id_,
            text,
            True,
            [row for each in sorted(qrels.get(id_, ())) for row in rows.get(each, ())],
        )
        for name, id_, text in _read(options.queries, names)
    ], [_Question(name, id_, text, False) for name, id_, text in _read(options.unanswerable, names)]


def _name(path: Path) -> str:
    return path.name.removesuffix(".jsonl").removesuffix(".queries")


def _read(paths: Sequence[Path], names: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Yields name of the file, its path if others have the name, and id and text of questions."""
    for path in paths:
        name = _name(path) if names[_name(path)] == 1 else str(path)
        for id_, text in read_queries(path).items():
            yield name, id_, check_text(text, _MAX_CHARS)


def _vectors(encoder: Encoder, texts: Sequence[str]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        found |= zip(batch, encoder.encode(batch).vectors, strict=True)
    return found


def _samples(
    snapshot: Snapshot, questions: Sequence[_Question], size: int
) -> Iterator[tuple[RowArray, list[_Question]]]:
    """Yields the rows of samples of a size, and the questions that each answers.

    Each question that has relevant rows is in one sample, which has some of them; the other half of
    a sample is drawn from all rows.
    """
    rng = np.random.default_rng(size)
    all_rows = np.array([row for row, _ in snapshot.segment.documents.numbered()])
    left = sorted((q for q in questions if q.relevant), key=lambda q: zlib.crc32(q.id.encode()))
    while left:
        taken: set[int] = set()
        has = []
        while left and len(taken) + _RELEVANT <= max(size // 2, _RELEVANT):
            has.append(left.pop())
            relevant = has[-1].relevant
            taken.update(rng.permutation(relevant)[:_RELEVANT].tolist())
        others = rng.permutation(np.setdiff1d(all_rows, [*taken]))[: size - len(taken)]
        yield np.sort(np.concatenate([[*taken], others])), has


def _sample(snapshot: Snapshot, rows: RowArray) -> Snapshot:
    """Returns an index of some rows of another one."""
    whole, base, files = snapshot.segment, snapshot.manifest, MemoryFolder()
    documents = map(whole.documents.__getitem__, rows.tolist())
    facts = write_files(files.path, base, documents, [whole.vectors.take(rows)], None)
    manifest = segment_manifest(base.version, facts, base)
    part = Part("", files.path / SEGMENT_FILE, manifest)
    opened = open_segment(part, FaissStore(), full_text=False)
    text = None
    if whole.full_text:
        component = facts.components[FULL_TEXT]
        own = TextPart(files.path, component, facts.count)
        text = LexicalIndex([own], whole.full_text.term_list)
    opened = replace(opened, full_text=text, unpacked=files)
    return replace(snapshot, manifest=manifest, segments=Segments(opened, (part,), {}))
