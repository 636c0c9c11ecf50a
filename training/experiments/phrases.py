"""Synthetic texts for alignment.

A query encoder of few layers must see words that are rare in questions. Templates are filled with
words of jieba's dictionary (MIT) and of given texts; spans of these texts are extracted, joined,
and their words replaced by others of the same class. `phrases.yaml` holds templates, word classes
and the share of each kind of text. The texts need not be true: the training target is the document
encoder's vector of the text.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import jieba

from core.files import writing_in
from core.records import parse_yaml, write_jsonl
from core.text import normalize_text
from training.data import read_dev, read_examples
from training.recipe import Recipe

LENGTHS = SHORTEST, LONGEST = 4, 60

_SETTINGS = Path(__file__).with_name("phrases.yaml")
_SLOT = re.compile(r"\{(\w+)\}")
_MARK = re.compile(r"[。！？!?；;，,、\s]")
_CHINESE = re.compile(r"[\u4e00-\u9fff]{2,8}")
# Part-of-speech tags that are skipped: names of people and places, numerals, single characters.
_SKIPPED_TAGS = ("nr", "ns", "m", "zg", "g", "x")
# Minimum number of occurrences in the texts for a word to be added to the dictionary's.
_MIN_COUNT = 3
# Share of a class's words that are sampled from the common words in `phrases.yaml`.
_COMMON_SHARE = 0.4
# Share of words to replace in a span.
_REPLACED_SHARE = 0.35

# Words and their cumulative weights.
_Words = tuple[list[str], list[float]]


class Phrases:
    """Generator of synthetic texts, of words and spans of the given texts.

    Args:
        lengths: Minimum and maximum number of characters. If the minimum is above 4, phrases are
            joined until they reach a random length between the two.
    """

    def __init__(self, texts: Sequence[str], seed: int, lengths: tuple[int, int] = LENGTHS) -> None:
        settings: dict[str, Any] = parse_yaml(_SETTINGS.read_text(encoding="utf-8"))
        self._rng = random.Random(seed)
        self._shortest, self._longest = lengths
        self._texts = [text for text in texts if len(text) >= SHORTEST]
        self._forms = settings["forms"].splitlines()
        self._cases = settings["cases"].splitlines()
        self._common: dict[str, list[str]] = {
            name: words.split() for name, words in settings["words"].items()
        }
        self._endings: dict[str, str] = {
            ending: name for name, words in settings["endings"].items() for ending in words.split()
        }
        every = self._counts()
        found: dict[str, dict[str, int]] = {name: {} for name in settings["endings"]}
        for word, count in every.items():
            if name := self.word_class(word):
                found[name][word] = count
        self._rare = {name: _flattened(counts) for name, counts in found.items() if counts}
        self._every = _flattened(every)
        makers: dict[str, Callable[[], str]] = {
            "forms": lambda: self._filled(self._forms),
            "cases": lambda: self._filled(self._cases),
            "keywords": self._keywords,
            "spans": self._span,
            "joined": self._joined,
            "replaced": self._replaced,
        }
        self._makers = [makers[name] for name in settings["shares"]]
        self._shares = list(settings["shares"].values())

    def __iter__(self) -> Iterator[str]:
        """Yields distinct texts without end."""
        made: set[str] = set()
        while True:
            text = self._phrase()
            if self._shortest > SHORTEST:
                length = self._rng.randint(self._shortest, self._longest)
                while len(text) < length:
                    text = self._join(text, self._phrase())
            text = normalize_text(text)[: self._longest]
            if len(text) >= self._shortest and text not in made:
                made.add(text)
                yield text

    def _phrase(self) -> str:
        (make,) = self._rng.choices(self._makers, self._shares)
        return make()

    def _counts(self) -> dict[str, int]:
        """Returns the words to sample and their frequencies."""
        counts: dict[str, int] = {}
        with jieba.get_dict_file() as file:
            for line in file.read().decode("utf-8").splitlines():
                word, count, tag = line.split()
                if _CHINESE.fullmatch(word) and not tag.startswith(_SKIPPED_TAGS):
                    counts[word] = int(count)
        seen = Counter(word for text in self._texts for word in jieba.cut(text))
        # Words of the texts count a hundredfold: the texts are of the domain that is searched.
        for word, count in seen.items():
            if count >= _MIN_COUNT and _CHINESE.fullmatch(word):
                counts[word] = counts.get(word, 0) + 100 * count
        return counts

    def word_class(self, word: str) -> str | None:
        """Returns the class of a word by its longest known ending, or None."""
        endings = (word[start:] for start in range(len(word)))
        return next((self._endings[end] for end in endings if end in self._endings), None)

    def _word(self, name: str) -> str:
        rng = self._rng
        if name == "number":
            return str(rng.randint(1, 90))
        if name == "digit":
            return rng.choice((str(rng.randint(1, 10)), rng.choice("一二三四五六七八九十两半")))
        if name == "word":
            return self._drawn(self._every)
        common, rare = self._common.get(name), self._rare.get(name)
        if common and (rare is None or rng.random() < _COMMON_SHARE):
            return rng.choice(common)
        return self._drawn(rare or self._every)

    def _drawn(self, words: _Words) -> str:
        return self._rng.choices(words[0], cum_weights=words[1])[0]

    def _filled(self, forms: list[str]) -> str:
        return _SLOT.sub(lambda slot: self._word(slot[1]), self._rng.choice(forms))

    def _keywords(self) -> str:
        names = self._rng.choices(["word", *self._endings.values()], k=self._rng.randint(1, 4))
        separator = self._rng.choice((" ", "", "，", "、", "和"))
        return separator.join(self._word(name) for name in names)

    def _span(self) -> str:
        """Returns a span of a text, from punctuation to punctuation or from a random position."""
        text, rng = self._rng.choice(self._texts), self._rng
        length = rng.randint(SHORTEST, LONGEST)
        starts = [0, *(mark.end() for mark in _MARK.finditer(text[:-SHORTEST]))]
        if rng.random() < 0.3:
            starts = list(range(max(1, len(text) - SHORTEST)))
        start = rng.choice(starts)
        part = text[start : start + length].lstrip("。！？!?；;，,、 ")
        marks = [mark.start() for mark in _MARK.finditer(part, SHORTEST)]
        return part[: marks[-1]] if marks and rng.random() < 0.7 else part

    def _joined(self) -> str:
        first = self._rng.choice((self._span, lambda: self._filled(self._cases)))()
        second = self._rng.choice((self._span, lambda: self._filled(self._forms)))()
        first = first[: self._rng.randint(SHORTEST, LONGEST)].rstrip("，。")
        return self._join(first, second)

    def _join(self, first: str, second: str) -> str:
        return self._rng.choice(("，", "，", "。", "？", " ", "")).join((first, second))

    def _replaced(self) -> str:
        """Returns a span of a text with words replaced by others of their class."""
        words = []
        for word in jieba.cut(self._span()):
            if _CHINESE.fullmatch(word) and self._rng.random() < _REPLACED_SHARE:
                word = self._word(self.word_class(word) or "word")
            words.append(word)
        return "".join(words)


def _flattened(counts: Mapping[str, int]) -> _Words:
    """Returns words with weights that are square roots of frequencies, to raise rare words."""
    return list(counts), list(accumulate(max(n, 1) ** 0.5 for n in counts.values()))


def write(
    recipe: Recipe, path: Path, count: int, seed: int, lengths: tuple[int, int] = LENGTHS
) -> None:
    """Writes synthetic texts made from the training examples of a recipe, as JSONL; see `Phrases`.

    Held-out queries and their documents are not used, nor are data entries of single texts and of
    mined triples.
    """
    held_out = frozenset(read_dev(recipe.dev).queries.values() if recipe.dev else ())
    entries = [entry for stage in recipe.stages for entry in stage.data]
    entries = [entry for entry in entries if entry.texts is None and entry.mined is None]
    examples, _ = read_examples(entries, held_out, {})
    texts = dict.fromkeys(text for e in examples for text in (e.query, *e.positives))
    with writing_in(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        made = islice(Phrases(list(texts), seed, lengths), count)
        records = ({"_id": f"{seed}-{n}", "text": text} for n, text in enumerate(made))
        write_jsonl(path, records)
