"""Pairs for semantic textual similarity: questions rewritten with synonyms and checked."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from core.encoders import FrozenModel
from core.errors import CareError
from core.records import read_text, record_error, write_json, write_jsonl, write_tsv
from core.text import normalize_text
from curation import prompts
from curation.common import language_models, output_folder, sample_queries, shuffled
from curation.config import StsConfig
from curation.llm import Question
from evaluation.beir import read_queries


class Rewrites(FrozenModel):
    """Three rewrites of a question; only the first has the same meaning."""

    same_with_synonym: str
    other_with_synonym: str
    other_without_synonym: str


KINDS = tuple(Rewrites.model_fields)


def check_rewrites(
    rewrites: Rewrites, *, question: str, term: str, synonym: str, chars: tuple[int, int]
) -> str:
    """Returns the error of the rewrites, or "".

    Terms, lengths and equality are checked. The intent of a rewrite cannot be checked by code.
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
        return "the question and the rewrites are not all different"
    return ""


def read_synonyms(path: Path) -> dict[str, list[str]]:
    """Reads tab-separated lines of a term and its synonyms; a line without synonyms is a DataError.

    A synonym that contains its term, or is part of it, is ignored: the check of rewrites could not
    distinguish the two.
    """
    synonyms: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        words = [normalize_text(word) for word in line.split("\t")]
        if not any(words):
            continue
        term, others = words[0], [word for word in words[1:] if word]
        if not term or not others:
            reason = "must be a term and its synonyms, tab-separated"
            raise record_error(path, number, reason, code="not_synonyms")
        usable = [word for word in others if word not in term and term not in word]
        synonyms.setdefault(term, []).extend(usable)
    return {term: others for term, others in synonyms.items() if others}


def find_term(question: str, synonyms: Mapping[str, Sequence[str]]) -> str | None:
    """Returns the longest term in the question, or None if the question contains its synonym."""
    found = (term for term in synonyms if term in question)
    longest = max(found, key=lambda term: (len(term), term), default=None)
    if longest and any(word in question for word in synonyms[longest]):
        return None
    return longest


def write_sts(config: StsConfig) -> dict[str, Any]:
    """Writes sts.jsonl and sts.tsv: `text1`, `text2`, `label`; returns the statistics."""
    synonyms = read_synonyms(config.synonyms)
    every = {id_: normalize_text(text) for id_, text in read_queries(config.questions).items()}
    terms = {id_: term for id_, text in every.items() if (term := find_term(text, synonyms))}
    questions = sample_queries({id_: every[id_] for id_ in terms}, config.limit, config.seed)
    if not questions:
        reason = f"has no question that contains a term of {config.synonyms}"
        raise CareError.at(config.questions, reason, "no_term")
    chosen = {id_: shuffled(synonyms[terms[id_]], config.seed, id_)[0] for id_ in questions}
    with output_folder(config.output) as folder:
        asked = [
            partial(_question, config, id_, text, terms[id_], chosen[id_])
            for id_, text in questions.items()
        ]
        writer = config.writer.name
        with language_models(config, [config.writer]) as models:
            answers = models.ask({writer: asked}, "rewrite")[writer]
        rows = [
            {
                "text1": text,
                "text2": normalize_text(getattr(answer, kind)),
                "label": int(kind == "same_with_synonym"),
                "kind": kind,
                "question-id": id_,
                "term": terms[id_],
                "synonym": chosen[id_],
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
            "with_a_term": len(terms),
            "asked": len(questions),
            "invalid": sum(answer is None for answer in answers),
            "pairs": len(rows),
        }
        write_json(folder / "statistics.json", statistics)
    return statistics


def _question(
    config: StsConfig, id_: str, text: str, term: str, synonym: str
) -> Question[Rewrites]:
    # The whole numbers of characters within the allowed change of length.
    shortest = math.ceil(len(text) * (1 - config.length_change))
    longest = math.floor(len(text) * (1 + config.length_change))
    chars = shortest, longest
    system = prompts.prompt("rewrite", config.language)
    return Question(
        id=id_,
        system=system.format(shortest=shortest, longest=longest),
        user=prompts.question(question=text, term=term, synonym=synonym),
        again=prompts.prompt("again", config.language),
        answer=Rewrites,
        check=partial(check_rewrites, question=text, term=term, synonym=synonym, chars=chars),
    )
