"""Pairs for semantic textual similarity: questions rewritten with synonyms, checked by code."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from core.errors import CareError
from core.text import normalize_text
from models.curation import prompts
from models.curation.config import StsConfig
from models.curation.llm import Question
from models.curation.records import write_json, write_jsonl, write_tsv
from models.curation.retrieval import sample_key
from models.curation.work import language_models, output_folder, sample_queries
from models.evaluation.beir import read_queries


class Rewrites(BaseModel):
    """Three rewrites of a question; only the first keeps its meaning."""

    model_config = ConfigDict(extra="forbid")

    same_with_synonym: str
    other_with_synonym: str
    other_without_synonym: str


KINDS = tuple(Rewrites.model_fields)


def check_rewrites(
    rewrites: Rewrites, *, question: str, term: str, synonym: str, chars: tuple[int, int]
) -> str:
    """Returns what is wrong with rewrites, or "".

    Whether the intent is the same only a reader can say; all else is checked.
    """
    shortest, longest = chars
    texts = {name: normalize_text(getattr(rewrites, name)) for name in KINDS}
    for name, text in texts.items():
        wanted, barred = (term, synonym) if name == "other_without_synonym" else (synonym, term)
        if wanted not in text:
            return f"{name} does not contain '{wanted}'"
        if barred in text:
            return f"{name} contains '{barred}'"
        if not shortest <= len(text) <= longest:
            return f"{name} has {len(text)} characters, not {shortest} to {longest}"
    if len({question, *texts.values()}) < 1 + len(texts):
        return "two of the rewrites and the question are equal"
    return ""


def read_synonyms(path: Path) -> dict[str, list[str]]:
    """Reads tab-separated lines of a term and its synonyms.

    A synonym that contains its term, or lies in it, is passed over: code could not tell which
    of the two a rewrite uses.

    Raises:
        CareError: If the file cannot be read or a line has no synonym.
    """
    synonyms: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
    for number, line in enumerate(lines, start=1):
        words = [normalize_text(word) for word in line.split("\t")]
        if not any(words):
            continue
        term, others = words[0], [word for word in words[1:] if word]
        if not term or not others:
            raise CareError(f"{path} line {number} is not a term and its synonyms, tab-separated")
        usable = [word for word in others if word not in term and term not in word]
        synonyms.setdefault(term, []).extend(usable)
    return {term: others for term, others in synonyms.items() if others}


def find_term(question: str, synonyms: Mapping[str, Sequence[str]]) -> str | None:
    """Returns the longest term of the dictionary that the question contains."""
    found = (term for term in synonyms if term in question)
    return max(found, key=lambda term: (len(term), term), default=None)


def write_sts(config: StsConfig) -> dict[str, Any]:
    """Writes sts.jsonl and sts.tsv: `text1`, `text2`, `label`; returns the statistics.

    Raises:
        CareError: If an input is wrong, the endpoint fails, or the budget is spent.
    """
    synonyms = read_synonyms(config.synonyms)
    every = {id_: normalize_text(text) for id_, text in read_queries(config.questions).items()}
    terms = {id_: find_term(text, synonyms) for id_, text in every.items()}
    usable = {id_: text for id_, text in every.items() if terms[id_]}
    usable = {
        id_: text
        for id_, text in usable.items()
        if not any(synonym in text for synonym in synonyms[terms[id_] or ""])
    }
    questions = sample_queries(usable, config.limit, config.seed)
    if not questions:
        raise CareError(f"no question of {config.questions} has a term of {config.synonyms}")
    chosen: dict[str, tuple[str, str]] = {}
    for id_ in questions:
        term = terms[id_] or ""
        chosen[id_] = term, min(synonyms[term], key=lambda word: sample_key(config.seed, id_, word))
    with output_folder(config.output) as folder:
        asked = [_question(config, id_, text, *chosen[id_]) for id_, text in questions.items()]
        writer = config.writer.name
        with language_models([config.writer], folder, config.budget, config.attempts) as models:
            answers = models.ask({writer: asked}, "rewrite")[writer]
        rows = [
            {
                "text1": text,
                "text2": normalize_text(getattr(answer, kind)),
                "label": int(kind == "same_with_synonym"),
                "kind": kind,
                "question-id": id_,
                "term": chosen[id_][0],
                "synonym": chosen[id_][1],
            }
            for (id_, text), answer in zip(questions.items(), answers, strict=True)
            if answer
            for kind in KINDS
        ]
        columns = ("text1", "text2", "label")
        write_tsv(folder / "sts.tsv", [columns, *([row[c] for c in columns] for row in rows)])
        write_jsonl(folder / "sts.jsonl", rows)
        statistics = {
            "questions": len(every),
            "with_a_term": len(usable),
            "asked": len(questions),
            "set_aside": sum(answer is None for answer in answers),
            "pairs": len(rows),
        }
        write_json(folder / "statistics.json", statistics)
    return statistics


def _question(
    config: StsConfig, id_: str, text: str, term: str, synonym: str
) -> Question[Rewrites]:
    # Whole numbers of characters that lie within the share.
    chars = (
        math.ceil(len(text) * (1 - config.length_change)),
        math.floor(len(text) * (1 + config.length_change)),
    )
    return Question(
        id=id_,
        system=prompts.rewrite_prompt(config.language, *chars),
        user=prompts.rewrite_question(text, term, synonym),
        again=prompts.again(config.language),
        answer=Rewrites,
        check=partial(check_rewrites, question=text, term=term, synonym=synonym, chars=chars),
    )
