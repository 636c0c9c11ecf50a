"""Splits of medical-qa-zh to train on, to choose settings by, and to measure with.

The questions of the split `train` are divided by checksums, so every run gives the same splits.
Questions with documents of the source knowledge-qa, which may be used for research only, are in
one split for measurements and in no other.
"""

import hashlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from core.errors import DataError
from core.files import new_folder
from core.records import read_jsonl, string, write_jsonl
from core.text import normalize_text
from evaluation.beir import (
    Qrels,
    beir_paths,
    check_judged,
    read_documents,
    read_judged_queries,
    read_queries,
    write_split,
)
from training.data import in_part
from training.schema import Part

PATIENTS, KNOWLEDGE = "patient-qa", "knowledge-qa"
PARAPHRASES = "train.paraphrases.jsonl"
# The fold that training/recipes/care-mini.yaml holds out.
UNSEEN = Part(folds=9, only=0)
HELD_OUT, TUNE = 1000, 500
# Rewordings of a training question.
VERSIONS = 2
# What the texts of train-rewrites and train-keywords mean, which a query encoder learns.
MEANINGS = "train-words.jsonl"


class Reword(Protocol):
    """Rewords queries as `curation.rewording.reword`: id, text and id of the original."""

    def __call__(
        self, queries: Mapping[str, str], part: Literal["a", "b"], *, versions: int
    ) -> Iterable[tuple[str, str, str]]: ...


def write_splits(
    data: Path,
    out: Path,
    reword: Reword,
    *,
    spoken: Path,
    words: Path | None = None,
    held_out: int = HELD_OUT,
    tune: int = TUNE,
) -> dict[str, int]:
    """Writes a BEIR folder with a copy of the corpus and each split; returns their sizes.

    A split NAME is NAME.queries.jsonl and NAME.qrels.tsv; docs/train-a-pair.md lists the splits.
    Splits that are empty are not written. With `words`, `MEANINGS` has the texts to train on and
    what they mean: `_id`, `text` and `original_text`.

    Args:
        data: BEIR folder with the split `train`. Documents have the metadata `source`, and
            train.paraphrases.jsonl, if it exists, has the description (`text2`) of a question
            (`text1`).
        reword: Rewords the questions of `train` by part `a` of its rules, held-out ones by `b`.
        spoken: JSONL with `_id` and `text`: questions rewritten by hand, by the id of the original.
            Those whose original is not in the split `unseen` are left out.
        words: Folder of questions written by hand as patients speak, and of queries of few words.
        held_out: Number of held-out questions of each source.
        tune: Number of questions to choose settings by.
    """
    paths = beir_paths(data, "train")
    texts, qrels = read_judged_queries(paths.queries, paths.qrels)
    sources = {d.id: d.metadata.get("source") for d in read_documents(paths.corpus)}
    check_judged(paths.qrels, qrels, texts, sources)
    by_source: dict[str, list[str]] = {PATIENTS: [], KNOWLEDGE: []}
    for id_ in sorted(texts, key=_checksum):
        by_source[_source(paths.corpus, qrels[id_], sources)].append(id_)
    patients = by_source[PATIENTS]
    measured, others = patients[:held_out], patients[held_out:]
    in_fold = (id_ for id_ in patients if in_part(normalize_text(texts[id_]), UNSEEN))
    unseen = dict.fromkeys(in_fold)
    # A stable sort: the unseen questions come first, each part in the order of the checksums.
    tuned = sorted(others, key=lambda id_: id_ not in unseen)[:tune]
    not_trained = {*measured, *unseen, *tuned}
    trained = [id_ for id_ in others if id_ not in not_trained]
    held = list(dict.fromkeys([*measured, *unseen]))

    splits = {
        "train": _pick(texts, trained),
        "tune": _pick(texts, tuned),
        "held-out-patients": _pick(texts, measured),
        "held-out-knowledge": _pick(texts, by_source[KNOWLEDGE][:held_out]),
        "unseen": _pick(texts, unseen),
    }
    originals: dict[str, str] = {}
    descriptions = _descriptions(data / PARAPHRASES)
    parts: dict[str, tuple[list[str], Literal["a", "b"], int]] = {
        "train": (trained, "a", VERSIONS),
        "held-out": (held, "b", 1),
    }
    for name, (ids, part, versions) in parts.items():
        described = {id_: descriptions[texts[id_]] for id_ in ids if texts[id_] in descriptions}
        splits[f"{name}-described"] = described
        made = list(reword(_pick(texts, ids), part, versions=versions))
        splits[f"{name}-reworded"] = {id_: text for id_, text, _ in made}
        originals |= {id_: original for id_, _, original in made}
    by_hand = read_queries(spoken)
    asked = [id_ for id_ in by_hand if id_ in unseen]
    splits["held-out-spoken"] = _pick(by_hand, asked)
    splits["held-out-asked"] = _pick(texts, asked)
    meanings: list[dict[str, str]] = []
    if words:
        # Questions of tune are in the split unseen as well.
        parts_of = {"held-out": held, "train": trained, "tune": tuned}
        written, judged, meanings = _written_by_hand(
            words, parts_of, texts, frozenset(patients), qrels
        )
        splits |= written
        qrels = {**qrels, **judged}
    return _write(out, paths.corpus, splits, qrels, originals, meanings)


def _written_by_hand(
    folder: Path,
    parts: Mapping[str, Iterable[str]],
    texts: Mapping[str, str],
    patients: Collection[str],
    qrels: Qrels,
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, int]], list[dict[str, str]]]:
    """Returns the splits of a folder's texts, judgements of keywords, and records of `MEANINGS`.

    Relevant to a text are the documents of its original question. Relevant to a query with `forms`
    are also those of all questions with one of these words; but for held-out queries, all
    questions of `patients`.
    """
    part_of = {id_: part for part, ids in parts.items() for id_ in ids}
    splits: dict[str, dict[str, str]] = {}
    judged: dict[str, dict[str, int]] = {}
    meanings: list[dict[str, str]] = []
    for path in sorted(folder.glob("*.jsonl")):
        kind = path.stem.partition("-")[0]
        for number, record in read_jsonl(path):
            original, text, writer = (
                string(path, number, record, key) for key in ("_id", "text", "writer")
            )
            part = part_of.get(original)
            if part is None:
                continue
            name, id_ = f"{part}-{kind}", original
            if part == "held-out":
                name = f"{name}-{writer}"
            if kind == "keywords":
                id_ = f"{original}-k"
                forms = record.get("forms")
                similar = [
                    i
                    for i, t in texts.items()
                    if (part == "held-out" or i in patients) and any(f in t for f in forms or ())
                ]
                judged[id_] = {document: 1 for i in similar for document in qrels[i]}
                judged[id_] |= qrels[original]
            elif part == "held-out":
                splits.setdefault(f"{name}-asked", {})[id_] = texts[original]
                name = f"{name}-spoken"
            splits.setdefault(name, {})[id_] = text
            if part == "train":
                meant = record.get("meaning", texts[original])
                meanings.append({"_id": id_, "text": text, "original_text": meant})
    return splits, judged, meanings


def _write(
    out: Path,
    corpus: Path,
    splits: Mapping[str, Mapping[str, str]],
    qrels: Qrels,
    originals: Mapping[str, str],
    meanings: Collection[Mapping[str, str]],
) -> dict[str, int]:
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        shutil.copyfile(corpus, folder / "corpus.jsonl")
        for name, queries in splits.items():
            if queries:
                judged = {id_: qrels[originals.get(id_, id_)] for id_ in queries}
                write_split(folder, name, queries, judged)
        if meanings:
            write_jsonl(folder / MEANINGS, meanings)
    return {name: len(queries) for name, queries in splits.items() if queries}


def _checksum(id_: str) -> str:
    return hashlib.sha256(id_.encode()).hexdigest()


def _source(corpus: Path, judged: Mapping[str, int], sources: Mapping[str, object]) -> str:
    """Returns the source of a question: knowledge-qa if one of its documents is from there."""
    found = {sources[id_] for id_ in judged}
    if not found <= {PATIENTS, KNOWLEDGE}:
        id_ = next(id_ for id_ in judged if sources[id_] not in (PATIENTS, KNOWLEDGE))
        reason = f"has the document '{id_}', whose metadata source is not {PATIENTS} or {KNOWLEDGE}"
        raise DataError.at(corpus, reason, "unknown_source", id=id_)
    return KNOWLEDGE if KNOWLEDGE in found else PATIENTS


def _pick(texts: Mapping[str, str], ids: Iterable[str]) -> dict[str, str]:
    return {id_: texts[id_] for id_ in ids}


def _descriptions(path: Path) -> dict[str, str]:
    """Returns the first description of each question, by its text."""
    descriptions: dict[str, str] = {}
    if path.is_file():
        for number, record in read_jsonl(path):
            question, description = (string(path, number, record, f"text{n}") for n in (1, 2))
            descriptions.setdefault(question, description)
    return descriptions
