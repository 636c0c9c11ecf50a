"""Rewording and misspelling of short medical questions.

Questions are reworded in patients' everyday words by the rules of rewording.yaml: formal words and
what patients say instead, who asks, other orders of the words. Its two parts have no text in
common: queries reworded by part `a` train, those reworded by part `b` measure.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from core.files import writing_in
from core.records import parse_yaml, read_jsonl, record_id, write_jsonl
from core.terms import TermList
from core.text import normalize_text
from evaluation.beir import read_queries

Part = Literal["a", "b"]

_RULES = Path(__file__).with_suffix(".yaml")
# Shares of the texts in which a rule is applied where it applies.
_WORD_SHARE = 0.75
_ORDER_SHARE = 0.5
_ASKER_SHARE = 0.7
_CLOSER_SHARE = 0.2
_MARK_SHARE = 0.4
_ATTEMPTS = 20

_MARKS = "？?。.！!，, "
# The subject of a question ends where one of these words begins.
_TOPIC = re.compile(
    r"(?:得了|患有|患了|患上|我有|我得了|有)?(?P<topic>[^的有，,]{2,10}?)(?:患者|病人|的人)?"
    r"(?P<rest>(?:怎么|如何|怎样|咋|能|可以|可不可以|会|应该|该|有什么|有哪些|吃什么|吃啥|吃点|"
    r"平时|平常|需要|要|想|用什么|对|治疗|多久|是怎么|为什么).{2,})"
)
_NO_TOPIC = re.compile(r"治疗|怎|如何|吃|喝|检查|什么|哪|为|是|会|能|可以|这|我")


class Reworded(NamedTuple):
    """A reworded query: its id, its text and the id of the query that it was made of."""

    id: str
    text: str
    original: str


class Rewording:
    """The rules of one part, `a` or `b`.

    Random choices follow from `seed`; those of a query depend on its id alone. The clinical terms
    of a list are replaced by the words that mean them, unless a rule replaces them.
    """

    def __init__(self, part: Part, seed: int = 0, terms: TermList | None = None) -> None:
        rules: dict[str, Any] = parse_yaml(_RULES.read_text(encoding="utf-8"))
        self._key = f"{seed} {part}"
        self._words = (_words_by_term(terms) if terms else {}) | _replacements(rules["words"], part)
        endings = _replacements(rules["endings"], part)
        # A word after 性 or 型 is a part of a longer term, as in 大叶性肺炎.
        words = f"(?<![性型])(?:{_any_of(self._words)})|(?:{_any_of(endings)})$"
        self._pattern = re.compile(words)
        self._words |= endings
        self._opener = re.compile(f"^(?:{_any_of(rules['openers'].split())})[，,]?")
        self._askers = [(group["of"].split(), group[part].split()) for group in rules["askers"]]
        self._orders: list[str] = rules["orders"][part].split()
        self._closers: list[str] = rules["closers"][part].split()

    def versions(self, id_: str, text: str, count: int) -> list[str]:
        """Returns up to `count` different rewordings of a query, all different from its text."""
        rng = random.Random(f"{self._key} {id_}")
        # A text that consists of an opener becomes empty.
        made = dict.fromkeys(["", normalize_text(text)])
        for _ in range(_ATTEMPTS):
            if len(made) > count + 1:
                break
            made[normalize_text(self._reworded(text, rng))] = None
        return list(made)[2:]

    def _reworded(self, text: str, rng: random.Random) -> str:
        question = self._opener.sub("", normalize_text(text)).strip(_MARKS).rstrip("啊")
        found = _TOPIC.fullmatch(question)
        if found and not _NO_TOPIC.match(found["topic"]) and rng.random() < _ORDER_SHARE:
            topic, rest = (self._replaced(found[name], rng) for name in ("topic", "rest"))
            made = rng.choice(self._orders).format(topic=topic, rest=rest)
        else:
            made = self._replaced(question, rng)
        if rng.random() < _ASKER_SHARE:
            made = rng.choice(self._asker(text)).format(made)
        if rng.random() < _CLOSER_SHARE:
            made = f"{made}，{rng.choice(self._closers)}"
        return made + ("？" if rng.random() < _MARK_SHARE else "")

    def _replaced(self, text: str, rng: random.Random) -> str:
        def replacement(found: re.Match[str]) -> str:
            if rng.random() < _WORD_SHARE:
                return rng.choice(self._words[found[0]])
            return found[0]

        return self._pattern.sub(replacement, text)

    def _asker(self, text: str) -> list[str]:
        return next(forms for words, forms in self._askers if any(w in text for w in words or [""]))


def reword(
    queries: Mapping[str, str],
    part: Part,
    *,
    versions: int = 1,
    seed: int = 0,
    terms: TermList | None = None,
) -> Iterator[Reworded]:
    """Yields rewordings of queries, given their texts by id.

    The id of version n of a query is `ID-n`, from 1. A query to which no rule applies is left out.
    """
    rewording = Rewording(part, seed, terms)
    for id_, text in queries.items():
        for number, made in enumerate(rewording.versions(id_, text, versions), start=1):
            yield Reworded(f"{id_}-{number}", made, id_)


def write_reworded(
    queries: Path, output: Path, reword: Callable[[Mapping[str, str]], Iterable[Reworded]]
) -> dict[str, int]:
    """Writes rewordings of queries as JSONL, which stages of training read as pairs.

    `queries` are JSONL with `_id`, `text` and, where the text is a rewording itself,
    `original_text`. A record of `output` has `_id`, `text`, and of the query `original`, its id,
    and `original_text`, by default its text. Returns the numbers of `queries` and of `rewordings`.
    """
    texts = read_queries(queries)
    made = list(reword(texts))
    meant = {
        record_id(queries, number, record): record.get("original_text")
        for number, record in read_jsonl(queries)
    }
    with writing_in(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        records = (
            {
                "_id": m.id,
                "text": m.text,
                "original": m.original,
                "original_text": meant[m.original] or texts[m.original],
            }
            for m in made
        )
        write_jsonl(output, records)
    return {"queries": len(texts), "rewordings": len(made)}


def _replacements(rules: list[dict[str, str]], part: Part) -> dict[str, list[str]]:
    return {word: rule[part].split() for rule in rules for word in rule["of"].split()}


def _words_by_term(terms: TermList) -> dict[str, list[str]]:
    words: dict[str, list[str]] = {}
    for word, meant in terms.terms.items():
        for term in meant:
            if term != word:
                words.setdefault(term, []).append(word)
    return words


def _any_of(words: Iterable[str]) -> str:
    """Returns a regular expression that matches the longest of some words."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


# The common characters of GB 2312, "level 1".
_COMMON = [
    bytes([0xA0 + row, 0xA0 + cell]).decode("gb2312")
    for row in range(16, 56)
    for cell in range(1, 95 if row < 55 else 90)
]
# Sounds that many speakers do not distinguish.
_MERGED = (("zh", "z"), ("ch", "c"), ("sh", "s"), ("ing", "in"), ("eng", "en"), ("ang", "an"))
_INITIALS = {"l": "n", "f": "h", "r": "l"}
# Share of the errors of each kind; the rest are characters of the same syllable.
_MERGED_SHARE, _OMITTED_SHARE, _DOUBLED_SHARE = 0.25, 0.12, 0.05


def misspell(
    queries: Mapping[str, str], *, errors: int = 1, versions: int = 1, seed: int = 0
) -> Iterator[Reworded]:
    """Yields queries with up to `errors` wrong characters, given their texts by id.

    Errors are those of typing and of speech recognition. A Chinese input method offers the
    characters of a syllable, so a wrong one sounds like the right one. Where speakers do not
    distinguish sounds, as n and l or in and ing, its syllable differs too.

    The id of version n of a query is `ID-en`, from 1. A query without Chinese characters is left
    out. Random choices follow from `seed`; those of a query depend on its id alone.
    """
    for id_, text in queries.items():
        rng = random.Random(f"{seed} {id_}")
        made: dict[str, None] = {}
        for _ in range(_ATTEMPTS):
            if len(made) == versions:
                break
            wrong = with_errors(text, rng.randint(1, errors), rng)
            if wrong != text:
                made[wrong] = None
        for number, wrong in enumerate(made, start=1):
            yield Reworded(f"{id_}-e{number}", wrong, id_)


def with_errors(text: str, count: int, rng: random.Random) -> str:
    """Returns a text with `count` wrong characters, fewer if it has fewer Chinese characters."""
    characters = list(text)
    places = [place for place, character in enumerate(text) if character in _syllables()]
    for place in rng.sample(places, min(count, len(places))):
        characters[place] = _wrong(text[place], rng)
    return "".join(characters)


def _wrong(character: str, rng: random.Random) -> str:
    kind = rng.random()
    if kind < _OMITTED_SHARE:
        return ""
    if kind < _OMITTED_SHARE + _DOUBLED_SHARE:
        return character * 2
    syllable = _syllables()[character]
    merged = kind < _OMITTED_SHARE + _DOUBLED_SHARE + _MERGED_SHARE
    same = _same_sound(_merged)[_merged(syllable)] if merged else _same_sound(str)[syllable]
    others = [other for other in same if other != character]
    return rng.choice(others) if others else character


@cache
def _syllables() -> dict[str, str]:
    """Returns the syllable of each common character, without tone."""
    from pypinyin import lazy_pinyin

    return {character: lazy_pinyin(character)[0] for character in _COMMON}


@cache
def _same_sound(sound: Callable[[str], str]) -> dict[str, list[str]]:
    """Returns the common characters by the sound of their syllables."""
    groups: dict[str, list[str]] = {}
    for character, syllable in _syllables().items():
        groups.setdefault(sound(syllable), []).append(character)
    return groups


def _merged(syllable: str) -> str:
    for sound, other in _MERGED[:3]:
        if syllable.startswith(sound):
            syllable = other + syllable[len(sound) :]
    for sound, other in _MERGED[3:]:
        if syllable.endswith(sound):
            syllable = syllable[: -len(sound)] + other
    return _INITIALS.get(syllable[0], syllable[0]) + syllable[1:]
