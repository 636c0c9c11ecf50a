"""Pairs for semantic textual similarity: questions rewritten with synonyms and checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, create_model

from core.encoders import FrozenModel
from core.errors import CareError
from core.records import read_text, record_error, write_json, write_jsonl, write_tsv
from core.text import normalize_text
from curation.common import language_models, output_folder, sample_queries, shuffled
from curation.config import TRAIN, StsConfig, StsSplit
from curation.llm import Question
from curation.prompts import Prompt, Prompts
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
    """Writes SPLIT.jsonl and SPLIT.tsv, `text1`, `text2`, `label`; returns the statistics.

    A question belongs to the first split that has it. Of each question one rewrite is written,
    chosen at random, or all three, see `StsConfig.rewrites`.
    """
    synonyms = read_synonyms(config.synonyms)
    seen: set[str] = set()
    chosen = {name: _choose(config, split, synonyms, seen) for name, split in config.splits.items()}
    writer, prompts = config.writer.name, Prompts(config.prompts, config.language)
    statistics: dict[str, Any] = {}
    with (
        output_folder(config.output) as folder,
        language_models(config, [config.writer]) as models,
    ):
        for name, asked in chosen.items():
            questions = [partial(_question, config, prompts, item) for item in asked]
            answers = models.ask({writer: questions}, f"rewrite {name}")[writer]
            kinds = partial(_kinds, config, name)
            rows = [
                {
                    "text1": item.text,
                    "text2": normalize_text(getattr(answer, kind)),
                    "label": int(kind == "same_with_synonym"),
                    "kind": kind,
                    "question-id": item.id,
                    "term": item.term,
                    "synonym": item.synonym,
                }
                for item, answer in zip(asked, answers, strict=True)
                if answer
                for kind in kinds(item.id)
            ]
            columns = ("text1", "text2", "label")
            table = [columns, *([row[c] for c in columns] for row in rows)]
            write_tsv(folder / f"{name}.tsv", table)
            write_jsonl(folder / f"{name}.jsonl", rows)
            statistics[name] = {
                "asked": len(asked),
                "invalid": sum(answer is None for answer in answers),
                "pairs": len(rows),
            }
        write_json(folder / "statistics.json", statistics)
    return statistics


@dataclass(frozen=True, slots=True)
class _Item:
    """A question with a term of the dictionary, and the synonym that replaces it."""

    id: str
    text: str
    term: str
    synonym: str


def _choose(
    config: StsConfig, split: StsSplit, synonyms: Mapping[str, Sequence[str]], seen: set[str]
) -> list[_Item]:
    """Returns the questions of a split that have a term and are not in `seen`; adds them to it."""
    every = {id_: normalize_text(text) for id_, text in read_queries(split.questions).items()}
    terms = {
        id_: term
        for id_, text in every.items()
        if text not in seen and (term := find_term(text, synonyms))
    }
    sample = sample_queries({id_: every[id_] for id_ in terms}, split.limit, config.seed)
    if not sample:
        reason = f"has no question that contains a term of {config.synonyms}"
        raise CareError.at(split.questions, reason, "no_term")
    seen.update(sample.values())
    return [
        _Item(id_, text, terms[id_], shuffled(synonyms[terms[id_]], config.seed, id_)[0])
        for id_, text in sample.items()
    ]


def _kinds(config: StsConfig, split: str, id_: str) -> Sequence[str]:
    """Returns the rewrites of a question that are written."""
    if config.rewrites == "all" or split == TRAIN:
        return KINDS
    return shuffled(KINDS, config.seed, "rewrite", id_)[:1]


def _question(config: StsConfig, prompts: Prompts, item: _Item) -> Question[Rewrites]:
    # The whole numbers of characters within the allowed change of length.
    shortest = math.ceil(len(item.text) * (1 - config.length_change))
    longest = math.floor(len(item.text) * (1 + config.length_change))
    prompt = prompts.get("rewrite")
    system, user = prompt.messages(
        {"question": item.text, "term": item.term, "synonym": item.synonym},
        query=item.text,
        term=item.term,
        synonym=item.synonym,
        replaced=item.text.replace(item.term, item.synonym),
        shortest=shortest,
        longest=longest,
    )
    check = partial(
        check_rewrites,
        question=item.text,
        term=item.term,
        synonym=item.synonym,
        chars=(shortest, longest),
    )
    return Question(item.id, system, user, prompts.again, _answer(prompt), check)


def _answer(prompt: Prompt) -> type[Rewrites]:
    """Returns the schema of an answer, whose fields have the names of the prompt."""
    if not prompt.keys:
        return Rewrites
    fields: dict[str, Any] = {
        kind: (str, Field(alias=prompt.keys.get(kind, kind))) for kind in KINDS
    }
    return create_model("Rewrites", __base__=Rewrites, **fields)
